"""A checkpoint's files as the page cache sees them: evicted, read whole, and how much of them is resident."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..memory.backends.mapped import MappedBackend

BLOCK = 8 << 20
READERS = 4
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # mincore's other bits are reserved


def evict(files: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache; those of a file that was just written go to the disk first."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_whole(files: Sequence[Path], *, readers: int = READERS, fresh: bool = False) -> float:
    """Seconds to read every byte once, with `readers` threads: the raw speed that a load is compared with.

    Each reader fills one small buffer again and again. With `fresh` it fills new memory of the files' size, as a load
    does: the system clears each page before it is written.
    """
    started = time.perf_counter()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            share = -(-size // readers) or 1
            slab = MappedBackend().open(size, whole=True) if fresh else None
            memory = None if slab is None else slab.view(0, size).tensor.numpy().data
            with ThreadPoolExecutor(readers) as threads:
                list(threads.map(lambda at: _read_part(fd, at, min(size, at + share), memory), range(0, size, share)))  # noqa: B023
        finally:
            os.close(fd)
    return time.perf_counter() - started


def _read_part(fd: int, at: int, end: int, memory: memoryview | None) -> None:
    target = memoryview(bytearray(BLOCK)) if memory is None else memory
    while at < end:
        length, offset = min(BLOCK, end - at), 0 if memory is None else at
        got = os.preadv(fd, [target[offset : offset + length]], at)
        if not got:
            return
        at += got


class Residency:
    """Counts the bytes of some files that are in the page cache (mincore over a mapping that is never touched)."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._maps = [self._map(path) for path in files]

    def _map(self, path: Path) -> tuple[int, int, ctypes.Array[ctypes.c_ubyte]]:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            start = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if start in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "cannot map the file to look at its residency")
        return start, size, (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()

    def resident(self) -> int:
        """Bytes resident now, whole pages."""
        pages = 0
        for start, size, vector in self._maps:
            if self._libc.mincore(start, size, vector):
                raise OSError(ctypes.get_errno(), "mincore did not report the file's residency")
            pages += bytes(vector).translate(_LOWEST_BIT).count(1)
        return pages * mmap.PAGESIZE

    def close(self) -> None:
        for start, size, _ in self._maps:
            self._libc.munmap(start, size)
        self._maps = []
