"""Tiny checkpoints of every Qwen family, made and saved by transformers: the right tensors, random numbers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from onedesk.service.setup.launch_comfyui import OperatorsFirst

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_HYBRID = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_NGRAM = {
    "output_gate_type": "sigmoid",
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 1009,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# The names of transformers' classes before "ForCausalLM" and "Config", and the config's arguments.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", "Qwen2Config", _COMMON | {"intermediate_size": 128} | _rope(1e6)),
    "qwen3": ("Qwen3", "Qwen3Config", _COMMON | {"intermediate_size": 128, "tie_word_embeddings": True} | _rope(1e6)),
    "qwen3_moe": (
        "Qwen3Moe",
        "Qwen3MoeConfig",
        _COMMON | _EXPERTS | {"intermediate_size": 128, "mlp_only_layers": [1]} | _rope(1e6),
    ),
    "qwen3_next": (
        "Qwen3Next",
        "Qwen3NextConfig",
        _COMMON | _LINEAR | _SHARED | {"intermediate_size": 128} | _rope(1e7, partial_rotary_factor=0.25),
    ),
    "qwen3_5": (
        "Qwen3_5",
        "Qwen3_5TextConfig",
        _COMMON | _LINEAR | {"intermediate_size": 128, "tie_word_embeddings": True} | _HYBRID,
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", _COMMON | _LINEAR | _SHARED | _HYBRID),
    "qwen4_exp": ("Qwen4Exp", "Qwen4ExpTextConfig", _COMMON | _LINEAR | _SHARED | _HYBRID | _NGRAM),
}
WITH_VISION = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")


def transformers_module() -> Any:
    """transformers, imported after torchvision's operators are declared where necessary."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        sys.meta_path.insert(0, OperatorsFirst())
    return importlib.import_module("transformers")


def write_family(folder: Path, family: str, *, vision: bool = False, seed: int | None = None, **changes: Any) -> Path:
    """A checkpoint of `family` in FP32 under `folder`, saved by transformers; with `vision` the whole multimodal model.

    With `seed` every parameter is perturbed: initial matrices are so small that scores hardly differ, and initial norms
    are all equal.
    """
    transformers = transformers_module()
    if seed is not None:
        torch.manual_seed(seed)
    stem, config_name, values = FAMILIES[family]
    config = getattr(transformers, config_name)(**values | changes)
    if vision:
        tokens = {
            "image_token_id": 500,
            "video_token_id": 501,
            "vision_start_token_id": 502,
            "vision_end_token_id": 503,
        }
        whole = getattr(transformers, f"{stem}Config")(text_config=config.to_dict(), vision_config=_VISION, **tokens)
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(whole)
    else:
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
    with torch.no_grad():
        if seed is not None:
            _stir(model, torch.Generator().manual_seed(seed))
        model.eval().save_pretrained(folder)
    return folder


def _stir(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(noise * 0.1)
        else:
            parameter.copy_(noise * (0.2 if "conv1d" in name else 0.7 * parameter.shape[-1] ** -0.5))
