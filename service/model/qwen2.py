"""qwen2 (Qwen2, Qwen2.5): dense decoder with biases on queries, keys and values, no norm per head, SwiGLU.

Source: transformers' Qwen2 configuration and the published checkpoints' tensor names.
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
    """Read and check a qwen2 config.json; raises ModelError for what would change the arithmetic."""
    read = ConfigReader(config)
    return read_biased(config, read, read.rope_theta(10000.0), "qwen2")


def read_biased(config: Mapping[str, Any], read: ConfigReader, theta: float, model_type: str) -> DecoderConfig:
    """The decoder of Qwen2, with a rotary embedding of base `theta`."""
    read.require("hidden_act", "silu", "the gate of the feed-forward")
    read.require("use_sliding_window", False, "a sliding attention window")
    layers = read.integer("num_hidden_layers")
    read_attention_only(config, layers, model_type)
    widths = read_widths(read, None, read.integer("intermediate_size"))
    return DecoderConfig(
        widths=widths,
        layers=layers,
        max_position=read.max_position(),
        eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rotary_dim=widths.head_dim,
        tied=read.flag("tie_word_embeddings", False),
        yarn=read.yarn(),
        bias=True,
        head_norms=False,
    )


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen2.5 (its generation_config.json, 2024) for checkpoints without one."""
    return Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.05)
