"""What a pass over the network hands to the kernels beside weights: which rows it has, where they stand, how heads are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..memory.lease import Lease, carved_bytes

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
    parts: Sequence[tuple[slice, Rows]] = ()


@dataclass(slots=True)
class RotaryTable:
    """cos and sin [positions, dim/2] fp32 of the rotary embedding (Su et al. 2021) of a head's first `dim` numbers, made once a session."""

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
        return 2 * carved_bytes((positions, dim // 2), torch.float32)
