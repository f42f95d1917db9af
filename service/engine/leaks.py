"""What each stage leaves behind in the process, beside the leases, over the last uses of a handle; names the stage that grows."""

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
# What is the process's own: pages of a file can be dropped, and a library's are shared.
OWN_KEYS = ("RssAnon", "RssShmem", "VmSwap")
KEPT_USES = 20
FEWEST_USES = 4
# A stage must have left this much behind over the uses that are kept, and something in most of them: arenas and caches settle in steps.
GROWN = 1 << 20
BETWEEN = "between"
# What a load makes and a release takes apart is one account.
PAIRED = {"release": "load"}


def own_bytes() -> int:
    """Bytes of this process that are only its own (anonymous, shared memory, swapped); the peak of them where there is no /proc."""
    if not STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = (line.split() for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words and words[0].rstrip(":") in OWN_KEYS)


def outside_bytes(pool: Pool) -> int:
    """Bytes of the process that are in none of the pool's leases; on a device of its own memory, torch's blocks beside them too."""
    leased = sum(lease.resident() for lease in pool.holders())
    if not pool.backend.commits:
        return own_bytes() - leased
    import torch

    return own_bytes() + torch.cuda.memory_allocated(pool.device) - pool.held()


@dataclass(frozen=True, slots=True)
class StageGrowth:
    """What one stage left behind over the uses that are kept, in bytes: in all, in the median use, and in the last one."""

    total: int
    median: int
    last: int


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Memory by stage over the last `uses` of a handle. `outside` is what the process holds beside leases now; `grew` names the stage
    that leaves something behind use after use, None if none does. `between` is what others in the process did between two uses.
    """

    owner: str
    uses: int
    outside: int
    growth: int
    stages: Mapping[str, StageGrowth]
    grew: str | None


class LeakWatch:
    """Books the change of the process's memory to the stage that has just ended. For one handle, under its lock.

    Other threads of the process are in the figures too: what they take during a stage is booked to it.
    """

    def __init__(self, owner: str, pool: Pool, *, kept: int = KEPT_USES) -> None:
        self._owner = owner
        self._pool = pool
        self._uses: deque[dict[str, int]] = deque(maxlen=kept)
        self._use: dict[str, int] = {}
        self._begun = 0
        self._level: int | None = None

    def begin(self) -> None:
        """A use of the handle begins. The first one is not kept: libraries, threads and caches come into being in it."""
        self.mark(BETWEEN)
        if self._begun > 1:
            self._uses.append(self._use)
        if self._begun:
            self._use = {}
        self._begun += 1

    def mark(self, stage: str) -> None:
        """`stage` has ended: what changed since the mark before is its."""
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
