"""qwen3: dense decoder with grouped-query attention, a norm per head on queries and keys, full rotary embedding,
SwiGLU.

Source: transformers' Qwen3 configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import Sampling, Thinking
from .decoder import build, destinations
from .shape import DecoderConfig, read_attention_only, read_widths
from .spec import ConfigReader

__all__ = ["build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3 config.json; raises ModelError for what would change the arithmetic."""
    read = ConfigReader(config)
    require_plain(read)
    layers = read.layers()
    read_attention_only(config, layers, "qwen3")
    widths = read_widths(read, None, read.integer("intermediate_size"))
    return DecoderConfig(
        widths=widths,
        layers=layers,
        max_position=read.max_position(),
        eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=read.rope_theta(10000.0),
        rotary_dim=widths.head_dim,
        tied=read.flag("tie_word_embeddings", False),
        yarn=read.yarn(),
    )


def require_plain(read: ConfigReader) -> None:
    """Refuse settings of Qwen3's attention and feed-forward that are not supported here."""
    read.require("hidden_act", "silu", "the gate of the feed-forward")
    read.require("attention_bias", False, "biases in attention")
    read.require("use_sliding_window", False, "a sliding attention window")
    read.require("partial_rotary_factor", 1.0, "a rotary embedding of whole heads")


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3 (model cards, 2025) for checkpoints without a generation_config.json."""
    if thinking == "off":
        return Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0)
    return Sampling(0.6, 20, 0.95, 0.0, 0.0, 0.0, 1.0)
