"""Sequences with both kinds of cache: keys and values in blocks, and recurrent states in slots.

A recurrent state cannot be shortened, only kept or restored. A sequence therefore owns a slot with its present state,
and copies are kept at the ends of full blocks (`checkpoints`). A later prompt with the same prefix can continue from a
checkpoint, and a sequence can go back to it.
"""

# ruff: noqa: S101 - `check` asserts invariants of this code, never input
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..kernels.forward_batch import BLOCK
from ..memory.lease import Lease
from .paged import KVShape, PagedKV, SequenceKV, Snapshot
from .recurrent import RecurrentStates


class HybridKV(PagedKV):
    """A PagedKV whose sequences also have recurrent states, in `states`.

    Invariants in addition to those of PagedKV, see `check`: every open sequence owns one slot, and one per snapshot; a
    checkpoint belongs to a block that is used or cached, and holds the state after the last token of that block. When a
    slot is needed and none is free, the least recently used checkpoint is dropped.
    """

    def __init__(self, lease: Lease, shape: KVShape, states: RecurrentStates, context: int, sequences: int = 1) -> None:
        super().__init__(lease, shape, context, sequences)
        self._states = self.states = states
        self._checkpoints: OrderedDict[int, int] = OrderedDict()

    @property
    def openable(self) -> int:
        return self._states.free + len(self._checkpoints)

    @property
    def checkpoints(self) -> int:
        """Number of states kept at the ends of blocks."""
        return len(self._checkpoints)

    def fits(self, capacity: int, shared: Sequence[int] = ()) -> bool:
        return self.openable > 0 and super().fits(capacity, shared)

    def usable(self, blocks: Sequence[int]) -> Sequence[int]:
        return blocks[
            : next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._checkpoints), 0)
        ]

    def inherit(self, known: int, block: int, /) -> None:
        if known not in self._checkpoints and block in self._checkpoints:
            self._checkpoints[known] = self._checkpoints.pop(block)

    def uncache_block(self, block: int) -> None:
        super().uncache_block(block)
        self._forget_if_free(block)

    def check(self) -> None:
        super().check()
        taken = list(self._checkpoints.values())
        for sequence in self._open:
            if isinstance(sequence, HybridSequence):
                taken += sequence.taken
        self._states.check(taken)
        assert all(self.users(block) or block in self._cached for block in self._checkpoints), (
            "a checkpoint hangs on a free block"
        )

    def allocate_slot(self) -> int:
        """A free slot, if necessary that of the least recently used checkpoint. Raises MemoryFull."""
        if not self._states.free and self._checkpoints:
            self._states.release(self._checkpoints.popitem(last=False)[1])
        return self._states.allocate()

    def keep_checkpoint(self, block: int, slot: int) -> None:
        """Keep a copy of the state in `slot`, which is that at the end of `block`, if a slot is available."""
        if block not in self._checkpoints:
            if not self.openable:
                return
            self._checkpoints[block] = self.allocate_slot()
            self._states.copy(slot, self._checkpoints[block])
        self._checkpoints.move_to_end(block)

    def drop_checkpoint(self, block: int) -> None:
        """Drop the state at the end of `block`, if there is one."""
        if block in self._checkpoints:
            self._states.release(self._checkpoints.pop(block))

    def checkpoint(self, block: int) -> int | None:
        """The slot with the state at the end of `block`, or None."""
        return self._checkpoints.get(block)

    def _sequence(self, capacity: int, shared: Sequence[int], length: int, past: SequenceKV | None) -> SequenceKV:
        """Without `past`, the last of the `shared` blocks must have a checkpoint. Raises MemoryFull."""
        if isinstance(past, HybridSequence):
            source = past.slots[0]
        else:
            source = self._checkpoints[shared[-1]] if shared else None
            if shared:
                self._checkpoints.move_to_end(shared[-1])
        slot = self.allocate_slot()
        if source is None:
            self._states.clear(slot)
        elif past is not None or shared[-1] in self._checkpoints:
            self._states.copy(source, slot)
        # else: allocate_slot dropped this checkpoint, as the only one, and returned its slot with the state in it
        return HybridSequence(self, capacity, shared, length, slot)

    def _drop(self, block: int) -> None:
        super()._drop(block)
        self._forget_if_free(block)

    def _forget_if_free(self, block: int) -> None:
        if not self.users(block) and block not in self._cached:
            self.drop_checkpoint(block)


