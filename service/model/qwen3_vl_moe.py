"""qwen3_vl_moe (Qwen3-VL-30B-A3B and up): Qwen3-VL with experts, which its checkpoints store column by column.

Source: transformers' Qwen3-VL-MoE configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen3_moe
from .decoder import build, destinations
from .qwen3_vl import default_sampling, with_axes, without_rope
from .shape import DecoderConfig
from .vision_config import PREFIXES as BESIDE

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_vl_moe config.json (its text part); raises ModelError for what would change the
    arithmetic.
    """
    named = {**without_rope(config), "norm_topk_prob": True}  # the weights of the chosen experts always sum up to 1
    plain = with_axes(config, qwen3_moe.read_config(named))
    experts = plain.experts
    return replace(plain, experts=experts and replace(experts, by_columns=True))
