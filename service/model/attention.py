"""Attention layers: grouped queries with a norm per head (Qwen3), and with an output gate (its hybrid successors)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..kernels.forward_batch import NormWeight, PackedPrompts, RotaryTable
from ..kernels.operands import AttentionHeads, AttentionOperands, LayerPart
from ..quant.weight import Weight
from .layers import Pass
from .named import NamedWeights
from .shape import DecoderConfig, layer_norm
from .spec import Destination, Source

GATED_BUFFER = "projected"


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The required tensors. Queries, keys and values are one matrix; gated heads have their queries, then their
    gates.
    """
    w, key, part = config.widths, f"{layer}.", layer + 1
    name = f"model.layers.{layer}.self_attn."
    q, kv = w.heads * w.head_dim, w.kv_heads * w.head_dim
    heads = (("q", 2 * q if config.gated else q), ("k", kv), ("v", kv))
    yield from layer_norm(config, layer, "attention_norm", "input_layernorm")
    yield Destination(key + "qkv", tuple(Source(f"{name}{p}_proj.weight", (rows, w.hidden)) for p, rows in heads), part)
    if config.bias:
        biases = tuple(Source(f"{name}{p}_proj.bias", (rows,)) for p, rows in heads)
        yield Destination(key + "qkv_bias", biases, part, wide=True)
    for which in ("q_norm", "k_norm") if config.head_norms else ():
        yield Destination(
            key + which, (Source(f"{name}{which}.weight", (w.head_dim,)),), part, wide=True, turn=config.norm_turn
        )
    yield Destination(key + "output", (Source(name + "o_proj.weight", (w.hidden, q)),), part)


def build(
    config: DecoderConfig, weights: NamedWeights, layer: int, index: int, rotary: RotaryTable
) -> Attention | GatedAttention:
    """The layer over its weights; `index` counts only the layers that store keys and values."""
    at = weights.of(layer)
    kind = GatedAttention if config.gated else Attention
    norm = None if config.streams else at.norm("attention_norm", config.eps)
    return kind(heads(config, at, rotary), index, norm, at["qkv"], at["output"])


def heads(config: DecoderConfig, at: NamedWeights, rotary: RotaryTable) -> AttentionHeads:
    """The computation between a layer's projections; `at`: its weights."""
    q_norm, k_norm = (at.norm(which, config.eps) if config.head_norms else None for which in ("q_norm", "k_norm"))
    return AttentionHeads(config.widths.shape, q_norm, k_norm, rotary, at.plain("qkv_bias") if config.bias else None)


@dataclass(slots=True)
class Attention:
    """Pre-norm grouped-query attention, with a norm per head on queries and keys (Qwen3) or with biases (Qwen2).

    qkv [q + k + v rows, hidden], output [hidden, q rows].
    """

    heads: AttentionHeads
    index: int
    norm: NormWeight | None
    qkv: Weight
    output: Weight

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.qkv, self.output, self.heads

    def run(self, at: Pass, /) -> None:
        kernels, views = at.kernels, at.views
        qkv, mixed = views["qkv"], views["mixed"]
        at.project(self.norm, self.qkv, qkv)
        self._attend(at, qkv, mixed)
        kernels.linear_add(mixed, self.output, at.target, views["normed"])

    def _attend(self, at: Pass, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        own = self._rows(at, qkv, mixed)
        if not isinstance(at.batch, PackedPrompts):
            at.kernels.attend(self.heads, own)
            return
        for rows, chunk in at.batch.chunks:
            at.kernels.attend(self.heads, replace(own, qkv=qkv[rows], batch=chunk, out=mixed[rows]))

    def _rows(self, at: Pass, qkv: torch.Tensor, mixed: torch.Tensor) -> AttentionOperands:
        return AttentionOperands(qkv, at.cache.keys[self.index], at.cache.values[self.index], at.batch, mixed)


@dataclass(slots=True)
class GatedAttention(Attention):
    """Attention with a gate per query element: the mixed values are multiplied by sigmoid(gate) (Qwen3-Next).

    qkv [2 * q + k + v rows, hidden]: per head its queries, then its gates.
    """

    def run(self, at: Pass, /) -> None:
        kernels, views = at.kernels, at.views
        projected, qkv, mixed = views[GATED_BUFFER], views["qkv"], views["mixed"]
        at.project(self.norm, self.qkv, projected)
        kernels.split_gates(projected, self.heads.shape, qkv, mixed)
        self._attend(at, qkv, mixed)
        kernels.apply_gates(projected, self.heads.shape, qkv, mixed)
        kernels.linear_add(mixed, self.output, at.target, views["normed"])
