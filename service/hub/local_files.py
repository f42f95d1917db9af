"""Files that the user already has: caches of the hubs' clients, ComfyUI's folders, any folder. They are only read."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from yarl import URL

from ..errors import FileError, OnedeskError
from ..loader.files import short
from ..loader.header import ENDINGS, read_header
from .hashing import Hashes, hash_file
from .part import sync_folder
from .paths import PART
from .remote import RemoteFile, RepositorySnapshot

log = logging.getLogger(__name__)

FILES_LIMIT = 500_000
LINKED_FROM = 1 << 20  # bytes; smaller files are copied, so that editing one does not change the other
_FICLONE = 0x40049409
_HASH_DIGITS = frozenset("0123456789abcdef")


class LocalFiles:
    """The regular files below a folder by size. Raises FileError if there is no such folder."""

    def __init__(self, root: Path, stop: Callable[[], bool] = lambda: False) -> None:
        if not root.is_dir():
            raise FileError(
                f"--import {root.name or root} is not a folder; name a folder with model files, or a hub's cache"
            )
        self.root = root
        self._stop = stop
        self._by_size: dict[int, list[Path]] = {}
        for path in _walk(root):
            try:
                state = path.stat()
            except OSError:
                continue
            if stat.S_ISREG(state.st_mode):
                self._by_size.setdefault(state.st_size, []).append(path)

    def candidates(self, file: RemoteFile) -> list[Path]:
        """Files of the right size, each once, starting with those of the same name."""
        found = {path.resolve(): path for path in self._by_size.get(file.size, [])}
        name = file.path.rsplit("/", 1)[-1]
        return sorted(found, key=lambda real: (found[real].name != name, str(real)))

    def content(self, file: RemoteFile, limit: int) -> bytes | None:
        """The content of a small file, None if no file here has its hash."""
        if file.size > limit:
            return None
        for path in self.candidates(file):
            content = path.read_bytes()
            hashes = Hashes.of(file)
            hashes.update(content)
            if hashes.mismatch(file) is None:
                return content
        return None

    def take(self, file: RemoteFile, target: Path) -> str | None:
        """Give `target` the content of a file here, by a reflink, a hard link or a copy; returns its SHA-256.

        None if no file here has the hash. Raises OSError. The checked bytes are the ones that are kept.
        """
        part = target.with_name(target.name + PART)
        for source in self.candidates(file):
            target.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            _materialize(source, part, file.size)
            hashes = hash_file(part, file, self._stop)
            if hashes.mismatch(file) is None and _readable(part, file):
                part.replace(target)
                sync_folder(target.parent)
                return hashes.sha256
            part.unlink()
        return None


def _walk(root: Path) -> Iterator[Path]:
    count = 0
    for folder, _, names in os.walk(root):
        for name in names:
            count += 1
            if count > FILES_LIMIT:
                raise FileError(
                    f"--import {root.name}: there are more than {FILES_LIMIT} files; name the folder of the model"
                )
            yield Path(folder, name)


def _materialize(source: Path, part: Path, size: int) -> None:
    """Make `part` from `source`, without reading it if the disk supports that."""
    with source.open("rb") as read, part.open("xb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
            return
        except OSError as error:
            log.debug("no reflink: %s", error.strerror)
    if size >= LINKED_FROM:
        part.unlink()
        try:
            os.link(source, part)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                raise
    with source.open("rb") as read, part.open("wb") as written:
        shutil.copyfileobj(read, written, 4 << 20)
        written.flush()
        os.fsync(written.fileno())


def _readable(part: Path, file: RemoteFile) -> bool:
    if not file.path.endswith(ENDINGS):
        return True
    try:
        read_header(part, shown=file.path)
    except OnedeskError as error:
        log.warning("%s is damaged on the hub too: %s", short(file.path), error)
        return False
    return True


def cached_snapshot(root: Path, repo: str, revision: str | None) -> RepositorySnapshot | None:
    """A repository in the cache of Hugging Face's client, whose blobs are named by hash; None if absent.

    `root` is the cache, the folder that holds it as `hub`, or the repository's own folder in it.
    """
    name = f"models--{repo.replace('/', '--')}"
    folders = [
        candidate
        for candidate in (root / name, root / "hub" / name, root)
        if candidate.name == name and (candidate / "snapshots").is_dir()
    ]
    if not folders:
        return None
    commit = revision or "main"
    ref = folders[0] / "refs" / commit
    if "/" not in commit and ref.is_file():
        commit = ref.read_text(encoding="ascii", errors="replace").strip()
    folder = folders[0] / "snapshots" / commit
    if not (len(commit) == 40 and set(commit) <= _HASH_DIGITS and folder.is_dir()):
        return None
    files = tuple(
        file
        for path in sorted(folder.rglob("*"))
        if (file := _blob(path, path.relative_to(folder).as_posix())) is not None
    )
    endpoint = URL("https://huggingface.co")
    return RepositorySnapshot("hf", endpoint, repo, repo, commit, commit, files) if files else None


def _blob(path: Path, name: str) -> RemoteFile | None:
    """The file that a snapshot's link leads to, None if the blob's name is not a hash."""
    real = path.resolve()
    if not path.is_symlink() or not real.is_file() or not set(real.name) <= _HASH_DIGITS:
        return None
    size = real.stat().st_size
    if len(real.name) == 64:
        return RemoteFile(name, size, sha256=real.name)
    return RemoteFile(name, size, git_sha1=real.name) if len(real.name) == 40 else None
