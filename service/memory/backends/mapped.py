"""Host memory: private anonymous mappings with advice, prefetch, locking and exact residency.

Private, because a shared mapping (Python's default) faults 2-3 times slower. Residency is mincore's, page by page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from ...errors import MemoryFull
from .protocol import Returned, SlabView

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
# Linux's numbers; Python names only some of them.
ADVICE: Mapping[str, int] = {
    "normal": 0,
    "random": 1,
    "willneed": 3,
    "dontneed": 4,
    "hugepage": 14,
    "nohugepage": 15,
    "populate_read": 22,
    "populate_write": 23,
}
# One call over a whole large lease would hold the process's map lock for seconds. Other threads get in between slices.
_SLICE = 256 << 20
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("madvise", "mincore", "mlock", "munlock"):
    getattr(_libc, _name).restype = ctypes.c_int


def advise(address: int, nbytes: int, advice: str) -> bool:
    """Advise the kernel about the whole pages inside [address, address + nbytes), slice by
    slice. False if it refuses.
    """
    first = -(-address // PAGE) * PAGE
    last = (address + nbytes) // PAGE * PAGE
    return all(_madvise(start, min(_SLICE, last - start), ADVICE[advice]) for start in range(first, last, _SLICE))


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes in memory of the pages touched by [address, address + nbytes), at most `nbytes`; by mincore."""
    first = address // PAGE * PAGE
    found = 0
    for start in range(first, address + nbytes, _SLICE):
        pages = -(-min(_SLICE, address + nbytes - start) // PAGE)
        vector = np.empty(pages, dtype=np.uint8)
        if (
            _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), ctypes.c_void_p(vector.ctypes.data))
            == 0
        ):
            found += int(np.count_nonzero(vector & 1)) * PAGE
    return min(nbytes, found)


def _madvise(start: int, nbytes: int, advice: int) -> bool:
    while _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_int(advice)) != 0:
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            return False
    return True


class MappedSlab:
    """One private anonymous mapping, its start aligned to a huge page if `huge`.

    A part that is given back loses its pages at once (MADV_DONTNEED). Its addresses stay mapped until the last tensor
    on the slab dies. So a stale view reads zeros and never ends the process; what it writes is on pages that no lease
    counts.
    """

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.nbytes = nbytes
        slack = HUGE_PAGE if huge else 0
        try:
            mapping = mmap.mmap(
                -1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, OverflowError, ValueError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise MemoryFull(
                f"the system refused to map {nbytes} bytes of memory: {reason}; release a model or choose less"
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        shift = -start % HUGE_PAGE if huge else 0
        self._address = start + shift
        self._view: memoryview | None = memoryview(mapping)[shift : shift + nbytes]
        self._mutex = threading.Lock()
        self._locked = False
        advise(self._address, nbytes, "hugepage" if huge else "nohugepage")

    def view(self, offset: int, nbytes: int) -> SlabView:
        """The part with a storage of its own: a weak reference to it shows when the last view has died."""
        part = self._open_view()[offset : offset + nbytes]
        life = weakref.ref(part)
        return SlabView(torch.frombuffer(part, dtype=torch.uint8), lambda: life() is not None)

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault every page in. Kernels before 5.14 have no MADV_POPULATE_WRITE; there each page is touched."""
        view = self._open_view()
        if not advise(self._address + offset, nbytes, "populate_write"):
            for start in range(offset, offset + nbytes, PAGE):
                view[start] = view[start]

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        return advise(self._address + offset, nbytes, advice)

    def lock(self, offset: int, nbytes: int) -> bool:
        """mlock. False if RLIMIT_MEMLOCK is too small."""
        locked = _libc.mlock(ctypes.c_void_p(self._address + offset), ctypes.c_size_t(nbytes)) == 0
        self._locked = self._locked or locked
        return locked

    def resident(self, offset: int, nbytes: int) -> int:
        return resident_bytes(self._address + offset, nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._open_view()[offset : offset + nbytes])

    def write(self, offset: int, data: bytes) -> None:
        self._open_view()[offset : offset + len(data)] = data

    def checksum(self, offset: int, nbytes: int) -> int:
        return zlib.crc32(self._open_view()[offset : offset + nbytes])

    def give_back(self, offset: int, nbytes: int) -> Returned:
        """Drop the whole pages inside the part. A page shared with a neighbour is neither requested nor counted."""
        first = -(-(self._address + offset) // PAGE) * PAGE
        length = (self._address + offset + nbytes) // PAGE * PAGE - first
        if length <= 0:
            return Returned(0, 0)
        before = resident_bytes(first, length)
        if self._locked:
            _libc.munlock(ctypes.c_void_p(first), ctypes.c_size_t(length))
        advise(first, length, "normal")
        advise(first, length, "dontneed")
        return Returned(before, before - resident_bytes(first, length))

    def close(self) -> Returned:
        with self._mutex:
            if self._view is None:
                return Returned(0, 0)
            returned = self.give_back(0, -(-self.nbytes // PAGE) * PAGE)
            self._view = None  # the mapping goes with its last view
            return returned

    def _open_view(self) -> memoryview:
        view = self._view
        if view is None:
            raise MemoryFull("the slab has been given back; lease again")
        return view


class MappedBackend:
    """Anonymous host memory. Opening a slab takes addresses only; pages are taken on first touch."""

    name = "mmap"
    residency = "host"
    commits = False
    page = PAGE
    alignment = PAGE
    movable = 0

    def open(self, nbytes: int, *, whole: bool) -> MappedSlab:
        """Open a slab. Huge pages only for a slab of one lease: returning a part of a huge page would free nothing."""
        return MappedSlab(nbytes, huge=whole and nbytes >= HUGE_PAGE)

    def capabilities(self) -> Mapping[str, bool]:
        """Try each advice, mincore and mlock on a small mapping."""
        slab = MappedSlab(16 * PAGE, huge=False)
        found = {advice: slab.advise(advice, 0, PAGE) for advice in ADVICE}
        slab.write(0, b"\1")
        found["mincore"] = slab.resident(0, PAGE) == PAGE
        found["mlock"] = slab.lock(0, PAGE)
        slab.close()
        return found
