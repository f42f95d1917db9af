"""Who waits for a model: in the order of coming, and everybody may ask for their place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """A queue between the event loop, which lets in and out, and a model's thread, which takes. Thread-safe; pure
    Python.

    `moved` is called, outside the lock, with those whose place has changed. While it is held nobody is taken.
    """

    def __init__(self, moved: Callable[[Sequence[T]], None]) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[T] = deque()
        self._moved = moved
        self._held = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def held(self) -> bool:
        """Whether nobody is taken now."""
        return self._held

    def join(self, who: T) -> None:
        """Wait behind everybody."""
        with self._lock:
            self._waiting.append(who)

    def leave(self, who: T) -> bool:
        """Give the place up; False if it was taken or given up before."""
        with self._lock:
            place = self._index(who)
            if place is None:
                return False
            del self._waiting[place]
            behind = list(self._waiting)[place:]
        self._moved(behind)
        return True

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """Whoever waits longest, if it `fits`: then it waits no longer. None while the line is held or empty: nobody
        overtakes.
        """
        with self._lock:
            if self._held or not self._waiting or not fits(self._waiting[0]):
                return None
            taken, behind = self._waiting.popleft(), list(self._waiting)
        self._moved(behind)
        return taken

    def place(self, who: T) -> int | None:
        """How many turns until it is its turn, 1 for the next; None if it does not wait."""
        with self._lock:
            place = self._index(who)
        return None if place is None else place + 1

    def hold(self) -> None:
        """Take nobody until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        """Take again."""
        self._held = False

    def clear(self) -> list[T]:
        """Send everybody away; returns them."""
        with self._lock:
            sent, self._waiting = list(self._waiting), deque()
        return sent

    def _index(self, who: T) -> int | None:
        return next((at for at, other in enumerate(self._waiting) if other is who), None)
