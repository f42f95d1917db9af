"""Random choices inside a real memory limit: nothing is killed, and every refusal has correct figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.lab.confined import (
    LIMITS,
    MODELS,
    ConfinedCase,
    ConfinedOutcome,
    checkpoint_of,
    faults_of,
    random_cases,
)
from onedesk.lab.memory_group import MemoryGroup
from onedesk.service.errors import FileError

MIB = 1 << 20
COUNT = 24
SMALL = "8,27,88"


@pytest.fixture
def group(request: pytest.FixtureRequest):
    """A group of 300 MiB."""
    try:
        made = MemoryGroup(f"onedesk-test-{os.getpid()}", 300 * MIB)
    except FileError as reason:
        pytest.fail(f"this test needs a real memory limit: {reason}", pytrace=False)
    with made:
        yield made


def in_group(group: MemoryGroup, script: str) -> subprocess.CompletedProcess[str]:
    join = f"open({str(group.folder / 'cgroup.procs')!r}, 'w').write('0')\n"
    return subprocess.run([sys.executable, "-c", join + script], capture_output=True, text=True, check=False)


def test_group_limit_is_real(group):
    done = in_group(group, "b = bytearray(400 << 20)\nprint(len(b))")
    assert (done.returncode, done.stdout) == (-9, "")
    assert group.kills == 1
    assert group.hits > 0


def test_the_truth_of_a_confined_process_is_its_groups(group):
    script = """
        from onedesk.service.memory.truth import read_truth
        truth = read_truth("cpu")
        print(truth.rule, truth.cgroup_limit, truth.available)
    """
    done = in_group(group, "\n".join(line.strip() for line in script.splitlines()))
    rule, limit, available = done.stdout.split()
    assert (rule, int(limit)) == ("cgroup", 300 * MIB)
    assert 150 * MIB < int(available) < 300 * MIB


def test_random_choices_work_or_are_refused(tmp_path):
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    command = [sys.executable, "-m", "onedesk.lab.confined", "--count", str(COUNT), "--seed", "4", "--models", SMALL]
    done = subprocess.run(
        [*command, "--config", str(tmp_path / "onedesk.toml")], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    assert "error" not in document, document
    assert (document["kills"], document["wrong"]) == (0, [])
    assert done.returncode == 0
    assert sum(document["became"].values()) == COUNT
    for what in ("written, the picture drawn", "written, the picture refused", "refused"):
        assert any(name.startswith(what) for name in document["became"]), document["became"]


def test_random_cases_are_deterministic_and_spread():
    cases = random_cases(200, 3, list(MODELS))
    assert cases == random_cases(200, 3, list(MODELS)) != random_cases(200, 4, list(MODELS))
    weights = [int(case.model) * 1e6 for case in cases]
    assert any(case.limit < size for case, size in zip(cases, weights, strict=True))
    assert any(case.limit > 20 * size for case, size in zip(cases, weights, strict=True))
    assert min(case.limit for case in cases) >= LIMITS[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("8", tmp_path_factory.mktemp("cache"))


CASE = ConfinedCase("8", 512 * MIB, 256, 64 * MIB, 64 * MIB, True)
RIGHT = ConfinedOutcome(
    True, "", 7_605_760, 1_048_576, 9 * MIB, 500 * MIB, 500 * MIB, 300 * MIB, 0, "drawn", 300 * MIB, True, True, 0, None
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"available": 510 * MIB}, "available is said to be"),
        ({"weights": 9_000_000}, "weights are said to be"),
        ({"kv": 1_048_575}, "KV is said to be"),
        ({"fits": False}, "refused, although"),
        ({"expected": 90 * MIB, "available": 90 * MIB, "scratch": 60 * MIB}, "taken, although"),
        ({"picture": "refused"}, "the picture of"),
        ({"same_text": False}, "the text differs"),
        ({"woken": False}, "was refused when it was to wake"),
        ({"woken": False, "expected": 95 * MIB, "available": 95 * MIB}, None),
        ({"fits": False, "scratch": 400 * MIB, "growth": 40 * MIB}, "not before"),
        ({"fits": False, "scratch": 400 * MIB, "suggested": 128, "suggestion_works": False}, "a context of 128"),
    ],
)
def test_a_wrong_figure_or_answer_is_found(folder, changes, told):
    found = faults_of(CASE, folder, replace(RIGHT, **changes), 0)
    assert (found == []) if told is None else any(told in fault for fault in found), found


def test_a_kill_is_found(folder):
    assert faults_of(CASE, folder, None, 1) == faults_of(CASE, folder, RIGHT, 1) == ["killed (1 by the kernel)"]
