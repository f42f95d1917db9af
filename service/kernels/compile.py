"""The kernels' C sources made into a library, once a machine, in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .unfinished import work_folder

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fwrapv", "-Wno-psabi", "-std=gnu11", "-fPIC", "-fopenmp")
COMPILE_SECONDS = 120
DIGEST_BYTES = hashlib.sha256().digest_size


def compile_library(cache: Path) -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, built into `cache` where they are not there yet or damaged; or None and the reason why there are none.

    A library is followed by its SHA-256 in the same file: loading one that was cut short would end the process, not raise.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    target = cache / f"kernels-{_key()}.so"
    if not _whole(target):
        if compiler is None:
            return None, "no C compiler (cc, gcc or clang) was found; install one for the fast kernels"
        failed = _build(compiler, target)
        if failed:
            return None, failed
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
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
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


def _build(compiler: str, target: Path) -> str:
    """Compile into a temporary folder and move the result into place, so that two builders cannot disturb each other."""
    log.warning("compiling the CPU kernels for this processor, once; a load waits some seconds for that")
    # torch's own OpenMP, where it carries one, so that both share a pool of threads.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))] or ["-fopenmp"]
    try:
        with work_folder(target.parent, "kernels") as folder, ThreadPoolExecutor() as pool:
            linked = folder / "kernels.so"
            commands = [[compiler, *FLAGS, "-c", str(path), "-o", str(folder / f"{path.stem}.o")] for path in _sources()]
            failed = next(filter(None, pool.map(lambda command: _run(command, folder), commands)), "")
            failed = failed or _run([compiler, "-shared", *(command[-1] for command in commands), "-o", str(linked), *openmp], folder)
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


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode == 0:
        return ""
    lines = done.stderr.replace(f"{folder}/", "").replace(f"{FOLDER}/", "").strip().splitlines()
    told = next((line for line in lines if "error:" in line), lines[-1] if lines else f"it ended with status {done.returncode}")
    return f"the C compiler refused the kernels: {told}"
