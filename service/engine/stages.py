"""What each stage of a run cost: seconds, bytes, page faults, pool allocations, allocator time, share of the read bandwidth."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

from ..core import Stage
from ..loader.stream import StreamStats
from ..memory.meminfo import read_faults
from ..memory.pool import Pool

# Stages whose speed is that of reading weights. The others wait for a disk, or compute more than they read.
BOUND_BY_READING = ("decode",)


class StageMeter:
    """Adds up, stage by stage, what happens inside `measure`. `ceiling` is the machine's measured bytes a second, None if unknown."""

    def __init__(self, pool: Pool, ceiling: float | None = None) -> None:
        self._pool = pool
        self._ceiling = ceiling
        self._stages: dict[str, Stage] = {}
        self._load_ended = read_faults()

    @property
    def stages(self) -> dict[str, Stage]:
        """What each stage cost so far, the bandwidth shares worked out."""
        return {name: self._with_share(name, stage) for name, stage in self._stages.items()}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the block's seconds, faults of the whole process, pool allocations and their seconds towards stage `name`."""
        before, pool = read_faults(), self._pool.counters()
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds, after, pool_after = time.perf_counter() - started, read_faults(), self._pool.counters()
            faults = after.since(before)
            self.add(
                name,
                Stage(
                    seconds,
                    0,
                    faults.major,
                    faults.minor,
                    pool_after.allocations - pool.allocations,
                    pool_after.seconds - pool.seconds,
                ),
            )
            if name == "load":
                self._load_ended = after

    def add(self, name: str, cost: Stage) -> None:
        """Count `cost` towards stage `name`."""
        had = self._stages.get(name, Stage())
        self._stages[name] = Stage(
            had.seconds + cost.seconds,
            had.bytes + cost.bytes,
            had.major_faults + cost.major_faults,
            had.minor_faults + cost.minor_faults,
            had.allocations + cost.allocations,
            had.allocator_seconds + cost.allocator_seconds,
            proposed=had.proposed + cost.proposed,
            accepted=had.accepted + cost.accepted,
        )

    def add_reading(self, stats: StreamStats, waited: float) -> None:
        """Count a reading that began with the end of `load` and ran beside `prefill`, which waited `waited` seconds for it.

        The readers' own faults belong to the load; of all others since the load's end the prompt's computation is the cause.
        """
        faults = read_faults().since(self._load_ended)
        self.add("load", Stage(stats.seconds, stats.bytes, stats.major_faults, stats.minor_faults))
        self.add("prefetch", Stage(waited, stats.bytes))
        self._stages["prefill"] = replace(
            self._stages.get("prefill", Stage()),
            major_faults=max(0, faults.major - stats.major_faults),
            minor_faults=max(0, faults.minor - stats.minor_faults),
        )

    def add_bytes(self, name: str, nbytes: int) -> None:
        """Count bytes read or moved towards stage `name`."""
        had = self._stages.get(name, Stage())
        self._stages[name] = replace(had, bytes=had.bytes + nbytes)

    def since(self, before: Mapping[str, Stage]) -> dict[str, Stage]:
        """What each stage cost since `stages` was `before`; stages that have cost nothing since are left out."""
        costs = {name: _difference(stage, before.get(name, Stage())) for name, stage in self._stages.items()}
        return {name: self._with_share(name, cost) for name, cost in costs.items() if cost != Stage()}

    def _with_share(self, name: str, stage: Stage) -> Stage:
        if self._ceiling is None or name not in BOUND_BY_READING or stage.seconds <= 0:
            return stage
        return replace(stage, bandwidth_share=stage.bytes / stage.seconds / self._ceiling)


def _difference(stage: Stage, before: Stage) -> Stage:
    names = [item.name for item in fields(Stage) if item.name != "bandwidth_share"]
    return Stage(**{name: getattr(stage, name) - getattr(before, name) for name in names})


def stages_line(stages: Mapping[str, Stage]) -> str:
    """All stages in one line for the log."""
    return "; ".join(f"{name} {_words(stage)}" for name, stage in stages.items())


def _words(stage: Stage) -> str:
    share = "" if stage.bandwidth_share is None else f" ({stage.bandwidth_share:.0%} of the read ceiling)"
    return (
        f"{stage.seconds:.4f} s, {stage.bytes} B{share}, {stage.major_faults}+{stage.minor_faults} faults, "
        f"{stage.allocations} allocations in {stage.allocator_seconds:.6f} s"
    )
