"""Runs between this process and a child of another engine, so that no orphan is left, however this process ends.
Standard library only.

python -I -S guardian.py GRACE ARGV...

Starts ARGV in a process group of its own. Prints its process id to stdout, or "!" and the reason why it could not
start. Ends the group at SIGTERM, when its standard input closes, or when its parent is gone: SIGTERM, then SIGKILL
after GRACE seconds. Its exit status is the child's, 128 + N for signal N. When the child has ended, the rest of the
group is killed.

Why a process: the kernel's own mechanism (PR_SET_PDEATHSIG) follows the thread that started the child, and our threads
end before the process does. The guardian has one thread that lives as long as the child.
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
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)

    def die_with_guardian() -> None:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)

    try:
        # There is only this thread, so no lock can be held that the code between fork and exec needs.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_guardian)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"!{getattr(error, 'strerror', None) or error}")
        return 127
    _say(str(child.pid))
    threading.Thread(target=_watch_parent, args=(parent, asked), daemon=True).start()
    threading.Thread(target=_end_group, args=(child.pid, grace, asked), daemon=True).start()
    # Wait without reaping: its process id, and so its group's id, must not be reused before the group is gone.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return 128 - status if status < 0 else status


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode("utf-8", "replace") + b"\n")


def _watch_parent(parent: int, asked: threading.Event) -> None:
    """Return when standard input closes or the parent changes (a fork of the parent could hold the input open)."""
    while os.getppid() == parent:
        if select.select([0], [], [], _LOOK_SECONDS)[0] and not os.read(0, 1):
            break
    asked.set()


def _end_group(group: int, grace: float, asked: threading.Event) -> None:
    asked.wait()
    _signal_group(group, signal.SIGTERM)
    threading.Event().wait(grace)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = main()
    # Threads that still wait for a reason to end must not delay the exit.
    os._exit(code)
