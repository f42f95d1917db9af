"""Recurrent states of all sequences of a session: constant size per sequence, in slots of one lease."""

# ruff: noqa: S101 - `check` asserts invariants of this code, never input
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..errors import MemoryFull
from ..memory.lease import Lease, carved_bytes

Pieces: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StateShape:
    """fp32 shapes of a sequence's state in each of `layers`; number of `slots`; `rows`: states read in one pass."""

    layers: tuple[Pieces, ...]
    slots: int
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of a RecurrentStates, alignment included."""
        held = sum(carved_bytes((self.slots, *piece), torch.float32) for pieces in self.layers for piece in pieces)
        return held + sum(
            carved_bytes((self.rows, *piece), torch.float32) for pieces in set(self.layers) for piece in pieces
        )


class RecurrentStates:
    """Slots, each free or owned by one sequence or checkpoint. A pass reads the slots of its sequences and writes the
    same ones or the spare one.

    The slot `spare` is never given out: it takes the states of passes that may be stopped.
    """

    def __init__(self, lease: Lease, shape: StateShape) -> None:
        self.shape = shape
        self.spare = 0
        self._parts = [
            [lease.carve((shape.slots, *piece), torch.float32).zero_() for piece in pieces] for pieces in shape.layers
        ]
        kinds = sorted(set(shape.layers))
        self._work = {
            pieces: [lease.carve((shape.rows, *piece), torch.float32) for piece in pieces] for pieces in kinds
        }
        self._free = list(range(shape.slots - 1, 0, -1))

    @property
    def free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(part[0].nbytes for layer in self._parts for part in layer)

    def allocate(self) -> int:
        """A slot with undefined content. Raises MemoryFull."""
        if not self._free:
            raise MemoryFull(
                f"all {self.shape.slots - 1} recurrent states of the session are in use; wait until a text has ended"
            )
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Return a slot. Raises ValueError for one that is not allocated."""
        if slot in self._free or slot == self.spare:
            raise ValueError(f"slot {slot} was not taken")
        self._free.append(slot)

    def swap_spare(self, slot: int) -> int:
        """Return the spare slot as allocated; `slot` becomes the spare one."""
        taken, self.spare = self.spare, slot
        return taken

    def clear(self, slot: int) -> None:
        """Set the state of a sequence without tokens."""
        for layer in self._parts:
            for part in layer:
                part[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        for layer in self._parts:
            for part in layer:
                part[target].copy_(part[source])

    def of_layer(self, layer: int) -> list[torch.Tensor]:
        """The tensors of a layer for all slots, [slots, *shape] each, as they lie in memory."""
        return self._parts[layer]

    def read(self, layer: int, slots: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the tensors of a layer for the slots [S] int64, [S, *shape] each, valid until the next call."""
        count, work = slots.shape[0], self._work[self.shape.layers[layer]]
        return [
            torch.index_select(part, 0, slots, out=copy[:count])
            for part, copy in zip(self._parts[layer], work, strict=True)
        ]

    def write(self, layer: int, slots: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Store changed tensors of `read` in the slots [S] int64."""
        for part, piece in zip(self._parts[layer], pieces, strict=True):
            part.index_copy_(0, slots, piece)

    def check(self, taken: Sequence[int]) -> None:
        """Raise AssertionError unless exactly the slots `taken` are allocated, once each."""
        every = sorted([*taken, *self._free, self.spare])
        assert every == list(range(self.shape.slots)), (
            f"slots taken {sorted(taken)}, free {sorted(self._free)}, spare {self.spare}"
        )
