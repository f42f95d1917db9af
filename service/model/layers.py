"""Layers that the families are made of. Each holds its weights and works on a chunk of one sequence; none asks which device it is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.kv import KVCache
from ..kernels.reference import ReferenceKernels
from ..memory.pool import Lease


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
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Scratch:
    """Buffers of a chunk, taken once from a lease and reused by every layer and step."""

    ROWS = ("x", "normed", "qkv", "mixed", "gate_up", "gated")

    def __init__(self, lease: Lease, widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.logit_rows = logit_rows
        self._rows = {name: lease.carve((tokens, width), dtype) for name, width in _row_widths(widths).items()}
        self._logits = lease.carve((logit_rows, widths.vocab), dtype)

    @staticmethod
    def nbytes(widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> int:
        """Bytes for chunks of `tokens` and logits of `logit_rows` tokens, alignment included."""
        sizes = [tokens * width for width in _row_widths(widths).values()] + [logit_rows * widths.vocab]
        return sum(-(-size * dtype.itemsize // 256) * 256 for size in sizes)

    def rows(self, name: str, tokens: int) -> torch.Tensor:
        return self._rows[name][:tokens]

    def logits(self, tokens: int) -> torch.Tensor:
        return self._logits[:tokens]


def _row_widths(widths: Widths) -> dict[str, int]:
    sizes = (
        widths.hidden,
        widths.hidden,
        widths.qkv,
        widths.heads * widths.head_dim,
        2 * widths.intermediate,
        widths.intermediate,
    )
    return dict(zip(Scratch.ROWS, sizes, strict=True))


@dataclass(slots=True)
class Step:
    """One chunk on its way through the layers: where it starts, its rotary tables, the sequence's cache, the chunk's buffers."""

    start: int
    tokens: int
    cos: torch.Tensor
    sin: torch.Tensor
    cache: KVCache
    scratch: Scratch


@dataclass(slots=True)
class RotaryTable:
    """cos and sin [positions, dim/2] fp32 of the plain rotary embedding (Su et al. 2021), made once a session."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, lease: Lease, positions: int, dim: int, theta: float) -> RotaryTable:
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        tables = [lease.carve(angles.shape, torch.float32).copy_(values) for values in (angles.cos(), angles.sin())]
        return cls(*tables)

    @staticmethod
    def nbytes(positions: int, dim: int) -> int:
        """Bytes of both tables, alignment included."""
        return 2 * (-(-positions * (dim // 2) * 4 // 256) * 256)


@dataclass(slots=True)
class Norm:
    """RMS norm with a plain weight, held in fp32."""

    weight: torch.Tensor
    eps: float
    kernels: ReferenceKernels

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, out)


@dataclass(slots=True)
class Attention:
    """Grouped-query attention with a norm a head on queries and keys (Qwen3). qkv [q + k + v rows, hidden], output [hidden, q rows]."""

    layer: int
    widths: Widths
    qkv: torch.Tensor
    output: torch.Tensor
    q_norm: Norm
    k_norm: Norm
    kernels: ReferenceKernels

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [tokens, hidden] normed; returns what is added to the residual, in the scratch row `normed`."""
        w, n, kernels = self.widths, step.tokens, self.kernels
        qkv = kernels.linear(x, self.qkv, step.scratch.rows("qkv", n)).view(n, w.heads + 2 * w.kv_heads, w.head_dim)
        q, k, v = qkv.split((w.heads, w.kv_heads, w.kv_heads), dim=1)
        mixed = step.scratch.rows("mixed", n).view(n, w.heads, w.head_dim)
        q = kernels.rotate(self.q_norm(q, mixed), step.cos, step.sin)
        k = kernels.rotate(self.k_norm(k, k), step.cos, step.sin)
        keys, values = step.cache.write(self.layer, k, v)
        kernels.attention(q, keys, values, step.start, mixed)
        return kernels.linear(step.scratch.rows("mixed", n), self.output, step.scratch.rows("normed", n))


@dataclass(slots=True)
class SwiGLU:
    """Gated feed-forward (Shazeer 2020). gate_up [2 * intermediate, hidden], down [hidden, intermediate]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    kernels: ReferenceKernels

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        both = self.kernels.linear(x, self.gate_up, step.scratch.rows("gate_up", step.tokens))
        gated = self.kernels.silu_mul(both, step.scratch.rows("gated", step.tokens))
        return self.kernels.linear(gated, self.down, step.scratch.rows("normed", step.tokens))


@dataclass(slots=True)
class Block:
    """Pre-norm residual block: x += attention(norm(x)); x += feed_forward(norm(x))."""

    attention_norm: Norm
    attention: Attention
    forward_norm: Norm
    forward: SwiGLU

    def __call__(self, x: torch.Tensor, step: Step) -> None:
        normed = step.scratch.rows("normed", step.tokens)
        x += self.attention(self.attention_norm(x, normed), step)
        x += self.forward(self.forward_norm(x, normed), step)


BetweenLayers = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class Decoder:
    """Embedding, blocks, final norm and head over one sequence's cache."""

    embedding: torch.Tensor
    blocks: list[Block]
    norm: Norm
    head: torch.Tensor
    rotary: RotaryTable
    kernels: ReferenceKernels

    def forward(self, ids: torch.Tensor, cache: KVCache, scratch: Scratch, between: BetweenLayers | None = None) -> torch.Tensor:
        """Read ids [tokens] int64 behind the cache; returns the residual state [tokens, hidden], valid until the next call.

        `between(k, state)` is called with the state after k blocks (k = 0: the embeddings) and may raise to stop.
        """
        tokens, start = ids.shape[0], cache.length
        x = self.kernels.embed(ids, self.embedding, scratch.rows("x", tokens))
        cos, sin = self.rotary.cos[start : start + tokens], self.rotary.sin[start : start + tokens]
        step = Step(start, tokens, cos, sin, cache, scratch)
        for index, block in enumerate(self.blocks):
            if between is not None:
                between(index, x)
            block(x, step)
        if between is not None:
            between(len(self.blocks), x)
        cache.advance(tokens)
        return x

    def logits(self, state: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Scores [rows, vocab] for state [rows, hidden], rows <= scratch.logit_rows; valid until the next call."""
        rows = state.shape[0]
        normed = self.norm(state, scratch.rows("normed", rows))
        return self.kernels.linear(normed, self.head, scratch.logits(rows))
