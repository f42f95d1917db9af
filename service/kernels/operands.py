"""Operands of the fused operations: hyper-connections, sparse experts, n-gram blocks, attention, indexers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..quant.weight import Weight
from .delta_rule import DeltaHeads
from .forward_batch import ForwardBatch, HeadShape, NormWeight, RotaryTable, Slots


@dataclass(slots=True)
class HyperConnection:
    """A gated mix of residual streams.

    norm [streams, hidden], each stream for itself; down [rank, streams * hidden], up [streams * hidden, rank], inject
    [streams, streams * hidden] or None.
    """

    count: int
    norm: NormWeight
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(slots=True)
class ConnectionOperands:
    """Mixes `streams` [T, streams * hidden] into `read` [T, hidden]. If the connection injects, it also fills `weights`
    [T, streams] and zeroes `found`.

    Buffers: normed and mixed [T, streams * hidden], low [T, rank]. found [T, hidden] receives what the layer adds.
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
    """The expert that every token passes through, weighted by the sigmoid of `gate` [1, hidden]; gate_up [2 * width,
    hidden], down [hidden, width].
    """

    gate: Weight
    gate_up: Weight
    down: Weight


@dataclass(slots=True)
class ExpertWeights:
    """router [count, hidden]; per expert gate_up [2 * width, hidden] and down [hidden, width].

    A token passes through the `active` experts with the largest router scores, weighted by the softmax over all scores
    in fp32. `normalized`: the weights are scaled to a sum of 1.
    """

    active: int
    normalized: bool
    router: Weight
    gate_up: list[Weight]
    down: list[Weight]
    shared: SharedWeights | None


@dataclass(slots=True)
class ExpertOperands:
    """Passes x [T, hidden] through experts and adds the result to out [T, hidden].

    Buffers: scores [T, count], routed [T, hidden], gated [T, width], shared_gate [T, 1], shared_gated [T, shared
    width]. The last two are any tensor if no expert is shared. picks [T, `pick_numbers`] exists for 16-bit activations,
    otherwise any tensor.
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
    """16-bit numbers per row of the buffer of kernels that run all experts at once.

    Per pick: the results of both products, and its expert, weight and index at 32 bits each. Per row: the scores in
    fp32 or its share of the tiles, the weight of the shared expert, and alignment.
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
class NgramOperands:
    """Adds embedded [T, width] to streams [T, streams * hidden], and shifts windows [slots, (K - 1) * apart, streams *
    hidden].

    Buffers: keys [T, streams * hidden], values [T, hidden]. `verify`: see VerifyPass.
    """

    embedded: torch.Tensor
    streams: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    windows: torch.Tensor
    slots: Slots
    verify: bool = False


@dataclass(slots=True)
class AttentionHeads:
    """What attention has between its projections: norms [head_dim] for the queries and keys of each head, and the
    rotary table.

    `rotary` may cover less than a head's width: its first numbers only. Qwen2 has no norms, and a `bias` fp32
    [shape.qkv] that is added to queries, keys and values first.
    """

    shape: HeadShape
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    rotary: RotaryTable
    bias: torch.Tensor | None = None

    @property
    def normed(self) -> bool:
        """Whether it is attention as Qwen3 has it, which the fused CUDA kernels are written for."""
        return self.q_norm is not None and self.k_norm is not None and self.bias is None


@dataclass(slots=True)
class AttentionOperands:
    """Attention of a layer over its paged cache: qkv [T, shape.qkv], which is overwritten, gives out [T,
    shape.queries]. Both have the kernels' activation type.

    New keys and values are written to keys, values [blocks, kv_heads, BLOCK, head_dim], in the cache's type, at the
    positions of `batch`. Each row then attends to its sequence up to itself.
    """

    qkv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: ForwardBatch
    out: torch.Tensor


@dataclass(slots=True)
class Indexer:
    """Selects the key blocks of `ratio` tokens that a row attends to, `budget` tokens in total; norms of queries and
    keys [dim].
    """

    heads: int
    dim: int
    budget: int
    ratio: int
    q_norm: NormWeight
    k_norm: NormWeight


@dataclass(slots=True)
class IndexerOperands:
    """indexed [T, (heads + 1) * dim]: queries, which may be overwritten, then the raw key.

    tails [slots, ratio - 1, dim]: the raw keys of key blocks that are not full, read and written in the slots of the
    pass. pooled [blocks, BLOCK / ratio, dim]: the mean key of each full key block.
    """

    indexed: torch.Tensor
    tails: torch.Tensor
    pooled: torch.Tensor


# The parts of a layer that kernels take as a whole.
LayerPart: TypeAlias = Weight | HyperConnection | ExpertWeights | DeltaHeads | AttentionHeads
