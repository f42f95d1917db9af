"""How fast this machine reads its memory: the wall that batch-1 decode runs against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MIB = 1 << 20
BUFFER_BYTES = 1024 * MIB  # far beyond any last-level cache
SMALLEST_BUFFER = 64 * MIB
REPEATS = 7


def read_ceiling(device: str, *, available: int, repeats: int = REPEATS) -> float:
    """Bytes a second that all threads (or the whole GPU) read from one large buffer; the median of `repeats` passes of the faster
    of two reductions.

    The buffer takes at most an eighth of `available` bytes. It is written before it is read, since untouched pages all map to one
    page of zeros and would be read from the cache.
    """
    nbytes = max(SMALLEST_BUFFER, min(BUFFER_BYTES, available // 8))
    buffer = torch.empty(nbytes // 4, dtype=torch.float32, device=device).fill_(1.0)
    wait = torch.cuda.synchronize if buffer.is_cuda else _nothing
    best = 0.0
    for reduce in (torch.sum, torch.amax):
        reduce(buffer)
        wait()
        best = max(best, statistics.median(_speed(reduce, buffer, wait) for _ in range(repeats)))
    return best


def _speed(reduce: Callable[[torch.Tensor], torch.Tensor], buffer: torch.Tensor, wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    reduce(buffer)
    wait()
    return buffer.nbytes / (time.perf_counter() - start)


def _nothing() -> None:
    """The CPU has computed a result when it returns it."""
