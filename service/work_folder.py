"""Folders for work that may be cut off: each is named after its process, so that a later start can take away what a
dead one left.
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
    """A new folder `.name-PID-*` in `parent` (made if absent), removed when the block ends. Raises OSError.

    Folders of this name whose process is gone are removed first: a process that is ended by a signal cannot tidy up.
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
    except OSError:  # it is somebody else's
        return True
    return True
