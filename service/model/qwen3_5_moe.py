"""qwen3_5_moe (Qwen3.5 and later with experts): as qwen3_5, with experts and a shared one in every layer.

Source: transformers' Qwen3_5Moe configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder import build, destinations
from .hybrid import read_hybrid_decoder
from .qwen3_5 import BESIDE, default_sampling
from .shape import DecoderConfig, read_experts
from .spec import ConfigReader

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_5_moe config.json (its text part); raises ModelError for what would change the
    arithmetic.
    """
    read = ConfigReader(config)
    read.require("norm_topk_prob", True, "the weights of the chosen experts sum up to 1")
    return read_hybrid_decoder(config, fused=False, experts=read_experts(read, shared=True, normalized=True))
