"""A file that is being fetched: NAME.part, and NAME.part.json with the number of its synced bytes."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, OnedeskError
from ..loader.files import short
from ..loader.header import ENDINGS, read_header
from .hashing import Hashes, drop_pages, feed
from .paths import PART, SIDECAR
from .remote import RemoteFile

log = logging.getLogger(__name__)

_SIDECAR_BYTES = 64 << 10
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: reserves space without growing the file


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file comes from, as the sidecar records it."""

    repo: str
    commit: str


class PartialFile:
    """The unfinished form of the file `target`. Every method blocks on the disk: call them outside of an event loop.

    After a crash, exactly the sidecar's `done` bytes count: it is written after those bytes were synced.
    """

    def __init__(
        self, target: Path, file: RemoteFile, origin: Origin, sync: int, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.target = target
        self.file = file
        self.path = target.with_name(target.name + PART)
        self.sidecar = target.with_name(target.name + SIDECAR)
        self.done = 0
        self.etag: str | None = None
        self._origin = origin
        self._stop = stop
        self._sync = sync
        self._synced = 0
        self._hashes = Hashes.of(file)
        self._fd: int | None = None
        # An interrupted pull may close a part while its last block is being written.
        self._lock = threading.Lock()
        self._closed = False

    def open(self) -> None:
        """Open or create the part. Bytes synced by an earlier pull are hashed again and count as done.

        Raises FileError, OSError, Cancelled.
        """
        with self._lock:
            if not self._closed:
                self._open()

    def _open(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(self.path, flags, 0o666)
            if os.fstat(self._fd).st_nlink > 1:  # left by an import: writing would change the user's own file
                self._discard()
                self._fd = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise FileError(
                    f"{self.path.name} is not a regular file; remove it, and run the command again"
                ) from error
            raise
        state = os.fstat(self._fd)
        if not stat.S_ISREG(state.st_mode):
            raise FileError(f"{self.path.name} is not a regular file; remove it, and run the command again")
        earlier = self._earlier()
        done = min(earlier.get("done", 0), self.file.size)
        if done and done <= state.st_size and feed(self._fd, self._hashes, done, self._stop) == done:
            self.done = self._synced = done
            self.etag = earlier.get("etag")
        else:
            self._restart()
        self._reserve()

    def _earlier(self) -> dict[str, Any]:
        """The sidecar's record if it is about the same content; otherwise an empty one."""
        try:
            with open(
                self.sidecar, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
            ) as file:
                found = json.loads(file.read(_SIDECAR_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or type(found.get("done")) is not int or found["done"] < 0:
            return {}
        same = (found.get("size"), found.get("sha256"), found.get("git_sha1")) == (
            self.file.size,
            self.file.sha256,
            self.file.git_sha1,
        )
        etag = found.get("etag")
        return (
            found
            if same and (etag is None or (isinstance(etag, str) and etag.isascii() and etag.isprintable()))
            else {}
        )

    def _reserve(self) -> None:
        """Reserve the file's space if the file system can, so that a full disk shows at once. Raises OSError."""
        if self._fd is None or not self.file.size:
            return
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if call is None:
            return
        # Not os.posix_fallocate: it writes every block if the file system cannot reserve.
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if call(self._fd, _KEEP_SIZE, 0, self.file.size):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise OSError(number, os.strerror(number), str(self.path))
            log.debug("no space can be reserved here: %s", os.strerror(number))

    def restart(self) -> None:
        """Discard the bytes: the server has other bytes, or sends them from the start."""
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
        self._hashes = Hashes.of(self.file)
        self.done = self._synced = 0
        self.etag = None
        forget(self.target)

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes. Raises OSError."""
        with self._lock:
            if self._fd is None:
                raise RuntimeError("the part is not open")
            view = memoryview(data)
            while view:
                count = os.pwrite(self._fd, view, self.done)
                self._hashes.update(view[:count])
                self.done += count
                view = view[count:]
            if self.done - self._synced >= self._sync:
                self._sync_now()

    def sync(self) -> None:
        """Make the written bytes count after a crash. Raises OSError."""
        with self._lock:
            self._sync_now()

    def _sync_now(self) -> None:
        if self._fd is None or self.done == self._synced:
            return
        os.fsync(self._fd)
        drop_pages(self._fd, self._synced, self.done - self._synced)
        record = {
            "repo": self._origin.repo,
            "commit": self._origin.commit,
            "path": self.file.path,
            "size": self.file.size,
            "sha256": self.file.sha256,
            "git_sha1": self.file.git_sha1,
            "etag": self.etag,
            "done": self.done,
        }
        write_atomically(self.sidecar, json.dumps(record).encode())
        self._synced = self.done

    def close(self) -> None:
        """Close it and keep its bytes for a later pull."""
        with self._lock:
            self._closed = True
            if self._fd is None:
                return
            try:
                self._sync_now()
            except OSError as error:
                log.debug("the part could not be synced: %s", error.strerror)
            finally:
                os.close(self._fd)
                self._fd = None

    def finish(self) -> str:
        """Check length, hash and header, then rename the file; returns its SHA-256.

        Raises FileError if the bytes are not those that the hub lists; the part is then removed.
        """
        with self._lock:
            return self._finish()

    def _finish(self) -> str:
        if self._fd is None:
            raise RuntimeError("the part is not open")
        os.ftruncate(self._fd, self.done)
        wrong = (
            f"{self.done} bytes, not {self.file.size}"
            if self.done != self.file.size
            else self._hashes.mismatch(self.file)
        )
        if wrong is None and self.file.path.endswith(ENDINGS):
            try:
                read_header(self.path, shown=self.file.path)
            except OnedeskError as error:
                wrong = str(error)
        if wrong is not None:
            self._discard()
            raise FileError(
                f"{short(self.file.path)} is not the file that the hub promises ({wrong}); it was removed: "
                "run the command again, or use another --from"
            )
        os.fsync(self._fd)
        drop_pages(self._fd, 0, self.done)
        self.path.replace(self.target)
        sync_folder(self.target.parent)
        forget(self.target)
        os.close(self._fd)
        self._fd = None
        return self._hashes.sha256

    def _discard(self) -> None:
        """Remove the part and its record."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        forget(self.target)
        self.path.unlink(missing_ok=True)


def forget(target: Path) -> None:
    """Remove the record of a part of `target`, and temporary files of writing it that a crash left."""
    for ending in (SIDECAR, SIDECAR + ".tmp"):
        target.with_name(target.name + ending).unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file atomically: after a crash it has the old content or the new. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; ignores file systems that cannot sync folders."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        log.debug("the folder %s cannot be synced: %s", folder.name, error.strerror)
    finally:
        os.close(fd)
