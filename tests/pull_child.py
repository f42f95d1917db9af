"""A pull that kills itself: TREE ADDRESS PHASE POINT. Without a point it prints the number of points per phase.

Points are before and after each call that changes the disk; a write is killed after half of its bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hub_server import Hub
from onedesk.service.hub import transfer
from pulling import Desk

COUNTS: Counter[str] = Counter()
BLOCK = 8 << 10


def reached(phase: str, wanted: str, point: int) -> None:
    COUNTS[phase] += 1
    if phase == wanted and COUNTS[phase] == point:
        os.kill(os.getpid(), signal.SIGKILL)


def phase_of(name: str, arguments: tuple[Any, ...]) -> str | None:
    """The phase of a call: writing a file's bytes, recording their count, or renaming the file."""
    first = arguments[0]
    path = str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else str(first)
    if name == "pwrite":
        return "download"
    if path.endswith((".part.json", ".part.json.tmp")):
        return "rename" if name == "unlink" else "sidecar"
    if path.endswith(".part"):
        return "sidecar" if name == "fsync" else "rename"
    return "rename" if Path(path).name == "model" or "onedesk.json" in path else None


def trapped(name: str, wanted: str, point: int) -> Callable[..., Any]:
    original = getattr(os, name)

    def call(*arguments: Any, **more: Any) -> Any:
        phase = phase_of(name, arguments)
        if phase is None:
            return original(*arguments, **more)
        if name == "pwrite" and phase == wanted and COUNTS[phase] + 1 == point:
            fd, data, offset = arguments
            original(fd, data[: len(data) // 2], offset)
        reached(phase, wanted, point)
        result = original(*arguments, **more)
        reached(phase, wanted, point)
        return result

    return call


def main() -> None:
    tree, address, wanted, point = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    for name in ("pwrite", "fsync", "replace", "rename", "unlink"):
        setattr(os, name, trapped(name, wanted, point))
    transfer.BLOCK = BLOCK
    hub = Hub()
    hub.address = address
    desk = Desk(tree, hub)
    desk.limited(sync=4 * BLOCK)
    desk.pull()
    print(json.dumps(COUNTS))


main()
