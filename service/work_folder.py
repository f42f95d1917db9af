"""Temporary folders for work that may be interrupted. Each has its process id in its name, so that a later start can
remove those of dead processes.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder `.name-PID-*` in `parent` (created if absent), removed when the block ends. Raises OSError.

    Folders of this name whose process is gone are removed first: a process that is killed by a signal cannot clean up.
    """
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{name}-"
    for left in parent.glob(f"{prefix}*-*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            log.info("removing %s, which process %s left unfinished", left.name, pid)
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as folder:
        yield Path(folder)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True
