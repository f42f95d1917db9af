"""qwen3_moe: Qwen3 with experts instead of the feed-forward, in all layers or some.

Source: transformers' Qwen3Moe configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder import build, destinations
from .qwen3 import default_sampling, require_plain
from .shape import DecoderConfig, read_attention_only, read_experts, read_widths
from .spec import ConfigReader

__all__ = ["build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen3_moe config.json; raises ModelError for what would change the arithmetic."""
    read = ConfigReader(config)
    require_plain(read)
    layers = read.layers()
    read_attention_only(config, layers, "qwen3_moe")
    experts = read_experts(read, shared=False)
    dense, step = frozenset(read.numbers("mlp_only_layers")), read.integer("decoder_sparse_step", 1)
    intermediate = read.integer("intermediate_size") if dense or step > 1 else 0
    widths = read_widths(read, None, intermediate, *experts.buffers(read.integer("hidden_size")))
    return DecoderConfig(
        widths=widths,
        layers=layers,
        max_position=read.max_position(),
        eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=read.rope_theta(10000.0),
        rotary_dim=widths.head_dim,
        tied=read.flag("tie_word_embeddings", False),
        yarn=read.yarn(),
        experts=experts,
        dense=dense,
        sparse_step=step,
    )
