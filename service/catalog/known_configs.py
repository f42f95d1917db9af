"""The configs of published models by name, as far as sizes depend on them, so that a plan needs no download.

All models of a name share one shape: Qwen3.6, 3.7 and 3.8 keep those of Qwen3.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool) -> dict[str, Any]:
    """config.json of a dense Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _hybrid(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> dict[str, Any]:
    """Three layers of linear attention for each of full attention: 16 key heads of 128, heads of 256."""
    return {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        **more,
    }


def _vision(width: int, depth: int, intermediate: int, out: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "depth": depth, "intermediate_size": intermediate, "out_hidden_size": out}
    sizes |= {"num_heads": 12 if width == 768 else 16}
    return sizes | {
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    }


def _with_vision(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, "vision_config": vision}


def _qwen3_5(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    intermediate: int,
    tied: bool,
    vision: tuple[int, int, int],
) -> dict[str, Any]:
    text = _hybrid(
        hidden, layers, heads, kv_heads, value_heads, intermediate_size=intermediate, mtp_num_hidden_layers=1
    )
    text |= {"model_type": "qwen3_5_text", "tie_word_embeddings": tied}
    return _with_vision(text, _vision(*vision, hidden))


def _experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width, **more}


FLASH_NEXT = _hybrid(
    2560,
    48,
    24,
    2,
    48,
    model_type="qwen4_exp_text",
    mtp_num_hidden_layers=1,
    **_experts(512, 10, 640, shared_expert_intermediate_size=640),
) | {
    "eos_token_id": 248044,
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "indexer_budget": 2048,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
}
_SMALL, _MIDDLE, _LARGE = (768, 12, 3072), (1024, 24, 4096), (1152, 27, 4304)

PUBLISHED: Mapping[str, Config] = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": qwen3(2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 12288, False),
    "Qwen3-30B-A3B": qwen3(2048, 48, 32, 4, 6144, False) | {"model_type": "qwen3_moe"} | _experts(128, 8, 768),
    "Qwen3-Next-80B-A3B": _hybrid(
        2048,
        48,
        16,
        2,
        32,
        model_type="qwen3_next",
        vocab_size=151936,
        **_experts(512, 10, 512, shared_expert_intermediate_size=512),
    ),
    "Qwen3.5-0.8B": _qwen3_5(1024, 24, 8, 2, 16, 3584, True, _SMALL),
    "Qwen3.5-2B": _qwen3_5(2048, 24, 8, 2, 16, 6144, True, _MIDDLE),
    "Qwen3.5-4B": _qwen3_5(2560, 32, 16, 4, 32, 9216, True, _MIDDLE),
    "Qwen3.5-9B": _qwen3_5(4096, 32, 16, 4, 32, 12288, False, _LARGE),
    "Qwen3.5-27B": _qwen3_5(5120, 64, 24, 4, 48, 17408, False, _LARGE),
    "Qwen3.5-35B-A3B": _with_vision(
        _hybrid(2048, 40, 16, 2, 32, model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1)
        | _experts(256, 8, 512, shared_expert_intermediate_size=512),
        _vision(*_LARGE, 2048),
    ),
    "Qwen3.8-Flash-Next": _with_vision(FLASH_NEXT, _vision(*_LARGE, 2560)),
}
# Later releases of the same shape.
_SAME = {
    "qwen3.6-27b": "Qwen3.5-27B",
    "qwen3.7-27b": "Qwen3.5-27B",
    "qwen3.8-27b": "Qwen3.5-27B",
    "qwen3.6-35b-a3b": "Qwen3.5-35B-A3B",
}
_TAILS = re.compile(r"(-(instruct|thinking|base|chat|2507|fp8|nvfp4|bf16|int4|awq|gptq))+$")


def published_name(text: str) -> str | None:
    """The name in PUBLISHED that `text` refers to, ignoring the owner and suffixes for tuning or packing; None if there
    is none.
    """
    plain = _TAILS.sub("", text.rsplit("/", 1)[-1].lower())
    names = {name.lower(): name for name in PUBLISHED} | _SAME
    return names.get(plain)
