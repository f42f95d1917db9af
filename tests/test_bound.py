"""A child that is bound to the tests ends with them, and is otherwise unchanged."""

from __future__ import annotations

import subprocess
import sys

import psutil
from bound import bound

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_bound_child_keeps_its_id_and_ends_when_its_parent_is_killed() -> None:
    parent = "import subprocess, sys; from bound import bound; child = subprocess.Popen(bound(sys.argv[1:])); "
    parent += "print(child.pid, flush=True); child.wait()"
    command = [sys.executable, "-c", parent, sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=__file__.rpartition("/")[0]) as process:
        assert process.stdout is not None
        started, says = (int(process.stdout.readline()) for _ in range(2))
        assert started == says
        child = psutil.Process(says)
        process.kill()
        child.wait(30)


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    first, last = bound([sys.executable, "-c", "print(1)"])[:4], [sys.executable, "-c", "print(1)"]
    assert subprocess.run([*first, "1", *last], capture_output=True, check=True).stdout == b""
