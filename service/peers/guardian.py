"""Stands between us and a child process of another engine, so that no orphan is left however we end. Standard library
only.

python -I -S guardian.py GRACE ARGV...

Starts ARGV in a process group of its own and says on stdout either its process id or, after "!", why it cannot. Ends
the group when it is told to by SIGTERM, when its standard input closes, or when its parent is gone: SIGTERM, then after
GRACE seconds SIGKILL. Ends with the child's exit status, 128 + N for signal N. What is left of the group when the child
has ended is killed.

Why a process: the kernel's own way (PR_SET_PDEATHSIG) follows the thread that started the child, and our threads end
before us; here there is one thread that lives as long as the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0


def main() -> int:
    """Run until the child has ended."""
    grace, argv = float(sys.argv[1]), sys.argv[2:]
    parent, guardian = os.getppid(), os.getpid()
    told = threading.Event()

    def be_told(number: int, frame: FrameType | None) -> None:
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, be_told)

    def die_with_guardian() -> None:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)

    try:
        # Only this thread runs, so nothing can hold a lock that the child's preparation needs.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_guardian)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"!{getattr(error, 'strerror', None) or error}")
        return 127
    _say(str(child.pid))
    threading.Thread(target=_watch_parent, args=(parent, told), daemon=True).start()
    threading.Thread(target=_end_group, args=(child.pid, grace, told), daemon=True).start()
    # Looked at without being collected, so that its id, and its group's, cannot become another's before the group is
    # gone.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return 128 - status if status < 0 else status


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode("utf-8", "replace") + b"\n")


def _watch_parent(parent: int, told: threading.Event) -> None:
    """Until standard input closes, or, should a fork of the parent hold it open, until the parent is another."""
    while os.getppid() == parent:
        if select.select([0], [], [], _LOOK_SECONDS)[0] and not os.read(0, 1):
            break
    told.set()


def _end_group(group: int, grace: float, told: threading.Event) -> None:
    told.wait()
    _signal_group(group, signal.SIGTERM)
    threading.Event().wait(grace)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = main()
    # Threads that still wait for a reason to end must not hold up the end.
    os._exit(code)
