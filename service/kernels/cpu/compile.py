"""Compiles the C sources into a library, once per machine, in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from ...core import CancelCheck
from ...errors import Cancelled
from ...memory.budget import show
from ...work_folder import work_folder

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fwrapv",
    "-Wno-psabi",
    "-std=gnu11",
    "-fPIC",
    "-fopenmp",
)
COMPILE_SECONDS = 120
LOOK_SECONDS = 0.1  # interval of checks on a running compiler, and of cancel
BUILD_ROOM = 1 << 20  # bytes in the cache; objects and library take 0.44 MB
UNUSED_SECONDS = 30 * 86400  # age at which an unused library of other sources is removed
DIGEST_BYTES = hashlib.sha256().digest_size


def compile_library(cache: Path, cancel: CancelCheck | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, built into `cache` if absent or damaged; or None and the reason.

    The file of a library ends with its SHA-256: loading a truncated library would end the process, not raise. Raises
    Cancelled: building takes 10 s and more on busy cores.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    target = cache / f"kernels-{_key()}.so"
    if not _whole(target):
        if compiler is None:
            return None, "no C compiler (cc, gcc or clang) was found; install one for the fast kernels"
        failed = _lacking(cache) or _build(compiler, target, cancel)
        if failed:
            return None, failed
        _remove_unused(target)
    try:
        return ctypes.CDLL(str(target)), ""
    except OSError as error:
        log.debug("the compiled kernels do not load", exc_info=error)
        return None, f"the compiled kernels do not load; delete {target.name} in the cache, to rebuild them"


def has_library(cache: Path) -> bool:
    """Whether the kernels of these sources and this processor are compiled in `cache`."""
    return _whole(cache / f"kernels-{_key()}.so")


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def _key() -> str:
    # The compiler is not part of the key: a library is used even if no compiler is found, as in a service with a
    # shorter PATH.
    texts = [path.read_bytes() for path in (*_sources(), *sorted(FOLDER.glob("*.h")))]
    parts = (*texts, " ".join(FLAGS).encode(), platform.machine().encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the processor's name and features (a tree can move between machines)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _whole(target: Path) -> bool:
    try:
        content = target.read_bytes()
    except OSError:
        return False
    whole = hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
    if not whole:
        log.warning("%s in the cache is damaged and is rebuilt", target.name)
    return whole


def _lacking(cache: Path) -> str:
    """The reason if the cache's disk is too full to build; empty if it is not, or cannot be asked."""
    try:
        there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
    except OSError:
        return ""
    if free >= BUILD_ROOM:
        return ""
    return (
        f"building them takes {show(BUILD_ROOM)} in the cache folder, but its disk has {show(free)}; free"
        f" {show(BUILD_ROOM - free)} there"
    )


def _remove_unused(target: Path) -> None:
    """Remove libraries of other sources or processors that were not loaded for 30 days. A loaded one stays mapped."""
    # Checking a library reads it, which sets its access time. On a disk without access times the build time counts.
    since = time.time() - UNUSED_SECONDS
    for other in target.parent.glob("kernels-*.so"):
        with suppress(OSError):
            state = other.stat()
            if other != target and max(state.st_atime, state.st_mtime) < since:
                other.unlink()


def _build(compiler: str, target: Path, cancel: CancelCheck | None) -> str:
    """Compile into a temporary folder and move the result into place, so that two builders do
    not disturb each other.
    """
    log.warning("compiling the CPU kernels for this processor, once; a load waits some seconds for that")
    # torch's own OpenMP if it has one, so that both share a thread pool.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))] or ["-fopenmp"]
    try:
        with work_folder(target.parent, "kernels") as folder, ThreadPoolExecutor() as pool:
            linked = folder / "kernels.so"
            commands = [
                [compiler, *FLAGS, "-c", str(path), "-o", str(folder / f"{path.stem}.o")] for path in _sources()
            ]
            failed = next(filter(None, pool.map(lambda command: _run(command, folder, cancel), commands)), "")
            link = [compiler, "-shared", *(command[-1] for command in commands), "-o", str(linked), *openmp]
            failed = failed or _run(link, folder, cancel)
            if failed:
                return failed
            with linked.open("ab") as file:
                file.write(hashlib.sha256(linked.read_bytes()).digest())
            linked.replace(target)
    except OSError as error:
        if error.filename == compiler:
            return f"the C compiler cannot be run: {error.strerror}; install cc, gcc or clang for the fast kernels"
        return (
            f"the kernels could not be compiled: {error.strerror} in the cache folder; make it writable, with free"
            " space"
        )
    except subprocess.TimeoutExpired as error:
        return f"the kernels could not be compiled: the compiler took more than {error.timeout:g} s"
    return ""


def _run(command: Sequence[str], folder: Path, cancel: CancelCheck | None) -> str:
    status, said = _ended(command, cancel)
    if status == 0:
        return ""
    lines = said.replace(f"{folder}/", "").replace(f"{FOLDER}/", "").strip().splitlines()
    reason = next(
        (line for line in lines if "error:" in line), lines[-1] if lines else f"it ended with status {status}"
    )
    return f"the C compiler refused the kernels: {reason}"


def _ended(command: Sequence[str], cancel: CancelCheck | None) -> tuple[int, str]:
    """Run a compiler to its end. Returns its status and output. Raises OSError, TimeoutExpired and Cancelled, after
    ending the compiler.
    """
    began = time.monotonic()
    # A session of its own: signals reach the driver's children too, and the driver removes its temporary files. The
    # output may quote a path, or the system, in another encoding than the locale's.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as child:
        while True:
            try:
                said = child.communicate(timeout=LOOK_SECONDS)[1]
                return child.returncode, said
            except subprocess.TimeoutExpired:
                late = time.monotonic() - began > COMPILE_SECONDS
                if late or (cancel is not None and cancel()):
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
                    child.communicate()
                    if late:
                        raise subprocess.TimeoutExpired(command, COMPILE_SECONDS) from None
                    raise Cancelled("stopped while the kernels were compiled") from None
