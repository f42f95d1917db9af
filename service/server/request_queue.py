"""The queue of one model: first in, first out, and each request can ask for its position."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """A queue between the event loop, which adds and removes, and a model's thread, which takes. Thread-safe; pure
    Python.

    `moved` is called, outside the lock, with the requests whose position has changed. While the queue is held, nothing
    is taken.
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
        """Whether the queue is held."""
        return self._held

    def join(self, who: T) -> None:
        """Join the end of the queue."""
        with self._lock:
            self._waiting.append(who)

    def leave(self, who: T) -> bool:
        """Leave the queue; False if the request was taken or removed before."""
        with self._lock:
            index = self._index(who)
            if index is None:
                return False
            del self._waiting[index]
            behind = list(self._waiting)[index:]
        self._moved(behind)
        return True

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """Take the first request if it `fits`. None if the queue is held or empty, or if the first does not fit: no
        request overtakes.
        """
        with self._lock:
            if self._held or not self._waiting or not fits(self._waiting[0]):
                return None
            taken, behind = self._waiting.popleft(), list(self._waiting)
        self._moved(behind)
        return taken

    def position(self, who: T) -> int | None:
        """The position in the queue, 1 for the next; None if the request is not queued."""
        with self._lock:
            index = self._index(who)
        return None if index is None else index + 1

    def hold(self) -> None:
        """Take nothing until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        """Allow `take` again."""
        self._held = False

    def clear(self) -> list[T]:
        """Empty the queue; returns the removed requests."""
        with self._lock:
            sent, self._waiting = list(self._waiting), deque()
        return sent

    def _index(self, who: T) -> int | None:
        return next((at for at, other in enumerate(self._waiting) if other is who), None)
