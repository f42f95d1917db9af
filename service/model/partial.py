"""Resumes a conversion that was stopped half-way from the tensors that it had written.

A folder `.partial-KEY` holds the converted file so far and `journal`, one line per tensor: its end in the file, the
hashes of its source, and the hash of all bytes written up to there. Only bytes that match their hash are reused. A
process holds a lock on the folder while it works there; another process with the same key uses another folder. Unlocked
folders of other keys are deleted: they fill the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import CancelCheck
from ..errors import Cancelled, FileError
from ..loader.files import read_exactly
from ..memory.budget import show

log = logging.getLogger(__name__)

PREFIX = ".partial-"
JOURNAL = "journal"
LOCK = "lock"
# Bytes of the file from which on a stopped conversion is kept: less is read again within seconds.
KEEP_FROM = 1 << 30
# Bytes that are hashed between two checks for cancellation.
PIECE = 8 << 20


@dataclass(slots=True)
class WrittenPart:
    """The written part of the converted file: the tensor count, their `end`, the hashes of their sources in order, and
    the hash of their bytes.
    """

    tensors: int = 0
    end: int = 0
    content: list[bytes] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class Partial:
    """The file and the journal of one conversion, in `folder`. `identity` distinguishes conversions; `header` precedes
    the tensors.
    """

    def __init__(self, folder: Path, name: str, identity: dict[str, Any], header: bytes) -> None:
        self.path = folder / name
        self._journal = folder / JOURNAL
        self._identity = json.dumps(identity | {"header": hashlib.sha256(header).hexdigest()}, sort_keys=True)
        self._header = header

    def begin(self, cancel: CancelCheck | None) -> WrittenPart:
        """The part that can be resumed; both files are truncated to it. Raises Cancelled, OSError."""
        lines = self._lines()
        written = self._verified(lines, cancel)
        with self.path.open("r+b" if written.tensors else "w+b") as file:
            if not written.tensors:
                file.write(self._header)
            file.truncate(max(len(self._header), written.end))
        self._journal.write_text(
            "".join(f"{line}\n" for line in (self._identity, *lines[: written.tensors])), encoding="ascii"
        )
        if written.tensors:
            log.info("going on with a conversion that was stopped after %s", show(written.end))
        return written

    def note(self, written: WrittenPart, hashes: Sequence[bytes]) -> None:
        """Record that one more tensor is in the file, with the hashes of its source; `written` is the state after it.
        OSError.
        """
        entry = {"end": written.end, "content": [hashed.hex() for hashed in hashes], "made": written.digest.hexdigest()}
        with self._journal.open("a", encoding="ascii") as file:
            file.write(json.dumps(entry) + "\n")

    def _lines(self) -> list[str]:
        """The journal's entries; none of another conversion's, and nothing from the first truncated line on."""
        try:
            head, *lines = self._journal.read_text(encoding="ascii").split("\n")
        except (OSError, UnicodeDecodeError):
            return []
        return lines[:-1] if head == self._identity and lines else []

    def _verified(self, lines: Sequence[str], cancel: CancelCheck | None) -> WrittenPart:
        """The state after the last entry if the file's bytes match, else the empty state."""
        try:
            entries = [json.loads(line) for line in lines]
            ends, last = [int(entry["end"]) for entry in entries], str(entries[-1]["made"]) if entries else ""
            content = [bytes.fromhex(hashed) for entry in entries for hashed in entry["content"]]
            if not entries or self.path.stat().st_size < ends[-1]:
                return WrittenPart()
        except (ValueError, KeyError, TypeError, OSError):
            return WrittenPart()
        digest = hashlib.sha256()
        at = len(self._header)
        with suppress(FileError), self.path.open("rb") as file:
            while at < ends[-1]:
                if cancel is not None and cancel():
                    raise Cancelled("converting was stopped; what was converted before is kept")
                octets = read_exactly(file.fileno(), min(PIECE, ends[-1] - at), at, self.path.name)
                digest.update(octets)
                at += len(octets)
        if at != ends[-1] or digest.hexdigest() != last:
            log.warning("what a stopped conversion left is not what it wrote down: the conversion starts again")
            return WrittenPart()
        return WrittenPart(len(entries), at, content, digest)


@contextmanager
def partial_folder(parent: Path, key: str, elsewhere: Path) -> Iterator[Path]:
    """The folder to convert `key` in, below `parent`: that of an earlier attempt, or `elsewhere` where another process
    uses that one.

    It is deleted when the block ends, unless the conversion was stopped and much of the file exists. Raises OSError.
    """
    _tidy(parent, key)
    folder = parent / f"{PREFIX}{key}"
    lock = _locked(folder)
    if lock is None:
        elsewhere.mkdir()
        yield elsewhere
        return
    try:
        try:
            yield folder
        except (Cancelled, KeyboardInterrupt):
            size = _size(folder)
            if size < KEEP_FROM:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                log.warning(
                    "%s are converted and kept; converting again goes on from there, deleting %s frees them",
                    show(size),
                    folder,
                )
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock; None where another process holds it. Creates the folder. Raises
    OSError.
    """
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another process has just deleted it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if (folder / LOCK).stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # the folder was deleted between the two calls


def _tidy(parent: Path, key: str) -> None:
    """Delete the unlocked folders of other keys."""
    for left in parent.glob(f"{PREFIX}*"):
        if left.name == f"{PREFIX}{key}" or not left.is_dir():
            continue
        with suppress(OSError):
            lock = _locked(left)
            if lock is not None:
                log.info("removing %s, a conversion of another model that was not finished", left.name)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0
