"""Children that end with the tests, however those end: python bound.py PARENT ARGV... becomes ARGV. Standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = (
    1  # kept through exec; it fires when the starting thread ends, so that thread must outlive the child
)


def bound(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv`, with the same process id, until this process ends."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *argv]


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.argv[2], sys.argv[2:])
