"""What install.sh finds on the machine before it changes anything, and what it will install. Standard library only."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .foreign import no_comfyui

LOG = logging.getLogger(__name__)
GIB = 1 << 30
_ASK_SECONDS = 20
_GPU_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_AMD, _KFD = "0x1002", "dev/kfd"
# Folders of a home, and of a container, in which ComfyUI usually is, with how it came there.
_HOMES = (("ComfyUI", ""), ("comfy/ComfyUI", "comfy-cli"), ("Documents/ComfyUI", "Desktop"))
_ROOTS = ("opt/ComfyUI", "workspace/ComfyUI", "app/ComfyUI", "ComfyUI")
_CONTAINER = (".dockerenv", "run/.containerenv")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU. `kind`: "cuda", "amd" or "none"; `cuda`: the newest CUDA version that the driver supports."""

    kind: str
    name: str = ""
    driver: str = ""
    cuda: str = ""

    def __str__(self) -> str:
        if self.kind == "none":
            return "no GPU: models run on the CPU"
        if self.kind == "amd":
            return "a GPU of AMD: Onedesk has not been tried with ROCm; models run on the CPU"
        details = [f"driver {self.driver}"] if self.driver else []
        details += [f"CUDA {self.cuda}"] if self.cuda else []
        return f"{self.name}{' (' + ', '.join(details) + ')' if details else ''}"


@dataclass(frozen=True, slots=True)
class FoundComfyUI:
    """A ComfyUI on this machine. `kind`: git, comfy-cli, Desktop, container or a copy. `reason`: why --comfyui cannot
    use it, "" if it can."""

    folder: Path
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The machine as it is. `memory` and `free` are bytes; `notes` are what else a person should know."""

    accelerator: Accelerator
    memory: int
    free: int
    comfyuis: tuple[FoundComfyUI, ...]
    notes: tuple[str, ...]


def survey(prefix: Path, variables: Mapping[str, str], root: Path = Path("/")) -> Survey:
    """Look at the machine below `root`. Starts nothing but nvidia-smi, and writes nothing."""
    existing = next(folder for folder in (prefix, *prefix.parents) if folder.exists())
    return Survey(
        find_accelerator(root, variables.get("PATH", "")),
        _memory(root),
        shutil.disk_usage(existing).free,
        tuple(find_comfyuis(root, Path(variables.get("HOME") or "/nonexistent"))),
        tuple(_notes(prefix, variables)),
    )


def find_accelerator(root: Path, path: str) -> Accelerator:
    """The first GPU: by nvidia-smi on `path`, then by what the kernel shows below `root`."""
    program = shutil.which("nvidia-smi", path=path)
    if program is not None and (shown := _ask(program, *_GPU_QUERY)):
        name, _, driver = shown.splitlines()[0].partition(",")
        version = re.search(r"CUDA Version:\s*([0-9.]+)", _ask(program))
        return Accelerator("cuda", name.strip(), driver.strip(), version[1] if version else "")
    if (root / "dev" / "nvhost-gpu").exists() or (root / "dev" / "nvgpu").exists():
        model = root / "proc" / "device-tree" / "model"
        return Accelerator("cuda", _text(model).strip("\0\n ") or "a Jetson")
    vendors = sorted((root / "sys" / "class" / "drm").glob("card*/device/vendor"))
    if (root / _KFD).exists() and any(_text(file).strip() == _AMD for file in vendors):
        return Accelerator("amd")
    return Accelerator("none")


def find_comfyuis(root: Path, home: Path) -> Iterator[FoundComfyUI]:
    """The ComfyUIs in the usual folders. Each is looked at, none is changed."""
    in_container = any((root / name).exists() for name in _CONTAINER)
    candidates = [(home / name, kind) for name, kind in _HOMES]
    candidates += [(root / name, "container" if in_container else "") for name in _ROOTS]
    seen: set[Path] = set()
    for folder, kind in candidates:
        if not folder.is_dir() or folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        reason = no_comfyui(folder) or ""
        if reason and kind == "Desktop" and (folder / "custom_nodes").is_dir():
            reason = f"clone Onedesk into {folder / 'custom_nodes'} (docs/install.md)"
        elif reason:
            continue
        yield FoundComfyUI(folder, kind or ("git" if (folder / ".git").exists() else "a copy"), reason)


def torch_specs(accelerator: Accelerator, machine: str, usual: str) -> tuple[str, ...]:
    """The builds of torch to try in this order for the default spec `usual`, such as "torch==2.13.0".

    PyPI's build for x86-64 brings CUDA (3 GB), which a machine without a GPU does not need. PyPI's build for aarch64
    has no CUDA, which a DGX Spark needs.
    """
    index = "--extra-index-url https://download.pytorch.org/whl"
    if machine == "x86_64" and accelerator.kind != "cuda":
        return f"{usual}+cpu {index}/cpu", usual
    if machine == "aarch64" and accelerator.kind == "cuda" and _major(accelerator.cuda) >= _CUDA_13:
        return f"{usual}+cu130 {index}/cu130", usual
    return (usual,)


_CUDA_13 = 13


def report(found: Survey, prefix: Path, plan: str) -> None:
    """Show what was found and what will be installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    LOG.info(
        "found     %s on %s, Python %s, %d processors, %.1f GiB of memory, %.1f GiB free at %s",
        platform.system(),
        platform.machine(),
        python,
        os.cpu_count() or 1,
        found.memory / GIB,
        found.free / GIB,
        prefix,
    )
    LOG.info("found     %s", found.accelerator)
    for comfyui in found.comfyuis:
        use = comfyui.reason or f"--comfyui {comfyui.folder} adds Onedesk to it"
        LOG.info("found     ComfyUI in %s (%s): %s", comfyui.folder, comfyui.kind, use)
    for note in found.notes:
        LOG.info("note      %s", note)
    LOG.info("plan      %s", plan)


def _notes(prefix: Path, variables: Mapping[str, str]) -> Iterator[str]:
    if conda := variables.get("CONDA_PREFIX"):
        yield f"the conda environment {conda} is active; it is not used and not changed"
    if active := variables.get("VIRTUAL_ENV"):
        yield f"the virtual environment {active} is active; it is not used and not changed"
    if os.geteuid() == 0 and variables.get("SUDO_USER"):
        yield f"this runs as root by sudo: the files in {prefix} will belong to root, not to {variables['SUDO_USER']}"
    ignored = sorted(name for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX") if variables.get(name))
    if ignored:
        yield f"{', '.join(ignored)} set here {'is' if len(ignored) == 1 else 'are'} ignored"


def _memory(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc" / "meminfo"), re.M)
    return int(found[1]) * 1024 if found else 0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdecimal() else 0


def _ask(*words: str) -> str:
    """The output of a command; "" if it fails or does not end."""
    try:
        answer = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
