"""Two processes of one user on one machine, for real: together their limits never exceed what the machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.errors import MemoryFull, RequestError
from onedesk.service.memory.budget import GIB, MIB, MemorySettings, make_budget
from onedesk.service.memory.claims import HOST, Claim, Claims, claims_folder, own_bytes, promised_elsewhere
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import Truth, read_truth

MACHINE = Truth(
    total=24 * GIB,
    available=20 * GIB,
    device_free=None,
    integrated=False,
    page_cache=0,
    mem_free=20 * GIB,
    psi_some_avg10=None,
    host_available=20 * GIB,
    swap_free=0,
    cgroup_limit=None,
    rule="MemAvailable",
)
# Prints [limit, promised, available] of a pool, then does what each line asks: N leases and touches N bytes, an empty
# line ends it.
OWNER = """
import sys, json
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.machine_pool import make_pool
from onedesk.service.memory.truth import read_truth

available = read_truth("cpu").available
pool = make_pool("cpu", MemorySettings(floor=0, **json.loads(sys.argv[1])))
print(json.dumps([pool.budget.limit, pool.budget.promised, available]), flush=True)
kept = []
for line in sys.stdin:
    if not line.strip():
        break
    lease = pool.lease("a", "weights", int(line))
    lease.tensor.fill_(1)
    kept.append(lease)
    pool.claims.update(pool.used())
    print("leased", flush=True)