class HybridSequence(SequenceKV):
    """A SequenceKV with a recurrent state. Only HybridKV makes one."""

    cuts_anywhere = False

    def __init__(self, pages: HybridKV, capacity: int, shared: Sequence[int], length: int, slot: int) -> None:
        super().__init__(pages, capacity, shared, length)
        self._hybrid = pages
        self._states = pages._states
        self._slot = slot
        self._in_spare = False
        self._draft_slots: list[int] = []  # states after tokens that may be rejected
        self._snapshots: list[Snapshot] = []
        self._written: int | None = None  # block of the last checkpoint written by decode

    @property
    def slots(self) -> tuple[int, int]:
        return self._slot, self._states.spare if self._in_spare else self._slot

    @property
    def taken(self) -> list[int]:
        """Slots that it owns."""
        return [
            self._slot,
            *self._draft_slots,
            *(snapshot.slot for snapshot in self._snapshots if snapshot.slot is not None),
        ]

    @property
    def verify_slots(self) -> list[tuple[int, int]]:
        return list(zip([self._slot, *self._draft_slots], self._draft_slots, strict=False))

    @property
    def verifiable(self) -> int:
        return min(super().verifiable, self._hybrid.openable + len(self._draft_slots))

    def ensure(self, tokens: int, *, undo: bool = False, verify: bool = False) -> None:
        """With `verify` it also allocates a slot for the state after each token, if necessary by dropping the least
        recently used checkpoints.
        """
        self._give_up()
        super().ensure(tokens, undo=undo)
        self._in_spare = undo and not verify
        while verify and len(self._draft_slots) < tokens:
            self._draft_slots.append(self._hybrid.allocate_slot())

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        if self._in_spare:
            self._slot = self._states.swap_spare(self._slot)
            self._in_spare = False
        for _ in range(min(tokens, len(self._draft_slots))):
            self._states.release(self._slot)
            self._slot = self._draft_slots.pop(0)

    def snapshot(self) -> Snapshot:
        slot = self._hybrid.allocate_slot()
        self._states.copy(self._slot, slot)
        self._snapshots.append(Snapshot(self.length, slot))
        return self._snapshots[-1]

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot not in self._snapshots or snapshot.slot is None:
            raise ValueError(f"the snapshot at {snapshot.length} tokens was given up")
        self._back_to(snapshot.length, snapshot.slot)

    def keep_checkpoint(self, *, written: bool = False) -> None:
        if not self.length or self.length % BLOCK:
            return
        block = self.table[self.length // BLOCK - 1]
        if written and self._hybrid.checkpoint(block) is None:
            if self._written is not None:
                self._hybrid.drop_checkpoint(self._written)
            self._written = block
        self._hybrid.keep_checkpoint(block, self._slot)

    def truncate(self, length: int) -> int:
        """Go back to the last snapshot or checkpoint at `length` or before it, or to the start."""
        self._give_up()
        if length == self.length:
            return length
        kept = [snapshot for snapshot in self._snapshots if snapshot.length <= length]
        found, slot = (kept[-1].length, kept[-1].slot) if kept else (0, None)
        for count in range(length // BLOCK, found // BLOCK, -1):
            checkpoint = self._hybrid.checkpoint(self.table[count - 1])
            if checkpoint is not None:
                found, slot = count * BLOCK, checkpoint
                break
        return self._back_to(found, slot)

    def close(self) -> None:
        if self in self._hybrid._open:
            for slot in self.taken:
                self._states.release(slot)
            self._draft_slots.clear()
            self._snapshots.clear()
        super().close()

    def nbytes(self) -> int:
        return super().nbytes() + len(self.taken) * self._states.slot_bytes

    def check(self) -> None:
        super().check()
        lengths = [snapshot.length for snapshot in self._snapshots]
        assert lengths == sorted(lengths), f"snapshots at {lengths}"
        assert not lengths or lengths[-1] <= self.length, f"snapshot at {lengths[-1]} of {self.length} tokens"

    def _give_up(self) -> None:
        """Release the slots of tokens that were not accepted."""
        for slot in self._draft_slots:
            self._states.release(slot)
        self._draft_slots.clear()

    def _back_to(self, length: int, slot: int | None) -> int:
        """Take the state in `slot` (None: that of no tokens) at `length`, and drop the snapshots after it."""
        self._give_up()
        super().truncate(length)
        if slot is None:
            self._states.clear(self._slot)
        else:
            self._states.copy(slot, self._slot)
        if self._written not in self.table:
            self._written = None
        while self._snapshots and self._snapshots[-1].length > length:
            given_up = self._snapshots.pop()
            if given_up.slot is not None:
                self._states.release(given_up.slot)
                given_up.slot = None
        return length
