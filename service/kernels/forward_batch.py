"""What a pass over the network hands to the kernels beside weights: which rows it has, where they stand, how heads are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..memory.lease import Lease, carved_bytes
from .rotary import Yarn, turns_per_position

# Tokens of a KV block: position p of a sequence lies in its block p // BLOCK, slot p % BLOCK.
BLOCK = 32
# Up to so many rows a pass is bound by reading the weights once: decode steps and the checks of guessed tokens.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, the key/value heads that groups of them share, and the width of each."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        """Width of all queries of a row, and of attention's result."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of a row of queries, keys and values: q of every head, then k and v of every key/value head."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(slots=True)
class NormWeight:
    """An RMS norm: weight fp32 [width]."""

    weight: torch.Tensor
    eps: float


@dataclass(slots=True)
class Slots:
    """Where the recurrent states of the S sequences of a pass are read and written: int64 [S] each, on the device; [T] of a trail."""

    source: torch.Tensor
    target: torch.Tensor

    def part(self, rows: slice) -> Slots:
        """Those of some of the sequences, or of some rows of a trail."""
        return Slots(self.source[rows], self.target[rows])


@dataclass(slots=True)
class Rows:
    """Where the T rows of a pass stand, on the device.

    positions: int32 [T], the position of each row in its sequence. tables: int32 [S, max_blocks], the KV block ids of each sequence.
    start: a chunk (S = 1) has rows start..start+T-1 of one sequence; None is a decode step, where row i belongs to sequence i (S = T).
    trail: a chunk of up to FEW_ROWS rows leaves a recurrent state behind each of them: row i goes on from the one that row i - 1 left.
    longest: upper bound of positions + 1 that the host knows; under a CUDA graph that of its bucket. A graph of up to FEW_ROWS rows of one
    sequence is replayed at other places: kernels that can be captured use neither it nor start for them.
    slots: of networks with recurrent layers, else None. ids: those of the rows, and before: those just before a chunk, as far as the host
    knows them without asking the device, which would wait for all that it does.
    turns: int32 [T], which row of the rotary table turns each row, where that is not `positions`: with pictures. first_turns: of a chunk
    the same of the first row of the stretch that an indexer has each row in. pictures: which rows of a chunk stand for pictures, each with
    what comes in their place [1 + taps, rows, hidden]: the first instead of their embeddings, the others added after the first layers.
    parts: chunks of several sequences in one pass, each with the rows of the pass that it has; the fields beside are those of the first.
    Only attention looks at them: networks with recurrent layers read no such pass.
    """

    positions: torch.Tensor
    tables: torch.Tensor
    start: int | None
    longest: int
    slots: Slots | None = None
    ids: Sequence[int] = ()
    before: Sequence[int] = ()
    trail: bool = False
    turns: torch.Tensor | None = None
    first_turns: torch.Tensor | None = None
    pictures: Sequence[tuple[slice, torch.Tensor]] = ()
    parts: Sequence[tuple[slice, Rows]] = ()

    @property
    def rotary_rows(self) -> torch.Tensor:
        """int32 [T], the rows of the rotary table that turn the rows of the pass."""
        return self.positions if self.turns is None else self.turns


@dataclass(slots=True)
class RotaryTable:
    """cos and sin [positions, dim/2] fp32 of the rotary embedding (Su et al. 2021) of a head's first `dim` numbers, made once a session."""

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
        """One row per position, and `rows` more for passes with pictures, whose positions have three axes: see `turn_axes`."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), turns_per_position(dim, theta, yarn))
        scale = 1.0 if yarn is None else yarn.attention
        tables = []
        for values in (angles.cos(), angles.sin()):
            tables.append(lease.carve((positions + rows, values.shape[1]), torch.float32))
            tables[-1][:positions].copy_(values.mul_(scale))
        device = tables[0].device
        return cls(*tables, torch.tensor(axes, dtype=torch.int64, device=device) if rows else None, positions)

    @staticmethod
    def nbytes(positions: int, dim: int, rows: int = 0) -> int:
        """Bytes of both tables, alignment included."""
        return 2 * carved_bytes((positions + rows, dim // 2), torch.float32)

    def turn_axes(self, places: torch.Tensor) -> None:
        """Fill the further rows for places int64 [3, n] (time, row, column): each pair of a head is turned by its own axis."""
        if self.axes is None or self.positions + places.shape[1] > self.cos.shape[0]:
            raise ValueError(f"the table has no room for {places.shape[1]} rows with three axes")
        wanted = places.to(self.cos.device)[self.axes].t()
        for table in (self.cos, self.sin):
            table[self.positions : self.positions + places.shape[1]] = table[: self.positions].gather(0, wanted)
