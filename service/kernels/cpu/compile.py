"""The kernels' C sources made into a library, once a machine, in the cache."""

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
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fwrapv", "-Wno-psabi", "-std=gnu11", "-fPIC", "-fopenmp")
COMPILE_SECONDS = 120
LOOK_SECONDS = 0.1  # how often a compiler at work is looked at, and whether to stop is asked
BUILD_ROOM = 1 << 20  # bytes in the cache; the objects and the library take 0.44 MB
UNUSED_SECONDS = 30 * 86400  # a library of other sources that nobody loaded for so long is removed
DIGEST_BYTES = hashlib.sha256().digest_size


def compile_library(cache: Path, cancel: CancelCheck | None = None) -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, built into `cache` where they are not there yet or damaged; or None and the reason why there are none.

    A library is followed by its SHA-256 in the same file: loading one that was cut short would end the process, not raise.
    Raises Cancelled: building takes 10 s and more where the cores are busy.
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
        return None, f"the compiled kernels do not load; delete {target.name} in the cache, so that they are built anew"


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def _key() -> str:
    # Not of the compiler: what was built once is used where none is found, as when a service starts with a shorter PATH.
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
        log.warning("%s in the cache is damaged and is built anew", target.name)
    return whole


def _lacking(cache: Path) -> str:
    """What to say where the cache's disk has no room to build; empty where it has, or cannot be asked."""
    try:
        there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
    except OSError:
        return ""
    if free >= BUILD_ROOM:
        return ""
    return f"building them takes {show(BUILD_ROOM)} in the cache folder, whose disk has {show(free)}; free {show(BUILD_ROOM - free)} there"


def _remove_unused(target: Path) -> None:
    """Remove the libraries of other sources or processors that nobody loaded for long. One that is loaded stays mapped where it is."""
    # A look whether a library is whole reads it, which sets its time of access; where a disk keeps none, its time of building counts.
    since = time.time() - UNUSED_SECONDS
    for other in target.parent.glob("kernels-*.so"):
        with suppress(OSError):
            state = other.stat()
            if other != target and max(state.st_atime, state.st_mtime) < since:
                other.unlink()


def _build(compiler: str, target: Path, cancel: CancelCheck | None) -> str:
    """Compile into a temporary folder and move the result into place, so that two builders cannot disturb each other."""
    log.warning("compiling the CPU kernels for this processor, once; a load waits some seconds for that")
    # torch's own OpenMP, where it carries one, so that both share a pool of threads.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))] or ["-fopenmp"]
    try:
        with work_folder(target.parent, "kernels") as folder, ThreadPoolExecutor() as pool:
            linked = folder / "kernels.so"
            commands = [[compiler, *FLAGS, "-c", str(path), "-o", str(folder / f"{path.stem}.o")] for path in _sources()]
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
            return f"the C compiler does not run: {error.strerror}; install cc, gcc or clang for the fast kernels"
        return f"the kernels could not be compiled: {error.strerror} in the cache folder; make it a folder that can be written, with room"
    except subprocess.TimeoutExpired as error:
        return f"the kernels could not be compiled: the compiler took more than {error.timeout:g} s"
    return ""


def _run(command: Sequence[str], folder: Path, cancel: CancelCheck | None) -> str:
    status, said = _ended(command, cancel)
    if status == 0:
        return ""
    lines = said.replace(f"{folder}/", "").replace(f"{FOLDER}/", "").strip().splitlines()
    told = next((line for line in lines if "error:" in line), lines[-1] if lines else f"it ended with status {status}")
    return f"the C compiler refused the kernels: {told}"


def _ended(command: Sequence[str], cancel: CancelCheck | None) -> tuple[int, str]:
    """Run a compiler to its end; its status and what it said. Raises OSError, TimeoutExpired, and Cancelled, with the compiler ended."""
    began = time.monotonic()
    # A session of its own: the driver's children are ended with it, and the driver takes its temporary files away. What it says may quote
    # a path, or the system, in an encoding that is not the locale's.
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
