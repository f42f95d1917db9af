"""What every cache of a sequence promises, whatever it holds."""

from __future__ import annotations

from typing import Protocol

from .paged import Snapshot


class SequenceCache(Protocol):
    """What one sequence leaves behind.

    Invariants: 0 <= length <= capacity; what belongs to positions below `length` never changes except through `truncate`;
    all bytes are reserved before the first token, so that decode allocates nothing.
    """

    capacity: int
    length: int

    def ensure(self, tokens: int, *, undo: bool = False, each: bool = False) -> None:
        """Have room of its own for `tokens` more, before a pass writes them. Raises RequestError beyond the capacity.

        With `undo` the pass may be given up: without `advance` the sequence is as it was before. With `each` it may be given up behind any
        of its tokens, of which there are at most `undoable`: the sequence is advanced by as many as are wanted, at once or bit by bit.
        """
        ...

    @property
    def undoable(self) -> int:
        """The tokens that one pass may read that is given up behind any of them."""
        ...

    def advance(self, tokens: int) -> None:
        """Count `tokens` written positions as part of the sequence."""
        ...

    def snapshot(self) -> Snapshot:
        """A place that the sequence can be brought back to. Raises MemoryFull where that takes memory and none is left."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; those of greater lengths are given up. ValueError for one that was given up before."""
        ...

    def truncate(self, length: int) -> int:
        """Forget everything from position `length` on, or from the last earlier one that can be gone back to; returns which it was.

        At the present length that is what a pass has written behind it.
        """
        ...

    def close(self) -> None:
        """Return what is reserved."""
        ...

    def nbytes(self) -> int:
        """Bytes reserved."""
        ...

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        ...
