"""The costs of each stage of a run: seconds, bytes, page faults, pool allocations, allocator time, share of the read
bandwidth."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import TracebackType

from ..core import Stage
from ..loader.stream import StreamStats
from ..memory.meminfo import Faults, read_faults
from ..memory.pool import Pool

# Stages bound by reading weights. The others wait for a disk, or compute more than they read.
BOUND_BY_READING = ("decode",)


@dataclass(slots=True)
class _Sums:
    """A mutable Stage. Each token adds to several; a new Stage each time took longer than the work measured in a small
    model."""

    seconds: float = 0.0
    bytes: int = 0
    major_faults: int = 0
    minor_faults: int = 0
    allocations: int = 0
    allocator_seconds: float = 0.0
    proposed: int = 0
    accepted: int = 0
    ended: Faults | None = None  # of the process, at the last measurement

    def stage(self) -> Stage:
        cost = self.seconds, self.bytes, self.major_faults, self.minor_faults, self.allocations, self.allocator_seconds
        return Stage(*cost, proposed=self.proposed, accepted=self.accepted)


class Measure:
    """Counts a code block's seconds, page faults of the process, pool allocations and their seconds towards a stage."""

    __slots__ = ("_allocated", "_before", "_pool", "_started", "_sums")

    def __init__(self, sums: _Sums, pool: Pool) -> None:
        self._sums = sums
        self._pool = pool

    def __enter__(self) -> None:
        self._before, self._allocated = read_faults(), (self._pool.allocations, self._pool.seconds)
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sums, pool, before, allocated = self._sums, self._pool, self._before, self._allocated
        sums.seconds += time.perf_counter() - self._started
        after = sums.ended = read_faults()
        sums.major_faults += after.major - before.major
        sums.minor_faults += after.minor - before.minor
        sums.allocations += pool.allocations - allocated[0]
        sums.allocator_seconds += pool.seconds - allocated[1]


class StageMeter:
    """Sums the costs inside `measure` by stage. `ceiling`: the machine's measured read bandwidth in bytes per second,
    or None."""

    def __init__(self, pool: Pool, ceiling: float | None = None) -> None:
        self._pool = pool
        self._ceiling = ceiling
        self._sums: dict[str, _Sums] = {}
        self._began = read_faults()

    @property
    def stages(self) -> dict[str, Stage]:
        """The costs of each stage so far, with bandwidth shares."""
        return {name: self._with_share(name, sums.stage()) for name, sums in self._sums.items()}

    def measure(self, name: str) -> Measure:
        """Count the code block towards stage `name`."""
        return Measure(self._of(name), self._pool)

    def add(self, name: str, cost: Stage) -> None:
        """Count `cost` towards stage `name`."""
        sums = self._of(name)
        sums.seconds += cost.seconds
        sums.bytes += cost.bytes
        sums.major_faults += cost.major_faults
        sums.minor_faults += cost.minor_faults
        sums.allocations += cost.allocations
        sums.allocator_seconds += cost.allocator_seconds
        sums.proposed += cost.proposed
        sums.accepted += cost.accepted

    def add_reading(self, stats: StreamStats, waited: float) -> None:
        """Count reading of weights that went on after `load`, during `prefill`, which waited `waited` seconds for it.

        The readers' page faults count towards the load, all others since the end of the load towards the prefill.
        """
        faults = read_faults().since(self._of("load").ended or self._began)
        self.add("load", Stage(stats.seconds, stats.bytes, stats.major_faults, stats.minor_faults))
        self.add("prefetch", Stage(waited, stats.bytes))
        prefill = self._of("prefill")
        prefill.major_faults = max(0, faults.major - stats.major_faults)
        prefill.minor_faults = max(0, faults.minor - stats.minor_faults)

    def add_bytes(self, name: str, nbytes: int, seconds: float = 0.0) -> None:
        """Count bytes read or moved towards stage `name`, and their seconds where nothing else counts them."""
        sums = self._of(name)
        sums.bytes += nbytes
        sums.seconds += seconds

    def since(self, before: Mapping[str, Stage]) -> dict[str, Stage]:
        """The costs of each stage since `stages` was `before`; stages without any are left out."""
        costs = {name: _difference(sums.stage(), before.get(name, Stage())) for name, sums in self._sums.items()}
        return {name: self._with_share(name, cost) for name, cost in costs.items() if cost != Stage()}

    def _of(self, name: str) -> _Sums:
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = _Sums()
        return sums

    def _with_share(self, name: str, stage: Stage) -> Stage:
        if self._ceiling is None or name not in BOUND_BY_READING or stage.seconds <= 0:
            return stage
        return replace(stage, bandwidth_share=stage.bytes / stage.seconds / self._ceiling)


def _difference(stage: Stage, before: Stage) -> Stage:
    names = [item.name for item in fields(Stage) if item.name != "bandwidth_share"]
    return Stage(**{name: getattr(stage, name) - getattr(before, name) for name in names})


def stages_line(stages: Mapping[str, Stage]) -> str:
    """All stages in one log line."""
    return "; ".join(f"{name} {_words(stage)}" for name, stage in stages.items())


def _words(stage: Stage) -> str:
    share = "" if stage.bandwidth_share is None else f" ({stage.bandwidth_share:.0%} of the read ceiling)"
    return (
        f"{stage.seconds:.4f} s, {stage.bytes} B{share}, {stage.major_faults}+{stage.minor_faults} faults, "
        f"{stage.allocations} allocations in {stage.allocator_seconds:.6f} s"
    )
