"""Progress of a pull: bytes, the rate of the last seconds, and the remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 10.0  # seconds over which the rate is measured


@dataclass(frozen=True, slots=True)
class ProgressReading:
    """Bytes done and in total, bytes per second, and remaining seconds (None while no rate is known)."""

    done: int
    total: int
    rate: float
    remaining: float | None

    @property
    def line(self) -> str:
        """One line for a terminal."""
        share = self.done / self.total if self.total else 1.0
        left = "" if self.remaining is None else f"  {clock(self.remaining)} left"
        return f"{share:4.0%}  {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB  {self.rate / 1e6:.1f} MB/s{left}"


class Meter:
    """Takes readings; `clock` returns seconds."""

    def __init__(self, total: int, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque([(clock(), done)])

    def read(self, done: int) -> ProgressReading:
        """The state with `done` bytes now."""
        now = self._clock()
        self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[1][0] >= WINDOW:
            self._points.popleft()
        start, before = self._points[0]
        rate = max(0, done - before) / (now - start) if now > start else 0.0
        return ProgressReading(done, self.total, rate, (self.total - done) / rate if rate > 0 else None)


def clock(seconds: float) -> str:
    """Seconds as 0:48, 12:05 or 3:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
