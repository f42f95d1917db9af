"""How fast this machine reads its memory: the limit of decode at batch 1."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..kernels.cpu.compile import compile_library
from ..kernels.cpu.native import Native

MIB = 1 << 20
BUFFER_BYTES = 1024 * MIB  # far beyond any last-level cache
SMALLEST_BUFFER = 64 * MIB
REPEATS = 7


def read_ceiling(device: str, *, available: int, cache: Path | None = None, repeats: int = REPEATS) -> float:
    """Bytes per second that all threads (or the whole GPU) read from one large buffer: the median of `repeats` passes
    of the fastest reader. Readers are two reductions and, on the CPU, the compiled one, whose library is kept in
    `cache` (None: without it).

    The buffer takes at most an eighth of `available` bytes. It is written before it is read, since untouched pages all
    map to one page of zeros and would be read from the cache.
    """
    reductions: list[Callable[[torch.Tensor], object]] = [torch.sum, torch.amax]
    library = compile_library(cache)[0] if cache is not None and device == "cpu" else None
    if library is not None:
        reductions.append(partial(_read_all, Native(library)))
    nbytes = max(SMALLEST_BUFFER, min(BUFFER_BYTES, available // 8))
    buffer = _buffer(device, nbytes).fill_(1.0)
    wait = torch.cuda.synchronize if buffer.is_cuda else _nothing
    best = 0.0
    for reduce in reductions:
        reduce(buffer)
        wait()
        best = max(best, statistics.median(_speed(reduce, buffer, wait) for _ in range(repeats)))
    return best


def _buffer(device: str, nbytes: int) -> torch.Tensor:
    """The kind of memory that holds weights: on the CPU private pages, huge ones if the system has them."""
    if device != "cpu":
        return torch.empty(nbytes // 4, dtype=torch.float32, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32)


def _speed(reduce: Callable[[torch.Tensor], object], buffer: torch.Tensor, wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    reduce(buffer)
    wait()
    return buffer.nbytes / (time.perf_counter() - start)


def _read_all(native: Native, buffer: torch.Tensor) -> None:
    native.read_all(buffer.data_ptr(), buffer.nbytes, torch.get_num_threads())


def _nothing() -> None:
    """The CPU returns a result when it is computed."""
