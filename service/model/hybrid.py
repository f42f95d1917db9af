"""What the families share that combine gated delta nets with gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attention import GATED_BUFFER
from .layers import BufferSpec
from .shape import DecoderConfig, ExpertShape, read_delta, read_hybrid, read_widths
from .spec import ConfigReader

# Defaults: the head width, and the pairs per axis of a picture's positions.
HEAD_DIM = 256
SECTIONS = (11, 11, 10)


def read_hybrid_decoder(
    config: Mapping[str, Any],
    *,
    fused: bool,
    experts: ExpertShape | None = None,
    dense: frozenset[int] = frozenset(),
    sparse_step: int = 1,
) -> DecoderConfig:
    """Read and check all but the experts; `fused` as in DeltaShape. Raises ModelError for settings that would change
    the arithmetic.
    """
    read = ConfigReader(config)
    read.require("hidden_act", "silu", "the gates of feed-forward and delta net")
    read.require("attention_bias", False, "biases in attention")
    read.require("attn_output_gate", True, "a gate behind attention")
    read.require("output_gate_type", "silu", "the gate behind a delta net", "swish")
    layers, hidden = read.layers(), read.integer("hidden_size")
    kinds, interval = read_hybrid(config, read, layers)
    delta = read_delta(read, fused=fused)
    intermediate = read.integer("intermediate_size") if experts is None or dense or sparse_step > 1 else 0
    buffers = (*delta.buffers(), *(experts.buffers(hidden) if experts else ()))
    plain = read_widths(read, HEAD_DIM, intermediate)
    projected = BufferSpec(GATED_BUFFER, plain.shape.queries + plain.shape.qkv)
    theta, rotary_dim = read.partial_rope(plain.head_dim, 10000.0)
    return DecoderConfig(
        widths=read_widths(read, HEAD_DIM, intermediate, projected, *buffers),
        layers=layers,
        max_position=read.max_position(),
        eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        tied=read.flag("tie_word_embeddings", False),
        axes=() if fused else read.axes(rotary_dim // 2, SECTIONS, interleaved=True),
        yarn=read.yarn(),
        kinds=kinds,
        interval=interval,
        gated=True,
        delta=delta,
        experts=experts,
        dense=dense,
        sparse_step=sparse_step,
    )
