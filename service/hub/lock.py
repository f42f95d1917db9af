"""One pull per folder: a lock that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FileError

log = logging.getLogger(__name__)

LOCK = ".lock"
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if absent. Raises FileError if another pull holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                who = f"process {owner}" if owner.isdigit() else "another process"
                raise FileError(
                    f"{who} is pulling into {folder.name}; wait until it has ended, then run the command again"
                ) from error
            log.warning("the disk of %s has no locks (%s): run one pull at a time", folder.name, error.strerror)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
