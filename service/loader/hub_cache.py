"""The layout of the hub's own cache: models--OWNER--NAME/snapshots/COMMIT/FILE, each a link to
models--OWNER--NAME/blobs/HASH.

Source: the documentation of huggingface_hub on its cache.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from ..errors import OnedeskError
from .files import read_whole

SNAPSHOTS, BLOBS, MAIN = "snapshots", "blobs", Path("refs", "main")
_REPOSITORY = re.compile(r"models--[\w.\-]+")
_COMMIT_BYTES = 200


def hub_name(repository: Path) -> str:
    """OWNER/NAME of a folder models--OWNER--NAME."""
    return repository.name.removeprefix("models--").replace("--", "/", 1)


def hub_snapshot(repository: Path) -> Path | None:
    """The snapshot that `main` names, else the newest one; None for another kind of folder, or one without
    snapshots.
    """
    snapshots = repository / SNAPSHOTS
    if not _REPOSITORY.fullmatch(repository.name):
        return None
    with suppress(OSError):
        found = {path.name: path for path in snapshots.iterdir() if path.is_dir()}
        named = found.get(_main(repository))
        return named or max(found.values(), key=lambda path: path.stat().st_mtime_ns, default=None)
    return None


def _main(repository: Path) -> str:
    with suppress(OnedeskError):
        return read_whole(repository / MAIN, "refs/main", _COMMIT_BYTES).decode("ascii", "replace").strip()
    return ""


def repository_of(snapshot: Path) -> Path | None:
    """The folder models--OWNER--NAME of one of its snapshots; None for any other folder."""
    repository = snapshot.parent.parent
    return repository if snapshot.parent.name == SNAPSHOTS and _REPOSITORY.fullmatch(repository.name) else None
