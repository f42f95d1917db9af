"""A pull that is killed at any point of writing, recording or renaming resumes at the next run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bound import bound
from hub_server import Fault
from pulling import Desk

CHILD = Path(__file__).resolve().parents[2] / "pull_child.py"
KILLS = 20
ENDS_WITHIN = 60  # seconds


def child(desk: Desk, phase: str, point: int) -> subprocess.CompletedProcess[str]:
    command = bound([sys.executable, str(CHILD), str(desk.tree), desk.hub.address, phase, str(point)])
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)


@pytest.mark.parametrize("phase", ["download", "sidecar", "rename"])
def test_a_pull_that_was_killed_resumes_and_ends_with_the_right_bytes(desk: Desk, phase: str):
    for path in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        desk.hub.always["storage", path] = Fault("slow", 8 << 10)
    whole = child(desk, "none", 0)
    assert whole.returncode == 0, whole.stderr
    assert desk.same_files()
    points, chance = json.loads(whole.stdout)[phase], random.Random(phase)
    assert points >= 2 * KILLS
    killed = resumed = 0
    for _ in range(2 * KILLS):  # the number of points varies with how the bytes arrive
        point = chance.randint(1, points)
        shutil.rmtree(desk.models / "model")
        status = child(desk, phase, point).returncode
        assert status in (0, -9), f"{phase} {point}"
        killed += status == -9
        for path in (desk.models / "model").glob("*.safetensors"):
            assert path.read_bytes() == desk.hub.repositories["tiny/model"].files[path.name]
        done = desk.pull()
        assert desk.same_files(), f"{phase} {point}"
        resumed += status == -9 and done["fetched"] < done["bytes"]
        if killed == KILLS:
            break
    assert killed == KILLS
    assert resumed >= KILLS // 2
