"""onedesk.json: the files that a pull put into a folder, and whether they are unchanged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import FileError, OnedeskError
from ..loader.files import plain_parts, short
from ..loader.json_files import read_json_object
from .hashing import hash_file
from .part import write_atomically
from .remote import RemoteFile

MANIFEST = "onedesk.json"
SMALL = 1 << 20  # bytes; files up to this size are compared by their hash even in a quick check


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One file: `sha256` is None until it has been fetched; `modified_ns` is when it was last written."""

    path: str
    size: int
    sha256: str | None = None
    modified_ns: int | None = None

    @property
    def fetched(self) -> bool:
        return self.sha256 is not None

    def untouched(self, path: Path) -> bool:
        """Whether the file has the size and the time that it had when its hash was taken."""
        try:
            state = path.stat()
        except OSError:
            return False
        return self.fetched and (state.st_size, state.st_mtime_ns) == (self.size, self.modified_ns)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files that a pull wants in a folder, and which are there. `source` is the hub's or mirror's address."""

    source: str
    repo: str
    commit: str
    files: tuple[ManifestEntry, ...]
    time: float = 0.0

    def entry(self, path: str) -> ManifestEntry | None:
        return next((entry for entry in self.files if entry.path == path), None)

    def with_file(self, path: str, file: Path, sha256: str) -> Manifest:
        """The manifest with what is now known of `file`."""
        state = file.stat()
        changed = ManifestEntry(path, state.st_size, sha256, state.st_mtime_ns)
        return replace(self, files=tuple(changed if entry.path == path else entry for entry in self.files))

    def write(self, path: Path) -> None:
        """Replace the file atomically. Raises OSError."""
        files = [
            {"path": entry.path, "size": entry.size, "sha256": entry.sha256, "modified_ns": entry.modified_ns}
            for entry in self.files
        ]
        document = {
            "source": self.source,
            "repo": self.repo,
            "commit": self.commit,
            "time": time.time(),
            "files": files,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in a file, None if there is none. Raises FileError for an invalid one."""
    if not path.is_file():
        return None
    advice = f"remove {path.name}, and pull the model again"
    try:
        document = read_json_object(path, path.name)
    except OnedeskError as error:
        raise FileError(f"{error}; {advice}") from error
    names = [document.get(key) for key in ("source", "repo", "commit")]
    rows = document.get("files")
    if not all(isinstance(name, str) for name in names) or not isinstance(rows, list):
        raise FileError(f"{path.name} does not say what was pulled; {advice}")
    return Manifest(*map(str, names), files=tuple(_entry(path, row, advice) for row in rows))


def _entry(path: Path, row: Any, advice: str) -> ManifestEntry:
    values = (
        (row.get("path"), row.get("size"), row.get("sha256"), row.get("modified_ns"))
        if isinstance(row, dict)
        else (None,) * 4
    )
    name, size, sha256, modified = values
    right = isinstance(name, str) and plain_parts(name) is not None and type(size) is int and size >= 0
    right = right and (sha256 is None or isinstance(sha256, str)) and (modified is None or type(modified) is int)
    if not right or not isinstance(name, str) or not isinstance(size, int):
        raise FileError(f"{path.name} has an entry that is not a file with its size; {advice}")
    return ManifestEntry(name, size, sha256, modified)


@dataclass(frozen=True, slots=True)
class State:
    """How complete a pulled model is: `missing` and `changed` are paths."""

    manifest: Manifest
    missing: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def text(self) -> str:
        """ "complete", "N of M", or "changed"."""
        if self.changed:
            return "changed"
        total = len(self.manifest.files)
        return f"{total - len(self.missing)} of {total}" if self.missing else "complete"


def state_of(folder: Path, name: str = MANIFEST) -> State | None:
    """A quick comparison of a folder with its manifest: sizes, and the hashes of small files written since.

    None if it was not pulled. Raises FileError.
    """
    manifest = read_manifest(folder / name)
    if manifest is None:
        return None
    missing, changed = [], []
    for entry in manifest.files:
        path = folder / entry.path
        if not entry.fetched or not path.is_file():
            missing.append(entry.path)
        elif path.stat().st_size != entry.size or (
            entry.size <= SMALL and not entry.untouched(path) and _differs(path, entry)
        ):
            changed.append(entry.path)
    return State(manifest, tuple(missing), tuple(changed))


def _differs(path: Path, entry: ManifestEntry) -> bool:
    return hash_file(path, RemoteFile(entry.path, entry.size, entry.sha256)).sha256 != entry.sha256


def verify(folder: Path, name: str, stop: Callable[[], bool], report: Callable[[dict[str, Any]], None]) -> Manifest:
    """Hash every file of a pulled model again. Raises FileError naming what is missing or changed, Cancelled."""
    manifest = read_manifest(folder / name)
    if manifest is None:
        raise FileError(f"{folder.name} was not pulled: it has no {name}; pull it first")
    wrong = []
    for entry in manifest.files:
        path = folder / entry.path
        if not entry.fetched or not path.is_file():
            wrong.append(f"{short(entry.path)} is missing")
        elif path.stat().st_size != entry.size:
            wrong.append(f"{short(entry.path)} has {path.stat().st_size} bytes, not {entry.size}")
        else:
            found = hash_file(path, RemoteFile(entry.path, entry.size, entry.sha256), stop).sha256
            if found != entry.sha256:
                wrong.append(f"{short(entry.path)} has other bytes than were pulled")
            else:
                manifest = manifest.with_file(entry.path, path, found)
                report({"event": "file", "path": entry.path, "size": entry.size, "sha256": found, "state": "verified"})
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise FileError(
            f"{folder.name} is not what was pulled: {', '.join(wrong[:3])}{more}; the same command without --verify"
            " repairs it"
        )
    manifest.write(folder / name)
    return manifest
