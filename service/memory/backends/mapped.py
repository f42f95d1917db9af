"""Host memory: private anonymous mappings with advice, prefetch, locking and exact residency."""

from __future__ import annotations

import ctypes
import mmap
import weakref
import zlib
from collections.abc import Mapping

import torch

from ...errors import MemoryFull

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
_ADVICE = {
    "normal": 0,
    "random": 1,
    "willneed": 3,
    "dontneed": 4,
    "hugepage": 14,
    "nohugepage": 15,
    "populate_read": 22,
    "populate_write": 23,
}
# One call over a whole large lease would hold the mapping's lock for seconds; slices let other threads and a cancel in between.
_SLICE = 1 << 30


class MappedSlab:
    """One private anonymous mapping.

    Private, because a shared one (Python's default) faults 2-3 times slower. After `close` the pages are gone at once; the address
    range is unmapped only when the last tensor on it dies, so a stale view reads zeros and never ends the process.
    """

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryFull(f"the system refused to map {nbytes} bytes of anonymous memory ({error})") from error
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._closed = False
        self.advise("hugepage" if huge else "nohugepage", 0, nbytes)

    def storage(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return [nbytes] uint8 with a storage of its own, so that its life can be followed."""
        part = self._view[offset : offset + nbytes]
        return torch.frombuffer(part, dtype=torch.uint8)

    def viewed(self, storage: object) -> bool:
        life = storage if isinstance(storage, weakref.ref) else None
        return life is not None and life() is not None

    def populate(self, offset: int, nbytes: int) -> None:
        if not self.advise("populate_write", offset, nbytes):
            for start in range(offset, offset + nbytes, PAGE):
                self._view[start] = self._view[start]

    def resident(self, offset: int, nbytes: int) -> int:
        return _resident(self._address + offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        self.advise("normal", offset, nbytes)
        self.advise("dontneed", offset, nbytes)

    def checksum(self, offset: int, nbytes: int) -> int:
        return zlib.crc32(self._view[offset : offset + nbytes])

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        """Give one kind of advice over the whole pages inside that part; False if this kernel does not take it."""
        first = -(-(self._address + offset) // PAGE) * PAGE
        last = (self._address + offset + nbytes) // PAGE * PAGE
        return all(
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(min(_SLICE, last - start)), _ADVICE[advice]) == 0
            for start in range(first, last, _SLICE)
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.discard(0, self.nbytes)
        del self._view, self._map  # unmapped when the last tensor on it lets go


def _resident(address: int, nbytes: int) -> int:
    first = address // PAGE * PAGE
    pages = -(-(address + nbytes - first) // PAGE)
    vector = (ctypes.c_ubyte * pages)()
    if _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * PAGE), vector) != 0:
        return 0
    return min(nbytes, sum(1 for page in vector if page & 1) * PAGE)


class MappedBackend:
    """Anonymous host memory. Opening a slab takes address space only; pages are taken when touched."""

    name = "mmap"
    commits = False
    page = PAGE

    def open(self, nbytes: int, *, whole: bool) -> MappedSlab:
        return MappedSlab(nbytes, huge=whole and nbytes >= HUGE_PAGE)

    def capabilities(self) -> Mapping[str, bool]:
        slab = MappedSlab(HUGE_PAGE, huge=False)
        try:
            return {advice: slab.advise(advice, 0, PAGE) for advice in _ADVICE}
        finally:
            slab.close()


_libc = ctypes.CDLL(None, use_errno=True)
