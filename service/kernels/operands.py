"""What kernels may take in one call between a network's small operations: joints of residual streams, sparse experts, n-grams, indexers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..quant.weight import Weight
from .delta import DeltaHeads
from .forward_batch import HeadShape, NormWeight, RotaryTable, Rows, Slots


@dataclass(slots=True)
class StreamJoint:
    """norm [streams, hidden], each stream for itself; down [rank, streams * hidden], up [streams * hidden, rank], inject [streams, ..]."""

    count: int
    norm: NormWeight
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(slots=True)
class JointRows:
    """streams [T, streams * hidden] give out `read` [T, hidden]; a joint that injects also `weights` [T, streams], and clears `found`.

    Room: normed and mixed [T, streams * hidden], low [T, rank]. found [T, hidden] takes what the layer adds.
    """

    streams: torch.Tensor
    normed: torch.Tensor
    low: torch.Tensor
    mixed: torch.Tensor
    read: torch.Tensor
    weights: torch.Tensor
    found: torch.Tensor


@dataclass(slots=True)
class SharedWeights:
    """The expert that every token meets, by the sigmoid of `gate` [1, hidden]; gate_up [2 * width, hidden], down [hidden, width]."""

    gate: Weight
    gate_up: Weight
    down: Weight


@dataclass(slots=True)
class ExpertWeights:
    """router [count, hidden]; of each expert gate_up [2 * width, hidden] and down [hidden, width].

    A token goes through the `active` likeliest (softmax over all in fp32), weighed by how likely they are; `normalized`: to a sum of 1.
    """

    active: int
    normalized: bool
    router: Weight
    gate_up: list[Weight]
    down: list[Weight]
    shared: SharedWeights | None


@dataclass(slots=True)
class ExpertRows:
    """x [T, hidden] goes through experts, what they find is added to out [T, hidden].

    Room: scores [T, count], routed [T, hidden], gated [T, width], shared_gate [T, 1], shared_gated [T, shared width]; the last two are any
    tensor where no expert is shared. picks [T, `pick_numbers`] is there for 16-bit activations, else any tensor.
    """

    x: torch.Tensor
    out: torch.Tensor
    scores: torch.Tensor
    routed: torch.Tensor
    gated: torch.Tensor
    shared_gate: torch.Tensor
    shared_gated: torch.Tensor
    picks: torch.Tensor


def pick_numbers(count: int, active: int, hidden: int, width: int) -> int:
    """16-bit numbers a row that kernels work in which take all experts at once: of each pick what both products give, its expert, its
    weight and its place, 32 bits each; the row's scores in fp32 or its share of the tiles; the shared expert's weight; alignment.
    """
    return active * (width + hidden + 6) + 2 * count + 2 + 64


@dataclass(slots=True)
class NgramWeights:
    """key [streams * hidden, width], value [hidden, width]; norms [streams, hidden].

    taps fp32 [K, streams * hidden], `apart` tokens apart.
    """

    key: Weight
    value: Weight
    key_norm: NormWeight
    query_norm: NormWeight
    conv_norm: NormWeight
    taps: torch.Tensor
    apart: int


@dataclass(slots=True)
class NgramRows:
    """embedded [T, width] is let into streams [T, streams * hidden]; windows [slots, (K - 1) * apart, streams * hidden] move on.

    Room: keys [T, streams * hidden], values [T, hidden]. `trail`: see Rows.
    """

    embedded: torch.Tensor
    streams: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    windows: torch.Tensor
    slots: Slots
    trail: bool = False


@dataclass(slots=True)
class AttentionHeads:
    """What attention has between its projections: norms [head_dim] of each head's queries and keys, and the angles that turn them.

    Qwen2 has no norms and a `bias` fp32 [shape.qkv] instead, which is added to queries, keys and values first.

    `rotary` may turn less than a head's width: its first numbers only.
    """

    shape: HeadShape
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    rotary: RotaryTable
    bias: torch.Tensor | None = None

    @property
    def normed(self) -> bool:
        """Whether it is attention as Qwen3 has it, which fused kernels are written for."""
        return self.q_norm is not None and self.k_norm is not None and self.bias is None


@dataclass(slots=True)
class AttentionRows:
    """qkv [T, shape.qkv], which is overwritten, gives out [T, shape.queries] over a layer's paged cache, both of the kernels' activation.

    keys, values [blocks, kv_heads, BLOCK, head_dim] in the cache's type are written at the places of `rows`, then each row reads those of
    its sequence up to itself.
    """

    qkv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: Rows
    out: torch.Tensor


@dataclass(slots=True)
class Indexer:
    """Which stretches of `ratio` tokens a row attends to, `budget` tokens in all; norms of queries and keys [dim]."""

    heads: int
    dim: int
    budget: int
    ratio: int
    q_norm: NormWeight
    k_norm: NormWeight


@dataclass(slots=True)
class IndexedRows:
    """indexed [T, (heads + 1) * dim]: queries, which may be overwritten, then the raw key. tails [slots, ratio - 1, dim]: the raw keys of
    stretches that are not full, read and written where the pass's slots say. pooled [blocks, BLOCK / ratio, dim]: the mean keys.
    """

    indexed: torch.Tensor
    tails: torch.Tensor
    pooled: torch.Tensor


# What a layer is made of, as far as kernels take it as a whole.
Part: TypeAlias = Weight | StreamJoint | ExpertWeights | DeltaHeads | AttentionHeads
