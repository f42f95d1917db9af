"""Paths from repositories are untrusted: which are refused, and how one becomes a file below a folder."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from ..errors import FileError
from ..loader.files import plain_parts, short

PART = ".part"
SIDECAR = ".part.json"
# A file system allows 255 bytes per name; the sidecar's temporary file has the longest ending.
NAME_BYTES = 255 - len(SIDECAR + ".tmp")
RESERVED = frozenset({"onedesk.json", ".lock"})


def refused(path: str) -> str | None:
    """Why a repository's path is refused; None if it is safe."""
    parts = plain_parts(path)
    if parts is None:
        return "it is absolute, has an empty part, `.`, `..`, a backslash or a control character"
    if any(unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") for c in path):
        return "it has invisible characters"
    if any(len(part.encode()) > NAME_BYTES for part in parts):
        return f"a part of it has more than {NAME_BYTES} bytes"
    if parts[-1].endswith((PART, SIDECAR)) or parts[0] in RESERVED:
        return "a pull keeps its own state under such a name"
    if parts[0] == ".git":
        return "it is inside a .git folder"
    return None


def check_paths(paths: Iterable[str]) -> None:
    """Raise FileError for a path that is unsafe, or that a case-insensitive disk cannot tell from another."""
    seen: dict[str, str] = {}
    for path in paths:
        reason = refused(path)
        if reason is not None:
            raise FileError(
                f"the repository has a file named {short(path)}, which is refused: {reason}; nothing was written"
            )
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            prefix = "/".join(parts[:count])
            folded = unicodedata.normalize("NFC", prefix).casefold()
            if seen.setdefault(folded, prefix) != prefix:
                raise FileError(
                    f"the repository has {short(seen[folded])} and {short(prefix)}, which are one name on some disks;"
                    " nothing was written"
                )


def inside(root: Path, path: str) -> Path:
    """The file `path` below `root`. Raises FileError if one of its folders is a symlink or a file."""
    parts = plain_parts(path)
    if parts is None:
        raise FileError(f"{short(path)} is not a path below {root.name}")
    current = root
    for part in parts[:-1]:
        current = current / part
        if current.is_symlink():
            raise FileError(f"{short(path)}: {current.name} is a symlink; remove it, a pull writes real folders only")
        if current.exists() and not current.is_dir():
            raise FileError(f"{short(path)}: {current.name} is a file where a folder is needed; move it away")
    return current / parts[-1]
