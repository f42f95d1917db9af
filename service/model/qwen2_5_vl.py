"""qwen2_5_vl (Qwen2.5-VL): the decoder of Qwen2 with positions of three axes, and a vision tower of its own (see
tower.py).

Source: transformers' Qwen2.5-VL configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .decoder import build, destinations
from .qwen2 import default_sampling, read_biased
from .shape import DecoderConfig
from .spec import ConfigReader
from .vision_config import PREFIXES as BESIDE

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen2_5_vl config.json (its text part); raises ModelError for what would change the
    arithmetic.
    """
    read = ConfigReader(config)
    plain = read_biased(config, read, read.axes_rope(1000000.0), "qwen2_5_vl")
    return replace(plain, axes=read.axes(plain.rotary_dim // 2, (), interleaved=False))
