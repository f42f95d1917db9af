"""A real memory limit, set by the test as root: the figures are right, and a full pool is not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from onedesk.service.memory.budget import MIB
from onedesk.service.memory.cgroup import CgroupMemory, read_cgroup

MACHINES = Path(__file__).parent / "machines"
_ROOT = Path("/sys/fs/cgroup")

FILL = """
import json, sys
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import MIB, MemorySettings, Need
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

before = read_truth()
pool = Pool("cpu", MemorySettings(floor=64 * MIB), read_truth)
hopeless = ""
try:
    pool.check("giant", Need(weights=before.available))
except MemoryFull as error:
    hopeless = str(error)
leases = []
try:
    while True:
        lease = pool.lease("writer", "weights", 32 * MIB)
        lease.populate()
        leases.append(lease)
except MemoryFull as error:
    full = str(error)
held = read_truth()
measured = sum(lease.release().measured for lease in leases)
after = read_truth()
print(json.dumps({
    "limit": before.cgroup_limit, "rule": before.rule, "available": before.available, "held": held.available,
    "after": after.available, "spendable": pool.budget.spendable, "leased": len(leases) * 32 * MIB,
    "measured": measured, "hopeless": hopeless, "full": full,
}))
"""

REFUSE = """
import json, sys
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import MIB, MemorySettings, Need
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

pool = Pool("cpu", MemorySettings(), read_truth)
truth, words = read_truth(), []
check = lambda: pool.check("writer", Need(weights=64 * MIB))
for attempt in (check, lambda: pool.lease("writer", "weights", 64 * MIB)):
    try:
        attempt()
    except MemoryFull as error:
        words.append(str(error))
figures = {"available": truth.available, "limit": truth.cgroup_limit, "budget": pool.budget.limit}
print(json.dumps(figures | {"words": words}))
"""


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
        """Run a Python script in the group, from before its first import on, for at most 120 s."""
        enter = (
            f"import os, pathlib; pathlib.Path({str(self.folder / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        )
        command = [sys.executable, "-c", enter + script, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


_numbers = count()


@pytest.fixture
def memory_cgroup() -> Iterator[Cgroup]:
    """A real memory control group, v1 or v2, empty again when the test ends. Needs root and a memory controller, and
    says so.
    """
    name = f"onedesk-test-{os.getpid()}-{next(_numbers)}"
    folder, version, reason = _make_group(name)
    if folder is None:
        pytest.fail(
            f"this test sets a real memory limit and needs root and a memory controller under {_ROOT}: {reason}",
            pytrace=False,
        )
    yield Cgroup(folder, version)
    _remove_group(folder)


def _remove_group(folder: Path) -> None:
    """The kernel releases a group a moment after its last process ended."""
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
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


def answer(group: Cgroup, script: str) -> dict[str, object]:
    done = group.run(script)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def test_pool_fills_budget_inside_cgroup_limit(memory_cgroup: Cgroup):
    limit = 1024 * MIB
    memory_cgroup.limit_file.write_text(str(limit))
    found = answer(memory_cgroup, FILL)
    assert memory_cgroup.kills() == 0
    assert found["limit"] == limit
    assert found["rule"] == "cgroup"
    assert 0 < found["available"] < limit
    assert found["spendable"] == pytest.approx(0.7 * 0.95 * found["available"], rel=0.02)
    assert found["spendable"] - 32 * MIB < found["leased"] <= found["spendable"]
    assert found["measured"] == found["leased"]
    assert found["held"] <= found["available"] - found["leased"] + 16 * MIB
    assert found["after"] >= found["available"] - 16 * MIB
    assert "giant needs" in found["hopeless"]
    assert "limit" in found["full"]


def test_hopeless_limit_is_refused_before_allocation(memory_cgroup: Cgroup):
    limit = 500 * MIB  # Python and torch take a part of it, and the default floor is 512 MiB
    memory_cgroup.limit_file.write_text(str(limit))
    found = answer(memory_cgroup, REFUSE)
    assert memory_cgroup.kills() == 0
    assert found["limit"] == limit
    assert found["budget"] == 0
    assert 0 < found["available"] < limit
    check, lease = found["words"]
    for words in (check, lease):
        assert "limit 0 B" in words
        assert "floor 512 MiB" in words
    assert "Nothing fits now" in check
    assert "0 B can be leased" in lease


def test_cgroup_is_read_from_own_proc(memory_cgroup: Cgroup):
    """The same reader on this process: no limit of the test's group applies to it."""
    memory_cgroup.limit_file.write_text(str(700 * MIB))
    ours = read_cgroup(Path("/proc"), Path("/sys/fs/cgroup"))
    assert ours is None or ours.limit != 700 * MIB
    theirs = memory_cgroup.run(
        "from pathlib import Path\nfrom onedesk.service.memory.cgroup import read_cgroup\n"
        "found = read_cgroup(Path('/proc'), Path('/sys/fs/cgroup'))\nprint(found.limit, found.group)"
    )
    assert theirs.returncode == 0, theirs.stderr[-2000:]
    assert theirs.stdout.split() == [str(700 * MIB), f"/{memory_cgroup.folder.name}"]


def test_a_replayed_group_names_where_the_limit_lies():
    found = read_cgroup(MACHINES / "container_v2" / "proc", MACHINES / "container_v2" / "cgroup")
    assert found == CgroupMemory(limit=8 << 30, usage=6 << 30, reclaimable=1 << 30, group="/onedesk.slice")
    assert found.headroom == 3 << 30
    found = read_cgroup(MACHINES / "container_v1" / "proc", MACHINES / "container_v1" / "cgroup")
    assert found is not None
    assert (found.group, found.headroom) == ("/", 12 << 30)


def test_usage_above_the_limit_is_no_headroom():
    assert CgroupMemory(limit=100, usage=150, reclaimable=20, group="/").headroom == 0


@pytest.mark.parametrize(
    "text",
    ["", "garbage\n", "0::/../../etc\n", "5:memory\n", "5:memory:/\n0::/\n", "5:cpuset,memory:/a/b\n"],
    ids=range(6),
)
def test_odd_membership_files_mean_no_limit(tmp_path: Path, text: str):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(text)
    (tmp_path / "cgroup" / "memory").mkdir(parents=True)
    assert read_cgroup(tmp_path / "proc", tmp_path / "cgroup") is None


def test_comounted_controllers_are_found(tmp_path: Path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("5:cpuset,memory:/a\n")
    group = tmp_path / "cgroup" / "cpuset,memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("400\n")
    assert read_cgroup(tmp_path / "proc", tmp_path / "cgroup") == CgroupMemory(1000, 400, 0, "/a")