"""


class Owner:
    """A process with a pool of its own; ended by its id."""

    def __init__(self, folder: Path, **settings: float) -> None:
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        words = [sys.executable, "-c", OWNER, json.dumps(settings)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)

    def figures(self) -> tuple[int, int, int]:
        assert self.process.stdout is not None
        limit, promised, available = json.loads(self.process.stdout.readline())
        return limit, promised, available

    def lease(self, nbytes: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{nbytes}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "leased"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_the_second_of_two_processes_sees_what_the_first_was_promised_and_a_killed_one_counts_no_more(
    run: Path,
) -> None:
    first = Owner(run)
    limit, promised, _ = first.figures()
    assert promised == 0
    second = Owner(run)
    try:
        less, seen, available = second.figures()
        assert abs(seen - limit) < 64 * MIB  # it has taken next to nothing yet
        assert less == int((available - seen) * 0.70) or less <= available - seen
        assert limit + less <= available + 512 * MIB
    finally:
        first.end()
        second.end()
    third = Owner(run)
    _, promised, _ = third.figures()
    third.end()
    assert promised == 0


def test_what_the_first_has_taken_is_not_counted_twice(run: Path) -> None:
    first = Owner(run, limit_bytes=400 * MIB)
    first.figures()
    first.lease(300 * MIB)
    second = Owner(run)
    _, promised, _ = second.figures()
    first.end()
    second.end()
    assert 90 * MIB <= promised <= 110 * MIB


def test_an_absolute_limit_that_the_other_was_promised_is_refused_with_the_figures(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    first = Owner(run)
    limit, _, available = first.figures()
    try:
        wanted = available - limit // 2
        with pytest.raises(
            RequestError, match=r"other processes of this user were promised .* more \(onedesk memory\)"
        ):
            Pool(
                "cpu",
                MemorySettings(limit_bytes=wanted, floor=0),
                lambda: read_truth("cpu"),
                Claims("cpu", claims_folder()),
            )
        assert promised_elsewhere("cpu", read_truth("cpu")) > limit - 64 * MIB
    finally:
        first.end()


def test_many_that_start_at_once_never_promise_more_than_there_is(run: Path) -> None:
    owners = [Owner(run) for _ in range(4)]
    try:
        figures = [owner.figures() for owner in owners]
    finally:
        for owner in owners:
            owner.end()
    assert sum(limit for limit, _, _ in figures) <= max(available for _, _, available in figures)
    assert len({limit for limit, _, _ in figures}) == len(owners)


def claim(**other: object) -> Claim:
    values = {
        "pid": os.getppid(),
        "started": psutil.Process(os.getppid()).create_time(),
        "memory": HOST,
        "limit": 10 * GIB,
        "before": 0,
    }
    return Claim(**{**values, "leased": 0, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stale", [{"started": 1.0}, {"pid": 2**22 + 1}, {"memory": "cuda x"}, {"limit": -1}, {"limit": "10"}]
)
def test_a_claim_of_a_process_that_is_gone_of_another_memory_or_broken_counts_for_nothing(
    tmp_path: Path, stale: dict[str, object]
) -> None:
    for values, wanted in (({}, 10 * GIB), (stale, 0)):
        (tmp_path / "1-cpu.json").write_text(json.dumps(_document(claim(**values))))
        promised = []
        claims = Claims("cpu", tmp_path)
        claims.size(
            MACHINE, lambda nbytes, into=promised: (into.append(nbytes), make_budget(MACHINE, MemorySettings()))[1]
        )
        assert promised == [wanted]
        claims.withdraw()


def _document(of: Claim) -> dict[str, object]:
    return {name: getattr(of, name) for name in Claim.__dataclass_fields__}


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"pid": 1}', b"9" * 400])
def test_a_damaged_claim_is_removed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "7-cpu.json").write_bytes(content)
    assert Claims("cpu", tmp_path).others(HOST) == []
    assert list(tmp_path.glob("*.json")) == []


def test_the_limit_is_of_what_the_others_leave() -> None:
    budget = make_budget(MACHINE, MemorySettings(), promised=14 * GIB)
    assert (budget.limit, budget.promised) == (int(6 * GIB * 0.7), 14 * GIB)
    assert make_budget(MACHINE, MemorySettings(), promised=30 * GIB).limit == 0


@given(limit=st.integers(0, 64 * GIB), leased=st.none() | st.integers(0, 64 * GIB), before=st.integers(0, 64 * GIB))
def test_what_is_outstanding_is_never_negative_nor_above_the_limit(limit: int, leased: int | None, before: int) -> None:
    for memory in (HOST, "cuda x"):
        assert 0 <= claim(limit=limit, leased=leased, before=before, memory=memory).outstanding() <= limit


def test_a_refusal_names_what_others_were_promised(tmp_path: Path) -> None:
    (tmp_path / "1-cpu.json").write_text(json.dumps(_document(claim())))
    pool = Pool("cpu", MemorySettings(), lambda: MACHINE, Claims("cpu", tmp_path))
    assert pool.budget.limit == int(10 * GIB * 0.70)
    with pytest.raises(
        MemoryFull, match=r"limit 7 GiB, other processes of this user were promised 10 GiB more \(onedesk memory\)"
    ):
        pool.lease("a", "weights", 9 * GIB)


def test_a_claim_goes_with_its_pool_and_not_with_a_fork(tmp_path: Path) -> None:
    pool = Pool("cpu", MemorySettings(), lambda: MACHINE, Claims("cpu", tmp_path))
    (file,) = tmp_path.glob("*.json")
    written = json.loads(file.read_text())
    assert (written["pid"], written["limit"], written["leased"]) == (os.getpid(), pool.budget.limit, None)
    pool.claims.update(3 * MIB)
    assert json.loads(file.read_text())["leased"] == 3 * MIB
    pool.claims.withdraw()
    assert list(tmp_path.glob("*.json")) == []


def test_the_folder_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = claims_folder()
    assert folder == tmp_path / "onedesk"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert claims_folder() is None
    assert "is not a folder that only this user can enter" in caplog.text
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert claims_folder() is None
    budget = Pool("cpu", MemorySettings(), lambda: MACHINE, Claims("cpu", None)).budget
    assert budget.limit == int(20 * GIB * 0.70)


def test_own_bytes_are_those_of_a_process_and_its_children() -> None:
    assert own_bytes(os.getpid()) > 10 * MIB
    assert own_bytes(2**22 + 1) == 0
