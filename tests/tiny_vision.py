"""Tiny random vision checkpoints, made and saved by transformers, and transformers' own results for them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from oracle import load_model
from pictures import QWEN2_5_VL, QWEN3_VL
from published import change_tensors
from tiny_families import FAMILIES, _stir, transformers_module
from tiny_models import small_tokenizer

IMAGE, VIDEO, START, END = 500, 501, 502, 503
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
# Heads of 36: a quarter of them is odd. The square of learned positions is 8 x 8.
_TOWER = {
    "depth": 4,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_WINDOWED = {key: value for key, value in _TOWER.items() if key != "num_position_embeddings"} | {
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_AXES = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
# The class name before Config, the text config, the tower's config.
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        _TEXT | {"head_dim": 32, "rope_parameters": _AXES},
        _TOWER | {"deepstack_visual_indexes": [0, 1, 3]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _TEXT
        | {
            "head_dim": 32,
            "rope_parameters": _AXES,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        _TOWER | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        _WINDOWED,
    ),
    **{name: (FAMILIES[name][0], FAMILIES[name][2], _TOWER) for name in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")},
}


def write_seeing(
    folder: Path,
    family: str,
    *,
    seed: int = 1,
    text: dict[str, Any] | None = None,
    tokens: dict[str, int] | None = None,
) -> Path:
    """A checkpoint of `family` with its tower and its preprocessor_config.json, in FP32, every parameter perturbed by
    `seed`.
    """
    transformers = transformers_module()
    torch.manual_seed(seed)
    stem, values, tower = SEEING[family]
    config = getattr(transformers, f"{stem}Config")(
        text_config=values | (text or {}), vision_config=tower, **(tokens or _TOKENS)
    )
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    with torch.no_grad():
        _stir(model, torch.Generator().manual_seed(seed))
        model.eval().save_pretrained(folder)
    document = QWEN2_5_VL | {"min_pixels": 784} if family == "qwen2_5_vl" else QWEN3_VL | {"size": _AREAS}
    if family == "qwen3_vl_moe":  # the published layout, which transformers reads but does not write
        change_tensors(folder, turn_experts)
    (folder / "preprocessor_config.json").write_text(json.dumps(document))
    return folder


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_seer(folder: Path, family: str = "qwen3_vl") -> Path:
    """As `write_seeing`, with a tokenizer and a chat template, for conversations."""
    tokenizer = small_tokenizer()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens(marks)
    start, end, image, video = (tokenizer.token_to_id(mark) for mark in marks)
    tokens = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    turn = tokenizer.token_to_id("<|im_end|>")
    write_seeing(folder, family, text={"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": turn}, tokens=tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


_AREAS = {"shortest_edge": 1024, "longest_edge": 16777216}


def turn_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Switch experts between column and row storage."""
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()


class Oracle:
    """transformers' model over a checkpoint: its tower and the whole model, for pictures with the same
    preprocessing.
    """

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        document = json.loads((folder / "preprocessor_config.json").read_text())
        kept = {key: value for key, value in document.items() if key not in ("processor_class", "image_processor_type")}
        module = importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
        self.processor = module.Qwen2VLImageProcessor(**kept)

    @property
    def tower(self) -> Any:
        return self.model.model.visual

    def inputs(self, images: list[Any]) -> dict[str, torch.Tensor]:
        return dict(self.processor(images=images, return_tensors="pt"))
