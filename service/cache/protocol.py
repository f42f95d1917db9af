"""What every cache of a sequence promises, whatever it holds."""

from __future__ import annotations

from typing import Protocol


class SequenceCache(Protocol):
    """What one sequence leaves behind.

    Invariants: 0 <= length <= capacity; what belongs to positions below `length` never changes except through `truncate`;
    all bytes are reserved before the first token, so that decode allocates nothing.
    """

    capacity: int
    length: int

    def ensure(self, tokens: int) -> None:
        """Have room of its own for `tokens` more, before a pass writes them. Raises RequestError beyond the capacity."""
        ...

    def advance(self, tokens: int) -> None:
        """Count `tokens` written positions as part of the sequence."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
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
