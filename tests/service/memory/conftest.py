"""Replayed machines, pools over the real memory of this one, and a real memory limit made by the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

MACHINES = Path(__file__).parent / "machines"
_ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """Make a pool of at most 256 MiB on this machine's real memory, with 4 MiB slabs; keyword arguments change its settings."""

    def make(**settings: object) -> Pool:
        chosen = {"limit_bytes": 256 * MIB, "floor": 64 * MIB, "initial_slab": 4 * MIB, "own_slab": MIB, **settings}
        return Pool("cpu", MemorySettings(**chosen), read_truth)  # type: ignore[arg-type]

    return make


@dataclass(frozen=True)
class Cgroup:
    """A memory group made for one test; `limit_file` takes bytes."""

    folder: Path
    version: int

    @property
    def limit_file(self) -> Path:
        return self.folder / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")

    def kills(self) -> int:
        """How many processes of the group the kernel has killed for memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        rows = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(rows["oom_kill"])

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python script in the group, from before its first import on; 120 s at most."""
        enter = f"import os, pathlib; pathlib.Path({str(self.folder / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        command = [sys.executable, "-c", enter + script, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


_numbers = count()


@pytest.fixture
def memory_cgroup() -> Iterator[Cgroup]:
    """A real memory control group, v1 or v2, empty again when the test ends. Needs root and a memory controller, and says so."""
    name = f"onedesk-test-{os.getpid()}-{next(_numbers)}"
    folder, version, reason = _make_group(name)
    if folder is None:
        pytest.fail(f"this test sets a real memory limit and needs root and a memory controller under {_ROOT}: {reason}", pytrace=False)
    yield Cgroup(folder, version)
    folder.rmdir()


def _make_group(name: str) -> tuple[Path | None, int, str]:
    reason = "neither memory/memory.limit_in_bytes (v1) nor cgroup.controllers with memory (v2) is there"
    for parent, version in ((_ROOT / "memory", 1), (_ROOT, 2), (_ROOT / "unified", 2)):
        controllers = parent / "cgroup.controllers"
        has = (
            (parent / "memory.limit_in_bytes").exists()
            if version == 1
            else controllers.exists() and "memory" in controllers.read_text().split()
        )
        if not has:
            continue
        try:
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+memory")
            (parent / name).mkdir()
        except OSError as error:
            reason = str(error)
            continue
        return parent / name, version, ""
    return None, 0, reason
