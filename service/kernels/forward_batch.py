"""The rows of a forward pass: which positions of which sequences they are, how heads are laid out, and the rotary
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..memory.lease import Lease, carved_bytes
from .rotary import Yarn, turns_per_position

# Tokens per KV block: position p of a sequence lies in its block p // BLOCK, slot p % BLOCK.
BLOCK = 32
# Up to this many rows a pass is bound by reading the weights once: decode steps and verify passes.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, the key/value heads that groups of them share, and the width of each head."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        """Width of all queries of a row, and of the result of attention."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values of a row: q of every head, then k and v of every key/value head."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(slots=True)
class NormWeight:
    """An RMS norm: weight fp32 [width]."""

    weight: torch.Tensor
    eps: float


@dataclass(slots=True)
class Slots:
    """Slots that hold the recurrent states of the S sequences of a pass: read from `source`, written to `target`. int64
    [S] each on the device, [T] in a VerifyPass.
    """

    source: torch.Tensor
    target: torch.Tensor

    def part(self, rows: slice) -> Slots:
        """The slots of some sequences, or of some rows of a VerifyPass."""
        return Slots(self.source[rows], self.target[rows])


@dataclass(slots=True)
class ForwardBatch:
    """The T rows of one forward pass: one token per row, at a position of a sequence. The subclass says which rows
    share a sequence.

    positions: int32 [T] on the device, the position of each row in its sequence.

    tables: int32 [S, max_blocks] on the device, the KV block ids of each of the S sequences.

    longest: the host's upper bound of positions + 1. Under a CUDA graph it is the bound of the graph.

    slots: recurrent states of the pass, None for networks without recurrent layers.

    ids: token ids of the rows if the host knows them, otherwise empty. Reading them back would wait for the device.

    turns: int32 [T] on the device, which row of the rotary table turns each row. None: `positions`. They differ in and
    after pictures. first_turns: the same for the first token of the key block that an indexer has each row in, in a
    chunk with pictures.

    pictures: which rows stand for pictures, each with what replaces them [1 + taps, rows, hidden]: the first in place
    of their embeddings, the others added after the first layers.

    A CUDA graph of up to FEW_ROWS rows, or of the end of a prompt (engine/short_passes), is replayed at other
    positions. Kernels that a graph can hold therefore read positions from the device only, never `longest` or
    PrefillChunk.start.
    """

    positions: torch.Tensor
    tables: torch.Tensor
    longest: int
    slots: Slots | None = None
    ids: Sequence[int] = ()
    turns: torch.Tensor | None = None
    first_turns: torch.Tensor | None = None
    pictures: Sequence[tuple[slice, torch.Tensor]] = ()

    # All rows belong to one sequence, in order.
    one_sequence: ClassVar[bool] = False
    # Every row stores its recurrent state in its own slot, as in a decode step.
    state_per_row: ClassVar[bool] = False

    @property
    def rotary_rows(self) -> torch.Tensor:
        """int32 [T], the rows of the rotary table that turn the rows of the pass."""
        return self.positions if self.turns is None else self.turns


@dataclass(slots=True)
class DecodeBatch(ForwardBatch):
    """A decode step: row i is the next token of sequence i (S = T)."""

    state_per_row: ClassVar[bool] = True


@dataclass(slots=True)
class PrefillChunk(ForwardBatch):
    """Rows at start..start + T - 1 of one sequence (S = 1). `before`: the token ids just before them, if the host knows
    them.
    """

    start: int = field(kw_only=True)
    before: Sequence[int] = field(default=(), kw_only=True)

    one_sequence: ClassVar[bool] = True


@dataclass(slots=True)
class VerifyPass(PrefillChunk):
    """Up to FEW_ROWS rows of one sequence, draft tokens among them: row i reads the recurrent state that row i - 1
    stored, so any prefix of the rows can be accepted.
    """

    state_per_row: ClassVar[bool] = True


@dataclass(slots=True)
class PackedPrompts(ForwardBatch):
    """Chunks of several sequences in one pass, each with its rows of the pass. Networks with recurrent layers never get
    one.

    Only attention tells the sequences apart. The fields of ForwardBatch are those of the first chunk.
    """

    chunks: Sequence[tuple[slice, PrefillChunk]] = field(kw_only=True)

    @classmethod
    def pack(cls, chunks: Sequence[tuple[slice, PrefillChunk]]) -> PackedPrompts:
        first = chunks[0][1]
        return cls(first.positions, first.tables, first.longest, ids=first.ids, chunks=chunks)


@dataclass(slots=True)
class RotaryTable:
    """cos and sin [positions, dim/2] fp32 of the rotary embedding (Su et al. 2021) for the first `dim` numbers of a
    head, built once per session.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    axes: torch.Tensor | None = None
    positions: int = 0

    @classmethod
    def build(
        cls,
        lease: Lease,
        positions: int,
        dim: int,
        theta: float,
        yarn: Yarn | None = None,
        axes: Sequence[int] = (),
        rows: int = 0,
    ) -> RotaryTable:
        """One row per position, and `rows` more for passes with pictures, whose positions have three axes:
        `turn_axes`.
        """
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), turns_per_position(dim, theta, yarn))
        scale = 1.0 if yarn is None else yarn.attention
        cos, sin = (lease.carve((positions + rows, angles.shape[1]), torch.float32) for _ in range(2))
        for table, values in ((cos, angles.cos()), (sin, angles.sin())):
            table[:positions].copy_(values.mul_(scale))
        return cls(cos, sin, torch.tensor(axes, dtype=torch.int64, device=cos.device) if rows else None, positions)

    @staticmethod
    def nbytes(positions: int, dim: int, rows: int = 0) -> int:
        """Bytes of both tables, alignment included."""
        return 2 * carved_bytes((positions + rows, dim // 2), torch.float32)

    def turn_axes(self, axes: torch.Tensor) -> None:
        """Fill the further rows for axes int64 [3, n] (time, row, column): each pair of a head has its own axis."""
        if self.axes is None or self.positions + axes.shape[1] > self.cos.shape[0]:
            raise ValueError(f"the table has no room for {axes.shape[1]} rows with three axes")
        wanted = axes.to(self.cos.device)[self.axes].t()
        for table in (self.cos, self.sin):
            table[self.positions : self.positions + axes.shape[1]] = table[: self.positions].gather(0, wanted)
