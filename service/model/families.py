"""Maps each model_type to its module; a family is imported at its first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

from ..errors import ModelError, brief
from ..loader.checkpoint import Checkpoint
from ..loader.header import TensorInfo
from . import draft as drafts
from .decoder import drafting
from .ngram import check_stored
from .shape import DecoderConfig
from .vision_config import PREFIXES as TOWERS
from .vision_config import VisionConfig, read_vision, sees

_WRITING = ("qwen2", "qwen3", "qwen3_moe", "qwen3_next")
FAMILIES = {
    name: name for name in (*_WRITING, "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
}
# Other names for the same config and tensors, in some re-uploads.
ALIASES = {"qwen3_8_flash_next": "qwen4_exp"}
# Prefixes that a checkpoint may use for "model."; a checkpoint with a vision tower nests the text network.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# The file that marks a sentence-transformers model.
SENTENCE_TRANSFORMERS = "modules.json"
HEADS = ("language_model.lm_head.",)
QUANTIZATION = "quantization_config"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text network's part of a config.json: text_config where it exists, completed from the outer level.

    The outer level decides whether the head is tied to the embedding, where it says so.
    """
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json has text_config = {brief(inner)}; an object is needed")
    kind = inner.get("model_type", f"{config.get('model_type')}_text")
    outer = {key: value for key, value in config.items() if not isinstance(value, Mapping) or key == QUANTIZATION}
    tied = config.get("tie_word_embeddings")
    return {**outer, **inner, "model_type": kind} | ({} if tied is None else {"tie_word_embeddings": tied})


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """The module for a config.json's model_type; the ModelError names the type and the supported ones."""
    kind = _kind(config)
    if kind in FAMILIES:
        return import_module(f"{__package__}.{FAMILIES[kind]}")
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    named = f" ({first})" if isinstance(first, str) and len(first) <= 100 and first.isprintable() else ""
    raise ModelError(f"model_type {brief(kind)}{named} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def describe(config: Mapping[str, Any]) -> DecoderConfig:
    """The family's description of a config.json. Raises ModelError."""
    described: DecoderConfig = family_of(config).read_config(text_config(config))
    return described


def read_family(checkpoint: Checkpoint, *, draft: bool = True) -> tuple[ModuleType, DecoderConfig, Checkpoint]:
    """The module, its description of the config, and the checkpoint's text network under the names that the module
    uses.

    Includes the multi-token prediction layer where the checkpoint has it, unless `draft` is false.
    """
    family, text = family_of(checkpoint.config), text_config(checkpoint.config)
    config: DecoderConfig = family.read_config(text)
    beside: tuple[str, ...] = getattr(family, "BESIDE", ())
    prefix = next(
        (p for p in PREFIXES if any(name.startswith(f"{p}embed_tokens.") for name in checkpoint.tensors)), "model."
    )
    tensors = {}
    for name, info in checkpoint.tensors.items():
        known = _known_name(name, prefix)
        if known.startswith(drafts.PREFIX) or not name.startswith(beside):
            tensors[known] = info if known == name else replace(info, name=known)
    if drafts.PREFIX in beside:
        if draft and drafts.is_there(text, tensors, drafting(config), checkpoint.name):
            config = drafts.with_draft(config)
        else:
            tensors = {name: info for name, info in tensors.items() if not name.startswith(drafts.PREFIX)}
    if not config.tied and _is_headless(checkpoint, prefix, tensors):
        config = replace(config, headless=True)
    known_config = dict(text)
    if QUANTIZATION in known_config:
        known_config[QUANTIZATION] = _known_names(known_config[QUANTIZATION], prefix)
    text_network = replace(checkpoint, config=MappingProxyType(known_config), tensors=MappingProxyType(tensors))
    if config.ngrams is not None:
        check_stored(config, text_network)
    return family, config, text_network


def _is_headless(checkpoint: Checkpoint, prefix: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the checkpoint is an embedding model, published without an output matrix: the bare network under its own
    names, or a sentence-transformers folder. Any other checkpoint without that matrix is incomplete.
    """
    if any(name.startswith("lm_head.") for name in tensors):
        return False
    return prefix == "" or (checkpoint.folder / SENTENCE_TRANSFORMERS).is_file()


def read_tower(checkpoint: Checkpoint) -> tuple[VisionConfig, Checkpoint] | None:
    """The vision part of a model and its tower under the names of tower.py; None where config or files have none.

    Raises ModelError for a config.json that describes a tower wrongly.
    """
    kind = _kind(checkpoint.config)
    prefix = next((p for p in TOWERS if any(name.startswith(p) for name in checkpoint.tensors)), None)
    if prefix is None or not sees(checkpoint.config, kind):
        return None
    vision = read_vision(checkpoint.config, kind, describe(checkpoint.config).widths.hidden)
    tensors = {
        name.removeprefix(prefix): replace(info, name=name.removeprefix(prefix))
        for name, info in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    config = dict(checkpoint.config)
    if QUANTIZATION in config:
        config[QUANTIZATION] = _without(config[QUANTIZATION], prefix)
    return vision, replace(checkpoint, config=MappingProxyType(config), tensors=MappingProxyType(tensors))


def _kind(config: Mapping[str, Any]) -> str:
    """The model_type of the text network, under the name that has a module."""
    kind = str(text_config(config).get("model_type")).removesuffix("_text")
    return ALIASES.get(kind, kind)


def _without(value: Any, prefix: str) -> Any:
    """A quantization's layer names without the prefix."""
    if isinstance(value, str):
        return value.removeprefix(prefix)
    if isinstance(value, list):
        return [_without(item, prefix) for item in value]
    if isinstance(value, Mapping):
        return {_without(key, prefix): _without(item, prefix) for key, item in value.items()}
    return value


def _known_names(value: Any, prefix: str) -> Any:
    """A quantization's layer names as the families spell them."""
    if isinstance(value, str):
        return _known_name(value, prefix) if prefix else value
    if isinstance(value, list):
        return [_known_names(item, prefix) for item in value]
    if isinstance(value, Mapping):
        return {_known_names(key, prefix): _known_names(item, prefix) for key, item in value.items()}
    return value


def _known_name(name: str, prefix: str) -> str:
    for known in PREFIXES:
        if name.startswith(known + drafts.PREFIX):
            return name.removeprefix(known)
    for head in HEADS:
        if name.startswith(head):
            return "lm_head." + name.removeprefix(head)
    if name.startswith("lm_head."):
        return name
    return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name
