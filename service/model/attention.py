"""Attention layers: grouped queries with a norm a head, as Qwen3 has them, and with an output gate, as its hybrid successors do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels.rows import HeadShape, NormWeight, RotaryTable
from ..quant.weight import Weight
from .layers import Pass
from .named import Named
from .shape import DecoderConfig
from .spec import Destination, Source

GATED_ROOM = "projected"


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """Queries (of each head, where gated, its queries and then its gates), keys and values are held together."""
    w, key, part = config.widths, f"{layer}.", layer + 1
    name, turn = f"model.layers.{layer}.self_attn.", "plus_one" if config.gated else ""
    q, kv = w.heads * w.head_dim, w.kv_heads * w.head_dim
    heads = (("q", 2 * q if config.gated else q), ("k", kv), ("v", kv))
    norm = Source(f"model.layers.{layer}.input_layernorm.weight", (w.hidden,))
    yield Destination(key + "attention_norm", (norm,), part, wide=True, turn=turn)
    yield Destination(key + "qkv", tuple(Source(f"{name}{p}_proj.weight", (rows, w.hidden)) for p, rows in heads), part)
    for which in ("q_norm", "k_norm"):
        yield Destination(key + which, (Source(f"{name}{which}.weight", (w.head_dim,)),), part, wide=True, turn=turn)
    yield Destination(key + "output", (Source(name + "o_proj.weight", (w.hidden, q)),), part)


def build(config: DecoderConfig, weights: Named, layer: int, index: int, rotary: RotaryTable) -> Attention | GatedAttention:
    """The layer over its weights; `index` is its place among the layers that leave keys and values."""
    at = weights.of(layer)
    kind = GatedAttention if config.gated else Attention
    norms = at.norm("attention_norm", config.eps), at.norm("q_norm", config.eps), at.norm("k_norm", config.eps)
    return kind(config.widths.shape, index, norms[0], at["qkv"], norms[1], norms[2], at["output"], rotary)


@dataclass(slots=True)
class Attention:
    """Pre-norm grouped-query attention with a norm a head on queries and keys (Qwen3).

    qkv [q + k + v rows, hidden], output [hidden, q rows].
    """

    shape: HeadShape
    index: int
    norm: NormWeight
    qkv: Weight
    q_norm: NormWeight
    k_norm: NormWeight
    output: Weight
    rotary: RotaryTable
    captured: bool = True

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.qkv, self.output

    def run(self, at: Pass, /) -> None:
        kernels, views = at.kernels, at.views
        x, normed, qkv, mixed = views["x"], views["normed"], views["qkv"], views["mixed"]
        keys, values = at.cache.keys[self.index], at.cache.values[self.index]
        kernels.norm_linear(x, self.norm, self.qkv, qkv, normed)
        kernels.attend(qkv, self.shape, self.q_norm, self.k_norm, self.rotary, keys, values, at.rows, mixed)
        kernels.linear_add(mixed, self.output, x, normed)


@dataclass(slots=True)
class GatedAttention:
    """As Attention, with gates beside the queries that weigh what was mixed, each number through a sigmoid (Qwen3-Next).

    qkv [2 * q + k + v rows, hidden]: of each head its queries, then its gates.
    """

    shape: HeadShape
    index: int
    norm: NormWeight
    qkv: Weight
    q_norm: NormWeight
    k_norm: NormWeight
    output: Weight
    rotary: RotaryTable
    captured: bool = False

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.qkv, self.output

    def run(self, at: Pass, /) -> None:
        kernels, views, shape = at.kernels, at.views, self.shape
        x, normed, projected, qkv, mixed = views["x"], views["normed"], views[GATED_ROOM], views["qkv"], views["mixed"]
        keys, values = at.cache.keys[self.index], at.cache.values[self.index]
        kernels.norm_linear(x, self.norm, self.qkv, projected, normed)
        count, heads, dim = x.shape[0], shape.heads, shape.head_dim
        queries, gates = projected[:, : 2 * shape.queries].view(count, heads, 2, dim).unbind(2)
        qkv[:, : shape.queries].view(count, heads, dim).copy_(queries)
        qkv[:, shape.queries :].copy_(projected[:, 2 * shape.queries :])
        kernels.attend(qkv, shape, self.q_norm, self.k_norm, self.rotary, keys, values, at.rows, mixed)
        mixed.view(count, heads, dim).mul_(torch.sigmoid(gates))
        kernels.linear_add(mixed, self.output, x, normed)
