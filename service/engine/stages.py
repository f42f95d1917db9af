"""What each stage of a run cost: seconds, bytes, page faults, pool allocations."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..core import Stage
from ..loader.stream import StreamStats
from ..memory.pool import Pool


class StageMeter:
    """Adds up, stage by stage, what happens inside `measure`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.stages: dict[str, Stage] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the block's seconds, faults of the whole process and pool allocations towards stage `name`."""
        before, allocations, started = resource.getrusage(resource.RUSAGE_SELF), self._pool.allocations, time.perf_counter()
        try:
            yield
        finally:
            seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
            had = self.stages.get(name, Stage())
            self.stages[name] = Stage(
                had.seconds + seconds,
                had.bytes,
                had.major_faults + after.ru_majflt - before.ru_majflt,
                had.minor_faults + after.ru_minflt - before.ru_minflt,
                had.allocations + self._pool.allocations - allocations,
            )

    def add(self, name: str, stats: StreamStats) -> None:
        """Count what a reading took, which ran beside other stages, towards stage `name`."""
        had = self.stages.get(name, Stage())
        self.stages[name] = replace(had, seconds=had.seconds + stats.seconds, bytes=had.bytes + stats.bytes)

    def add_bytes(self, name: str, nbytes: int) -> None:
        """Count bytes read or moved towards stage `name`."""
        had = self.stages.get(name, Stage())
        self.stages[name] = replace(had, bytes=had.bytes + nbytes)
