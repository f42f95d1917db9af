"""Layers that the families are made of. Each holds its weights and works on the rows of a pass; none asks which device it is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.paged import PagedKV
from ..kernels.reference import ReferenceKernels
from ..kernels.rows import FEW_ROWS, HeadShape, NormWeight, RotaryTable, Rows
from ..memory.lease import Lease, carved_bytes
from ..quant.weight import Weight


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a decoder's intermediate rows, from which its scratch is sized."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim)

    @property
    def columns(self) -> int:
        """The widest row that a product reads."""
        return max(self.hidden, self.shape.queries, self.intermediate)

    def rows(self) -> tuple[int, ...]:
        """Widths of the buffers of a pass, in the order of `PassRows`."""
        shape = self.shape
        return self.hidden, self.hidden, shape.qkv, shape.queries, 2 * self.intermediate, self.intermediate


@dataclass(slots=True)
class PassRows:
    """Views of the scratch for a pass of so many rows."""

    x: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    mixed: torch.Tensor
    both: torch.Tensor
    gated: torch.Tensor


class Scratch:
    """Buffers of a pass, taken once from a lease and reused by every layer and step.

    The views for up to FEW_ROWS rows are made once: a decode step makes no tensors.
    """

    def __init__(self, lease: Lease, widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.logit_rows = logit_rows
        self._rows = [lease.carve((tokens, width), dtype) for width in widths.rows()]
        self._logits = lease.carve((logit_rows, widths.vocab), dtype)
        self._few = [self._view(count) for count in range(min(FEW_ROWS, tokens) + 1)]
        self._few_logits = [self._logits[:count] for count in range(min(FEW_ROWS, logit_rows) + 1)]

    @staticmethod
    def nbytes(widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> int:
        """Bytes for passes of `tokens` rows and scores of `logit_rows` of them, alignment included."""
        sizes = [(tokens, width) for width in widths.rows()] + [(logit_rows, widths.vocab)]
        return sum(carved_bytes(size, dtype) for size in sizes)

    def rows(self, count: int) -> PassRows:
        """The buffers of a pass of `count` rows. ValueError for more than `tokens`."""
        return self._few[count] if count < len(self._few) else self._view(count)

    def logits(self, count: int) -> torch.Tensor:
        """[count, vocab]. ValueError for more than `logit_rows`."""
        if count < len(self._few_logits):
            return self._few_logits[count]
        if count > self.logit_rows:
            raise ValueError(f"{count} rows of scores are more than the {self.logit_rows} that are reserved")
        return self._logits[:count]

    def _view(self, count: int) -> PassRows:
        if count > self.tokens:
            raise ValueError(f"a pass of {count} rows is longer than the {self.tokens} that are reserved")
        return PassRows(*(rows[:count] for rows in self._rows))


@dataclass(slots=True)
class Block:
    """Pre-norm residual block: grouped-query attention with a norm a head on queries and keys (Qwen3), gated feed-forward (Shazeer 2020).

    qkv [q + k + v rows, hidden], output [hidden, q rows], gate_up [2 * intermediate, hidden], down [hidden, intermediate].
    """

    attention_norm: NormWeight
    qkv: Weight
    q_norm: NormWeight
    k_norm: NormWeight
    output: Weight
    forward_norm: NormWeight
    gate_up: Weight
    down: Weight


BetweenLayers = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class Decoder:
    """Embedding, blocks, final norm and head over the paged keys and values of a session."""

    shape: HeadShape
    embedding: Weight
    blocks: list[Block]
    norm: NormWeight
    head: Weight
    rotary: RotaryTable
    kernels: ReferenceKernels

    def forward(self, ids: torch.Tensor, rows: Rows, kv: PagedKV, scratch: Scratch, between: BetweenLayers | None = None) -> torch.Tensor:
        """Read ids [T] int64 that stand at `rows`; returns the residual state [T, hidden], valid until the next call.

        The blocks that `rows` names must belong to their sequences already; their lengths are the caller's to advance.
        `between(k, state)` is called with the state after k blocks (k = 0: the embeddings) and may raise to stop.
        """
        views, kernels, shape, rotary = scratch.rows(ids.shape[0]), self.kernels, self.shape, self.rotary
        x, normed, qkv, mixed, both, gated = views.x, views.normed, views.qkv, views.mixed, views.both, views.gated
        kernels.embed(ids, self.embedding, x)
        for index, block in enumerate(self.blocks):
            if between is not None:
                between(index, x)
            kernels.norm_linear(x, block.attention_norm, block.qkv, qkv, normed)
            kernels.attend(qkv, shape, block.q_norm, block.k_norm, rotary, kv.keys[index], kv.values[index], rows, mixed)
            kernels.linear_add(mixed, block.output, x, normed)
            kernels.norm_gate_up(x, block.forward_norm, block.gate_up, gated, normed, both)
            kernels.linear_add(gated, block.down, x, normed)
        if between is not None:
            between(len(self.blocks), x)
        return x

    def logits(self, state: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Scores [rows, vocab] for state [rows, hidden], rows <= scratch.logit_rows; valid until the next call."""
        count = state.shape[0]
        return self.kernels.norm_linear(state, self.norm, self.head, scratch.logits(count), scratch.rows(count).normed)
