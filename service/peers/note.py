"""The note of a running service: its address and process id, for clients that look for it. One service per tree."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import FileError, PeerError

FILE_NAME = "service.json"
LOCK_NAME = "service.lock"
# A client that checks for a service holds its lock for a moment. A starting service retries this often, at this
# interval in seconds.
_TRIES, _TRY_SECONDS = 25, 0.02


@dataclass(frozen=True, slots=True)
class Note:
    """A running service: `host` and `port`, or `uds`; `token_file` is None if it requires no token."""

    pid: int
    version: str
    host: str | None
    port: int | None
    uds: str | None
    token_file: str | None

    @property
    def where(self) -> str:
        """The address, for people."""
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return self.uds or f"http://{host}:{self.port}/v1"


@contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Hold the tree for one service; PeerError if another one runs. The lock ends with the process, however it ends."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FileError(
            f"the cache folder cannot be written: {error.strerror}; use a tree of your own (--config)"
        ) from error
    try:
        if not any(_begun(lock, cache, wait=attempt > 0) for attempt in range(_TRIES)):
            note = read_note(cache)
            where = "" if note is None else f" (process {note.pid}, {note.where})"
            raise PeerError(f"a service of this tree runs already{where}; use it, or end it first")
        yield
    finally:
        os.close(lock)


@contextmanager
def noted(cache: Path, note: Note) -> Iterator[None]:
    """Publish the note while the block runs."""
    path = cache / FILE_NAME
    part = path.with_name(f".{FILE_NAME}.part")
    part.write_text(json.dumps(asdict(note)), encoding="utf-8")
    part.replace(path)
    try:
        yield
    finally:
        if read_note(cache) == note:  # otherwise it is another service's by now
            path.unlink(missing_ok=True)


def read_note(cache: Path) -> Note | None:
    """The note of this tree's service, None if there is none or it cannot be read. It may belong to a service that
    died.
    """
    try:
        return Note(**json.loads((cache / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def note_stamp(cache: Path) -> tuple[int, int, int] | None:
    """Identifies this tree's note, None if there is none. A service writes its note once, as a new file."""
    try:
        state = (cache / FILE_NAME).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def running(cache: Path) -> Note | None:
    """The note of this tree's service if it is running."""
    return read_note(cache) if taken(cache) else None


def taken(cache: Path) -> bool:
    """Whether a service holds the tree. One that is starting has written no note yet."""
    try:
        lock = os.open(cache / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _locked(lock, fcntl.LOCK_SH)  # a shared lock: clients that only check never look like a service
    finally:
        os.close(lock)


def _begun(lock: int, cache: Path, *, wait: bool) -> bool:
    """Try to lock the tree, now or after a moment; returns whether it was locked. A shared lock comes first: it shows
    that no service runs, so a killed service's note is removed before the tree counts as held. Otherwise a client that
    checks in between would read that note as this service's.
    """
    if wait:
        time.sleep(_TRY_SECONDS)
    if not _locked(lock, fcntl.LOCK_SH):
        return False
    (cache / FILE_NAME).unlink(missing_ok=True)
    return _locked(lock, fcntl.LOCK_EX)


def _locked(lock: int, kind: int) -> bool:
    """Whether the lock was acquired."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
