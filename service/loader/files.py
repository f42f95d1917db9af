"""Opens the files of a checkpoint: regular files only, inside the permitted folders, identified by size and time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from ..errors import FileError, ModelError

_OPENING_HELP = MappingProxyType(
    {errno.ENOENT: "; put it back, or download it again", errno.EACCES: "; let this user read it"}
)

# Per existing small file: its name, bytes, and nanoseconds of its last change.
Stamps: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file at the time its header was read. `shown` is its name in messages, relative to the model folder; `size` is
    in bytes.
    """

    path: Path
    shown: str
    size: int
    modified_ns: int
    inode: tuple[int, int]

    def unchanged(self) -> bool:
        """Whether the file on disk is still the one that was read."""
        try:
            return self.same_as(self.path.stat())
        except OSError:
            return False

    def same_as(self, other: os.stat_result) -> bool:
        """Whether `other` describes the same bytes: same file, size and time of change."""
        return (self.size, self.modified_ns, self.inode) == (
            other.st_size,
            other.st_mtime_ns,
            (other.st_dev, other.st_ino),
        )

    def change(self, other: os.stat_result) -> str:
        """What differs in `other`, in words."""
        if self.size != other.st_size:
            return f"it had {self.size} bytes, now {other.st_size}"
        if self.inode != (other.st_dev, other.st_ino):
            return f"another file of {self.size} bytes is there instead"
        later = (other.st_mtime_ns - self.modified_ns) / 1e9
        return (
            f"it still has {self.size} bytes, but was written {abs(later):.9g} s {'later' if later > 0 else 'earlier'}"
            " than the one read"
        )


@contextmanager
def open_regular(path: Path, shown: str) -> Iterator[tuple[int, SourceFile]]:
    """Yield a read-only descriptor and the file's current state. Raises FileError for an absent, unreadable or
    non-regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO in place of a model file must not block
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise FileError(f"{shown} cannot be opened: {reason}{_OPENING_HELP.get(error.errno or 0, '')}") from None
    except ValueError:
        raise FileError(f"{shown!r} is not a file name") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"{shown} is not a regular file; a checkpoint consists of plain files")
        yield fd, SourceFile(path, shown, found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))
    finally:
        os.close(fd)


def read_exactly(fd: int, nbytes: int, offset: int, shown: str) -> bytes:
    """Read `nbytes` at `offset`; FileError when the file ends earlier."""
    parts: list[bytes] = []
    have = 0
    while have < nbytes:
        try:
            part = os.pread(fd, nbytes - have, offset + have)
        except OSError as error:
            raise FileError(
                f"{shown} cannot be read at byte {offset + have}: {os.strerror(error.errno or 0)}"
            ) from None
        if not part:
            raise FileError(
                f"{shown} ends at byte {offset + have} while {nbytes} bytes from byte {offset} were read; it changed or"
                " is damaged"
            )
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def read_whole(path: Path, shown: str, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. FileError when it is unreadable, ModelError when it is larger."""
    with open_regular(path, shown) as (fd, source):
        if source.size > limit:
            raise ModelError(f"{shown} has {source.size:,} bytes; at most {limit:,} are read: download it again")
        return read_exactly(fd, source.size, 0, shown)


def stamps(folder: Path, names: Iterable[str]) -> Stamps:
    """The stamps of the existing files in `names`. Take them before reading: what is read later may be newer, never
    older.
    """
    found = []
    for name in names:
        with suppress(OSError):
            state = (folder / name).stat()
            found.append((name, state.st_size, state.st_mtime_ns))
    return tuple(found)


def is_inside(path: Path, bases: Iterable[Path]) -> bool:
    """Whether `path`, with all symlinks followed, is inside one of `bases` (already resolved)."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a cycle of symlinks, a NUL
        return False
    return any(real.is_relative_to(base) for base in bases)


def exists(path: Path) -> bool:
    """Whether `path` exists, symlinks followed. False for an invalid file name and for a path that may not be
    examined.
    """
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def exists_at_all(path: Path) -> bool:
    """Whether `path` exists, even as a dangling link."""
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def plain_parts(name: str) -> tuple[str, ...] | None:
    """The parts of a relative name a/b/c, or None if it could leave its folder: empty, absolute, `..`, backslash,
    control character.
    """
    if not name or any(c == "\\" or ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        return None
    parts = tuple(name.split("/"))
    if any(part in ("", ".", "..") for part in parts):
        return None
    return parts


def short(name: str, limit: int = 120) -> str:
    """A name from a file, quoted and truncated for a message: printable, in its own script, never half a character."""
    return repr(name if len(name) <= limit else name[:limit] + "...")


def json_kind(value: Any) -> str:
    """JSON's name for the type of a parsed value."""
    names = {bool: "truth value", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return names.get(type(value), "null")
