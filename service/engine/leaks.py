"""Memory that each stage leaves in the process outside the leases, over the last uses of a handle; names a stage that
grows."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..memory.pool import Pool

STATUS = Path("/proc/self/status")
# The process's own memory: pages of a file can be dropped, and a library's are shared.
OWN_KEYS = ("RssAnon", "RssShmem", "VmSwap")
KEPT_USES = 20
FEWEST_USES = 4
# A stage grows if it leaves this many bytes over the recorded uses, and some in most of them: arenas and caches settle
# in steps.
GROWN = 1 << 20
BETWEEN = "between"
# A release returns what the load took, so both count as one.
PAIRED = {"release": "load"}


def own_bytes() -> int:
    """Bytes of this process alone (anonymous, shared memory, swapped); their peak where there is no /proc."""
    if not STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = (line.split() for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words and words[0].rstrip(":") in OWN_KEYS)


def outside_bytes(pool: Pool) -> int:
    """Bytes of the process outside the pool's leases; on a device with memory of its own, torch's other blocks
    included."""
    leased = sum(lease.resident() for lease in pool.holders())
    if not pool.backend.commits:
        return own_bytes() - leased
    import torch

    return own_bytes() + torch.cuda.memory_allocated(pool.device) - pool.held()


@dataclass(frozen=True, slots=True)
class StageGrowth:
    """Bytes that one stage left over the recorded uses: in total, in the median use, and in the last one."""

    total: int
    median: int
    last: int


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Memory by stage over the last `uses` of a handle. `outside`: bytes of the process outside leases now. `grew`
    names the stage that leaves bytes use after use, None if none does. The stage "between" is what else the process did
    between two uses.
    """

    owner: str
    uses: int
    outside: int
    growth: int
    stages: Mapping[str, StageGrowth]
    grew: str | None


class LeakWatch:
    """Counts the change of the process's memory towards the stage that has just ended. For one handle, under its lock.

    Memory that other threads take during a stage counts towards it too.
    """

    def __init__(self, owner: str, pool: Pool, *, kept: int = KEPT_USES) -> None:
        self._owner = owner
        self._pool = pool
        self._uses: deque[dict[str, int]] = deque(maxlen=kept)
        self._use: dict[str, int] = {}
        self._begun = 0
        self._level: int | None = None

    def begin(self) -> None:
        """A use of the handle begins. The first one is not recorded: libraries, threads and caches are created in
        it."""
        self.mark(BETWEEN)
        if self._begun > 1:
            self._uses.append(self._use)
        if self._begun:
            self._use = {}
        self._begun += 1

    def mark(self, stage: str) -> None:
        """`stage` has ended: the change since the last mark counts towards it."""
        now = outside_bytes(self._pool)
        if self._level is not None:
            self._use[stage] = self._use.get(stage, 0) + now - self._level
        self._level = now

    def report(self) -> LeakReport:
        """The uses that have ended, the last one included."""
        uses = [*self._uses, self._use] if self._begun > 1 else []
        names = dict.fromkeys(name for use in uses for name in use)
        stages = {name: _growth([use.get(name, 0) for use in uses]) for name in names}
        growth = sum(stage.total for stage in stages.values())
        return LeakReport(self._owner, len(uses), self._level or 0, growth, stages, _grown(uses, names))


def _growth(changes: list[int]) -> StageGrowth:
    return StageGrowth(sum(changes), int(statistics.median(changes)), changes[-1])


def _grown(uses: list[dict[str, int]], names: Mapping[str, None]) -> str | None:
    """The stage with the largest steady growth, a release's return counted against the load's."""
    if len(uses) < FEWEST_USES:
        return None
    steady: dict[str, int] = {}
    for name in names:
        if name in PAIRED:
            continue
        parts = [name, *(other for other, pair in PAIRED.items() if pair == name)]
        changes = [sum(use.get(part, 0) for part in parts) for use in uses]
        if sum(changes) >= GROWN and statistics.median(changes) > 0:
            steady[name] = sum(changes)
    return max(steady, key=lambda name: steady[name], default=None)
