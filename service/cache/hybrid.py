"""Sequences that leave both behind: keys and values in blocks, and recurrent states in slots.

A state cannot be cut shorter, only kept or gone back to. So a sequence owns a slot with its present state, and copies of it are kept at
the ends of full blocks (`borders`): behind one of them a later prompt with the same beginning can go on, and a sequence can go back to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..kernels.forward_batch import BLOCK
from ..memory.lease import Lease
from .paged import KVShape, PagedKV, SequenceKV, Snapshot
from .recurrent import RecurrentStates


class HybridKV(PagedKV):
    """A PagedKV whose sequences have recurrent states too, in `states`.

    Invariants beside those of PagedKV, see `check`: every open sequence owns one slot, and one for each of its snapshots; a border hangs on
    a block that is used or kept, and holds the state behind that block's last token; borders give way to whoever needs a slot, the
    longest unused one first.
    """

    def __init__(self, lease: Lease, shape: KVShape, states: RecurrentStates, context: int, sequences: int = 1) -> None:
        super().__init__(lease, shape, context, sequences)
        self._states = self.states = states
        self._borders: OrderedDict[int, int] = OrderedDict()

    @property
    def openable(self) -> int:
        return self._states.free + len(self._borders)

    @property
    def borders(self) -> int:
        """States that are kept at the ends of blocks."""
        return len(self._borders)

    def fits(self, capacity: int, shared: Sequence[int] = ()) -> bool:
        return self.openable > 0 and super().fits(capacity, shared)

    def usable(self, blocks: Sequence[int]) -> Sequence[int]:
        return blocks[: next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._borders), 0)]

    def inherit(self, known: int, block: int, /) -> None:
        if known not in self._borders and block in self._borders:
            self._borders[known] = self._borders.pop(block)

    def unkeep(self, block: int) -> None:
        super().unkeep(block)
        self._forget_if_free(block)

    def check(self) -> None:
        super().check()
        taken = list(self._borders.values())
        for sequence in self._open:
            if isinstance(sequence, HybridSequence):
                taken += sequence.taken
        self._states.check(taken)
        assert all(self.users(block) or block in self._kept for block in self._borders), "a border hangs on a free block"  # noqa: S101 - invariants of ours

    def take_slot(self) -> int:
        """A slot, if need be that of the longest unused border. Raises MemoryFull."""
        if not self._states.free and self._borders:
            self._states.give(self._borders.popitem(last=False)[1])
        return self._states.take()

    def keep_border(self, block: int, slot: int) -> None:
        """Keep a copy of the state in `slot`, which stands at the end of `block`, if there is room for it."""
        if block not in self._borders:
            if not self.openable:
                return
            self._borders[block] = self.take_slot()
            self._states.copy(slot, self._borders[block])
        self._borders.move_to_end(block)

    def forget_border(self, block: int) -> None:
        """Keep the state at the end of `block` no longer, if one is kept."""
        if block in self._borders:
            self._states.give(self._borders.pop(block))

    def border(self, block: int) -> int | None:
        """The slot with the state at the end of `block`, if it is kept."""
        return self._borders.get(block)

    def _sequence(self, capacity: int, shared: Sequence[int], length: int, past: SequenceKV | None) -> SequenceKV:
        """Behind `shared` blocks without a past there must be a border. Raises MemoryFull."""
        if isinstance(past, HybridSequence):
            source = past.slots[0]
        else:
            source = self._borders[shared[-1]] if shared else None
            if shared:
                self._borders.move_to_end(shared[-1])
        slot = self.take_slot()
        if source is None:
            self._states.clear(slot)
        elif past is not None or shared[-1] in self._borders:
            self._states.copy(source, slot)
        # else: nothing else could give way, and the border's own slot was taken, state and all
        return HybridSequence(self, capacity, shared, length, slot)

    def _drop(self, block: int) -> None:
        super()._drop(block)
        self._forget_if_free(block)

    def _forget_if_free(self, block: int) -> None:
        if not self.users(block) and block not in self._kept:
            self.forget_border(block)


class HybridSequence(SequenceKV):
    """A SequenceKV with a recurrent state. Made by HybridKV."""

    cuts_anywhere = False

    def __init__(self, pages: HybridKV, capacity: int, shared: Sequence[int], length: int, slot: int) -> None:
        super().__init__(pages, capacity, shared, length)
        self._hybrid = pages
        self._states = pages._states
        self._slot = slot
        self._aside = False
        self._ahead: list[int] = []  # with the states behind the tokens that a pass has read and that may not count
        self._snapshots: list[Snapshot] = []
        self._written: int | None = None  # the block of the last border in what decode wrote

    @property
    def slots(self) -> tuple[int, int]:
        return self._slot, self._states.spare if self._aside else self._slot

    @property
    def taken(self) -> list[int]:
        """Slots that it owns."""
        return [self._slot, *self._ahead, *(snapshot.slot for snapshot in self._snapshots if snapshot.slot is not None)]

    @property
    def trail(self) -> list[tuple[int, int]]:
        return list(zip([self._slot, *self._ahead], self._ahead, strict=False))

    @property
    def undoable(self) -> int:
        return min(super().undoable, self._hybrid.openable + len(self._ahead))

    def ensure(self, tokens: int, *, undo: bool = False, each: bool = False) -> None:
        """With `each` a slot is taken for the state behind each token; those of borders that were not used for long give way."""
        self._give_up()
        super().ensure(tokens, undo=undo)
        self._aside = undo and not each
        while each and len(self._ahead) < tokens:
            self._ahead.append(self._hybrid.take_slot())

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        if self._aside:
            self._slot = self._states.swap_spare(self._slot)
            self._aside = False
        for _ in range(min(tokens, len(self._ahead))):
            self._states.give(self._slot)
            self._slot = self._ahead.pop(0)

    def snapshot(self) -> Snapshot:
        slot = self._hybrid.take_slot()
        self._states.copy(self._slot, slot)
        self._snapshots.append(Snapshot(self.length, slot))
        return self._snapshots[-1]

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot not in self._snapshots or snapshot.slot is None:
            raise ValueError(f"the snapshot at {snapshot.length} tokens was given up")
        self._back_to(snapshot.length, snapshot.slot)

    def keep_border(self, *, written: bool = False) -> None:
        if not self.length or self.length % BLOCK:
            return
        block = self.table[self.length // BLOCK - 1]
        if written and self._hybrid.border(block) is None:
            if self._written is not None:
                self._hybrid.forget_border(self._written)
            self._written = block
        self._hybrid.keep_border(block, self._slot)

    def truncate(self, length: int) -> int:
        """The last snapshot or border at `length` or before it, or the beginning."""
        self._give_up()
        if length == self.length:
            return length
        kept = [snapshot for snapshot in self._snapshots if snapshot.length <= length]
        found, slot = (kept[-1].length, kept[-1].slot) if kept else (0, None)
        for count in range(length // BLOCK, found // BLOCK, -1):
            border = self._hybrid.border(self.table[count - 1])
            if border is not None:
                found, slot = count * BLOCK, border
                break
        return self._back_to(found, slot)

    def close(self) -> None:
        if self in self._hybrid._open:
            for slot in self.taken:
                self._states.give(slot)
            self._ahead.clear()
            self._snapshots.clear()
        super().close()

    def nbytes(self) -> int:
        return super().nbytes() + len(self.taken) * self._states.slot_bytes

    def check(self) -> None:
        super().check()
        lengths = [snapshot.length for snapshot in self._snapshots]
        assert lengths == sorted(lengths), f"snapshots at {lengths}"  # noqa: S101 - invariants of ours
        assert not lengths or lengths[-1] <= self.length, f"snapshot at {lengths[-1]} of {self.length} tokens"  # noqa: S101

    def _give_up(self) -> None:
        """Return the slots behind the tokens that do not count."""
        for slot in self._ahead:
            self._states.give(slot)
        self._ahead.clear()

    def _back_to(self, length: int, slot: int | None) -> int:
        """Take the state in `slot` (None: that of no tokens) at `length`, and give up the snapshots behind it."""
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
                self._states.give(given_up.slot)
                given_up.slot = None
        return length
