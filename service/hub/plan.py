"""What a pull will do, before it fetches a model: which files, which bytes are there already, the free disk space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from yarl import URL

from ..errors import FileError, ModelError
from ..loader.files import short
from .hashing import Hashes, hash_file
from .limits import HubLimits
from .manifest import MANIFEST, SMALL, Manifest, read_manifest
from .paths import PART, SIDECAR, check_paths, inside
from .remote import RemoteFile, Report, RepositorySnapshot
from .web import Web

FileState = Literal["present", "partial", "missing"]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, the snapshot that has it, and its path below the plan's folder. `done` of its bytes are there already."""

    snapshot: RepositorySnapshot
    file: RemoteFile
    path: str
    state: FileState
    done: int = 0
    sha256: str | None = None  # of a file that is present

    @property
    def missing(self) -> int:
        """Bytes left to fetch."""
        return self.file.size - self.done


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the model would fit this machine, by `onedesk doctor --plan`. None: unknown."""

    fits: bool | None
    text: str


# Arguments: a model's name ("" for image files alone), its config.json (None: a published model), bytes of image files.
Verdict: TypeAlias = Callable[[str, dict[str, Any] | None, int], Fit]


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder that a pull fills, and the name of its manifest there.

    `link`: the name of a link there, and the relative path of the file it leads to.
    """

    root: Path
    files: tuple[PlannedFile, ...]
    source: str
    repo: str
    commit: str
    manifest: str = MANIFEST
    link: tuple[str, str] | None = None
    keeps: bool = False  # earlier files that are not in this plan stay


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The complete plan. `license`, `gated` and `fit` are for the user to see before the pull."""

    name: str
    folders: tuple[Folder, ...]
    license: str | None
    gated: bool
    fit: Fit
    warnings: tuple[str, ...] = ()
    renamed: str | None = None

    @property
    def files(self) -> list[PlannedFile]:
        return [file for folder in self.folders for file in folder.files]

    @property
    def bytes(self) -> int:
        return sum(file.file.size for file in self.files)

    @property
    def missing(self) -> int:
        return sum(file.missing for file in self.files)

    def document(self) -> dict[str, Any]:
        """The document that --dry-run prints; bytes are integers."""
        first = self.folders[0]
        rows = [
            {
                "path": file.path,
                "size": file.file.size,
                "sha256": file.file.sha256 or file.sha256,
                "state": file.state,
                "repo": file.snapshot.repo,
            }
            for file in self.files
        ]
        return {
            "name": self.name,
            "hub": first.files[0].snapshot.hub if first.files else None,
            "source": first.source,
            "repo": first.repo,
            "commit": first.commit,
            "folder": str(first.root),
            "files": rows,
            "bytes": self.bytes,
            "missing": self.missing,
            "license": self.license,
            "gated": self.gated,
            "disk_free": disk_free(first.root),
            "fits": self.fit.fits,
            "fit": self.fit.text,
            "warnings": list(self.warnings),
        }


def plan_file(
    root: Path,
    path: str,
    file: RemoteFile,
    snapshot: RepositorySnapshot,
    manifest: Manifest | None,
    report: Report,
    stop: Callable[[], bool],
) -> PlannedFile:
    """Check which bytes of a file are there. Reads the whole file if its hash is unknown.

    Raises FileError if a file that no pull put there is in the way.
    """
    target = inside(root, path)
    entry = manifest.entry(path) if manifest else None
    if target.is_symlink() and not target.exists():
        raise FileError(f"{short(path)} is a symlink to a file that does not exist; remove it")
    if target.exists():
        if not target.is_file():
            raise FileError(f"{short(path)} is a folder where a file is needed; move it away")
        known = entry is not None and entry.untouched(target) and file.sha256 is not None
        if known and entry is not None and entry.sha256 == file.sha256:
            return PlannedFile(snapshot, file, path, "present", file.size, entry.sha256)
        if target.stat().st_size == file.size:
            if file.size > SMALL:
                report({"event": "checking", "path": path, "size": file.size})
            hashes = hash_file(target, file, stop)
            if hashes.mismatch(file) is None:
                return PlannedFile(snapshot, file, path, "present", file.size, hashes.sha256)
        if entry is None or target.is_symlink():
            raise FileError(
                f"{target.parent.name}/{target.name} is another file than the hub's and was not pulled; "
                "move it away, or pull under another name: --as NAME"
            )
    done = _part_done(target, file)
    return PlannedFile(snapshot, file, path, "partial" if done else "missing", done)


def _part_done(target: Path, file: RemoteFile) -> int:
    """Bytes that an earlier pull has certainly synced."""
    part, sidecar = target.with_name(target.name + PART), target.with_name(target.name + SIDECAR)
    try:
        found = json.loads(sidecar.read_bytes()[:65536])
        size = part.stat().st_size
    except (OSError, ValueError, RecursionError):
        return 0
    if not isinstance(found, dict) or (found.get("sha256"), found.get("git_sha1")) != (file.sha256, file.git_sha1):
        return 0
    done = found.get("done")
    return done if type(done) is int and 0 <= done <= min(size, file.size) else 0


def plan_folder(
    root: Path,
    chosen: Sequence[tuple[str, RemoteFile, RepositorySnapshot]],
    manifest_name: str,
    report: Report,
    stop: Callable[[], bool],
) -> tuple[PlannedFile, ...]:
    """Every chosen file and its bytes on the disk.

    Raises FileError for refused paths and for files in the way, Cancelled.
    """
    check_paths(path for path, _, _ in chosen)
    manifest = read_manifest(root / manifest_name)
    return tuple(plan_file(root, path, file, snapshot, manifest, report, stop) for path, file, snapshot in chosen)


async def read_small(web: Web, address: URL, file: RemoteFile, limit: int) -> bytes:
    """The content of a small file, checked against its hash. Raises PeerError, ModelError."""
    if file.size > limit:
        raise ModelError(f"{short(file.path)} has {file.size} bytes; such a file has at most {limit}")
    content = await web.content(address, file.size)
    hashes = Hashes.of(file)
    hashes.update(content)
    if hashes.mismatch(file):
        raise FileError(
            f"{web.endpoint.title} sends other bytes for {short(file.path)} than it promises; try another --from"
        )
    return content


def check_disk(plan: PullPlan, limits: HubLimits) -> None:
    """Raise FileError if the disk cannot hold the missing bytes, 2 % more, and the reserve."""
    needed, free = dict[int, int](), dict[int, int]()
    for folder in plan.folders:
        existing = _existing(folder.root)
        device = existing.stat().st_dev
        free[device] = shutil.disk_usage(existing).free
        lacking = sum(file.missing for file in folder.files) - sum(
            _reserved(folder.root, file) for file in folder.files
        )
        needed[device] = needed.get(device, 0) + max(0, lacking)
    for device, count in needed.items():
        wanted = count + count // 50 + limits.reserve if count else 0
        if wanted > free[device]:
            raise FileError(
                f"{count / 1e9:.2f} GB are missing, which need {wanted / 1e9:.2f} GB of disk space with 2 % and "
                f"{limits.reserve / 1e9:.2f} GB to spare; the disk of {plan.folders[0].root.name} has "
                f"{free[device] / 1e9:.2f} GB: free {(wanted - free[device]) / 1e9:.2f} GB"
            )


def _reserved(root: Path, file: PlannedFile) -> int:
    """Bytes of the disk that a part has reserved beyond those that are done."""
    try:
        state = inside(root, file.path + PART).stat()
    except OSError:
        return 0
    return max(0, min(file.file.size, state.st_blocks * 512) - file.done)


def disk_free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
