"""qwen3_vl (Qwen3-VL): the decoder of Qwen3 with positions of three axes, and a vision tower with taps (see tower.py).

Source: transformers' Qwen3-VL configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core import Sampling, Thinking
from . import qwen3
from .decoder import build, destinations
from .shape import DecoderConfig
from .spec import ConfigReader
from .vision_config import PREFIXES as BESIDE

__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config", "with_axes"]

SECTIONS = (24, 20, 20)  # where the config has none


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_vl config.json (its text part); raises ModelError for what would change the arithmetic."""
    return with_axes(config, qwen3.read_config(without_rope(config)))


def without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its position settings: they have axes, which text-only families refuse."""
    return {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}


def with_axes(config: Mapping[str, Any], plain: DecoderConfig) -> DecoderConfig:
    """The decoder with positions of three axes, interleaved."""
    read = ConfigReader(config)
    axes = read.axes(plain.rotary_dim // 2, SECTIONS, interleaved=True)
    theta, yarn, most = read.axes_rope(500000.0), read.yarn(), read.max_position()
    return replace(plain, rope_theta=theta, yarn=yarn, max_position=most, axes=axes)


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3-VL (model cards, 2025) for checkpoints without a generation_config.json."""
    if thinking == "on":
        return Sampling(1.0, 20, 0.95, 0.0, 0.0, 0.0, 1.0)
    return Sampling(0.7, 20, 0.8, 0.0, 1.5, 0.0, 1.0)
