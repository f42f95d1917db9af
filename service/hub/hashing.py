"""Hashes of files: SHA-256, and git's SHA-1 of a blob if a hub has no other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import Cancelled
from ..loader.files import open_regular
from .remote import RemoteFile

READ_BYTES = 4 << 20


class Hashes:
    """SHA-256 of the bytes so far; with `git_size`, also git's SHA-1 of a blob of that many bytes."""

    def __init__(self, git_size: int | None = None) -> None:
        self._sha256 = hashlib.sha256()
        # Not for security: it is git's name for the content.
        self._git = None if git_size is None else hashlib.sha1(f"blob {git_size}\0".encode(), usedforsecurity=False)

    @classmethod
    def of(cls, file: RemoteFile) -> Hashes:
        """The hashes needed to compare a file with the hub's."""
        return cls(file.size if file.sha256 is None else None)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def mismatch(self, file: RemoteFile) -> str | None:
        """The mismatch with the hub's hash, in words; None if they agree."""
        if file.sha256 is not None:
            return None if self.sha256 == file.sha256 else f"SHA-256 {self.sha256[:16]}..., not {file.sha256[:16]}..."
        found = "" if self._git is None else self._git.hexdigest()
        return None if found == file.git_sha1 else f"git SHA-1 {found[:16]}..., not {(file.git_sha1 or '')[:16]}..."


def feed(fd: int, hashes: Hashes, length: int, stop: Callable[[], bool] = lambda: False) -> int:
    """Hash the first `length` bytes of an open file; returns how many there were, and drops their pages from the page
    cache.

    Raises Cancelled once `stop` is true.
    """
    done = 0
    buffer = bytearray(min(READ_BYTES, max(1, length)))
    view = memoryview(buffer)
    while done < length:
        if stop():
            raise Cancelled("interrupted")
        count = os.preadv(fd, [view[: length - done]], done)
        if not count:
            break
        hashes.update(view[:count])
        drop_pages(fd, done, count)
        done += count
    return done


def hash_file(path: Path, file: RemoteFile, stop: Callable[[], bool] = lambda: False) -> Hashes:
    """The hashes of a local file that should be `file`. Raises FileError, Cancelled."""
    with open_regular(path, file.path) as (fd, source):
        hashes = Hashes.of(file)
        feed(fd, hashes, source.size, stop)
        return hashes


def drop_pages(fd: int, offset: int, length: int) -> None:
    """Drop synced bytes from the page cache: on unified memory they would displace loaded models."""
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except (AttributeError, OSError):  # a system or file system without posix_fadvise
        return
