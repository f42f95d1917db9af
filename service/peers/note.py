"""The note of a running service: where it listens and which process it is, for whoever looks for it. One service a
tree.
"""

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
# Whoever looks whether a service runs holds its lock for a moment; so often, and so many seconds apart, a service tries
# to get it.
_TRIES, _TRY_SECONDS = 25, 0.02


@dataclass(frozen=True, slots=True)
class Note:
    """A service that runs: `host` and `port`, or `uds`; `token_file` is None where it asks for no token."""

    pid: int
    version: str
    host: str | None
    port: int | None
    uds: str | None
    token_file: str | None

    @property
    def where(self) -> str:
        """For people."""
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return self.uds or f"http://{host}:{self.port}/v1"


@contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Hold the tree for one service; PeerError where another one runs. The lock goes with the process, however it
    ends.
    """
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
    """Keep the note while the block runs."""
    path = cache / FILE_NAME
    part = path.with_name(f".{FILE_NAME}.part")
    part.write_text(json.dumps(asdict(note)), encoding="utf-8")
    part.replace(path)
    try:
        yield
    finally:
        if read_note(cache) == note:  # else it is another service's by now
            path.unlink(missing_ok=True)


def read_note(cache: Path) -> Note | None:
    """The note of this tree's service, None where there is none or it cannot be read. It may be that of a service
    that died.
    """
    try:
        return Note(**json.loads((cache / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def note_stamp(cache: Path) -> tuple[int, int, int] | None:
    """What tells this tree's note from a later one, None where there is none: a service writes its note once, as a
    file of its own.
    """
    try:
        state = (cache / FILE_NAME).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def running(cache: Path) -> Note | None:
    """The note of this tree's service if it runs now."""
    return read_note(cache) if taken(cache) else None


def taken(cache: Path) -> bool:
    """Whether a service has the tree; one that only starts has written no note yet."""
    try:
        lock = os.open(cache / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _locked(lock, fcntl.LOCK_SH)  # those who only look do not take each other for a service
    finally:
        os.close(lock)


def _begun(lock: int, cache: Path, *, wait: bool) -> bool:
    """Whether the tree could be had, now or after a moment. First as one who only looks: then no service runs, and the
    note of one that was
    killed goes before the tree counts as taken. Behind that, who looked in between took it for this one's."""
    if wait:
        time.sleep(_TRY_SECONDS)
    if not _locked(lock, fcntl.LOCK_SH):
        return False
    (cache / FILE_NAME).unlink(missing_ok=True)
    return _locked(lock, fcntl.LOCK_EX)


def _locked(lock: int, kind: int) -> bool:
    """Whether the lock can be had."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
