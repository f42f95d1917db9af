"""Progress messages of a long measurement, and its remaining time."""

from __future__ import annotations

import sys
import time


class Clock:
    """Reports progress and says whether there is time for more."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._seconds = seconds

    @property
    def over(self) -> bool:
        return time.perf_counter() - self._began > self._seconds

    def tell(self, what: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - self._began:7.1f} s  {what}\n")
        sys.stderr.flush()
