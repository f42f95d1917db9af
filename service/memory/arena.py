"""The bookkeeping of slabs: best fit with immediate coalescing over plain addresses. Touches no memory.

All slabs lie on one line of addresses. A gap between two slabs keeps their blocks from being joined. Best fit with the
lowest address on a tie is the policy that Johnstone and Wilson (1998, "The memory fragmentation problem: solved?")
found to waste least.

Invariants, checked by `check`:
1. Blocks, used and free, tile each slab: no gap, no overlap, nothing outside.
2. No two free blocks touch (coalescing is complete).
3. Every address and every size is a multiple of the granule.
4. The three indexes of the free blocks (by address, by end, by size) name the same blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

# Sort key of a free block: size << _SHIFT | address. 2^48 bytes of addresses last for 500,000 slabs of 512 MiB.
_SHIFT = 48
_ADDRESS = (1 << _SHIFT) - 1


class BrokenInvariantError(RuntimeError):
    """The bookkeeping contradicts itself. This is a bug, never bad input."""


@dataclass(frozen=True, slots=True)
class SlabRange:
    """The addresses of one slab."""

    base: int
    nbytes: int


class Arena:
    """Allocates blocks in the slabs that were added to it. Not thread-safe: its owner holds a lock."""

    def __init__(self, granule: int = 64) -> None:
        if granule < 1 or granule & (granule - 1):
            raise ValueError(f"granule is {granule}; use a power of two")
        self.granule = granule
        self.allocations = 0
        self._bases: list[int] = []
        self._slabs: dict[int, int] = {}
        self._by_size: list[int] = []
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._next = granule

    @property
    def held(self) -> int:
        """Bytes of all slabs."""
        return sum(self._slabs.values())

    @property
    def used(self) -> int:
        """Bytes of all allocated blocks."""
        return sum(self._used.values())

    @property
    def blocks(self) -> int:
        """Number of allocated blocks."""
        return len(self._used)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that could be allocated now (at the granule's alignment)."""
        return self._by_size[-1] >> _SHIFT if self._by_size else 0

    def add_slab(self, nbytes: int, *, align: int = 4096) -> SlabRange:
        """Add a slab of `nbytes` (a multiple of the granule) whose start counts as aligned to `align`."""
        if nbytes < self.granule or nbytes % self.granule:
            raise ValueError(f"a slab of {nbytes} bytes is not a multiple of the granule {self.granule}")
        base = -(-self._next // align) * align
        self._next = base + nbytes + self.granule
        if self._next > _ADDRESS:
            raise BrokenInvariantError("the line of addresses is used up")
        self._slabs[base] = nbytes
        self._bases.append(base)
        self._put(base, nbytes)
        return SlabRange(base, nbytes)

    def remove_slab(self, base: int) -> None:
        """Remove an empty slab. Raises ValueError if it has an allocated block."""
        nbytes = self._slabs[base]
        if self._free.get(base) != nbytes:
            raise ValueError("the slab is not empty")
        self._cut(base, nbytes)
        del self._slabs[base]
        self._bases.remove(base)

    def is_empty(self, base: int) -> bool:
        """Whether the slab has no allocated block."""
        return self._free.get(base) == self._slabs[base]

    def slab_of(self, address: int) -> SlabRange:
        """The slab that contains an address."""
        base = self._bases[bisect_right(self._bases, address) - 1]
        return SlabRange(base, self._slabs[base])

    def size_of(self, address: int) -> int:
        """Size in bytes of the block at `address`. Raises KeyError if none is allocated there."""
        return self._used[address]

    def allocate(self, nbytes: int, align: int = 1) -> int | None:
        """The address of the best fitting block of at least `nbytes`, or None if no free block is large enough."""
        granule = self.granule
        size = (nbytes + granule - 1) // granule * granule
        order = self._by_size
        index = bisect_left(order, size << _SHIFT)
        if align > granule:
            return self._allocate_aligned(size, align, index)
        if index == len(order):
            return None
        key = order.pop(index)
        address = key & _ADDRESS
        rest = (key >> _SHIFT) - size
        del self._free[address]
        if rest:
            start = address + size
            self._free[start] = rest
            self._ends[start + rest] = start
            insort(order, rest << _SHIFT | start)
        else:
            del self._ends[address + size]
        self._used[address] = size
        self.allocations += 1
        return address

    def free(self, address: int) -> int:
        """Free a block and join it with its free neighbours. Returns its size. Raises KeyError if none is allocated at
        `address`.
        """
        size = self._used.pop(address)
        start, end = address, address + size
        before = self._ends.get(start)
        if before is not None:
            self._cut(before, start - before)
            start = before
        after = self._free.get(end)
        if after is not None:
            self._cut(end, after)
            end += after
        self._put(start, end - start)
        return size

    def fragmentation(self, request: int | None = None) -> float:
        """Share of the held bytes in free blocks too small for `request` bytes (None: for a block of average size).

        This is the unusable free space index of Linux, over all held bytes; 0 is none.
        """
        held = self.held
        if not held:
            return 0.0
        if request is None:
            request = self.used // len(self._used) if self._used else 0
        return sum(size for size in self._free.values() if size < request) / held

    def check(self) -> None:
        """Raise BrokenInvariantError with the reason if an invariant of this module does not hold."""
        self._check_indexes()
        blocks = sorted([(a, n, False) for a, n in self._free.items()] + [(a, n, True) for a, n in self._used.items()])
        position = 0
        for base in self._bases:
            end, joinable = base, False
            while position < len(blocks) and blocks[position][0] < base + self._slabs[base]:
                address, size, used = blocks[position]
                if address != end or size < self.granule or address % self.granule or size % self.granule:
                    raise BrokenInvariantError(f"block at {address} of {size} bytes, expected one at {end}")
                if joinable and not used:
                    raise BrokenInvariantError(f"free blocks touch at {address}")
                end, joinable = address + size, not used
                position += 1
            if end != base + self._slabs[base]:
                raise BrokenInvariantError(f"slab at {base} is tiled to {end}, not to {base + self._slabs[base]}")
        if position != len(blocks):
            raise BrokenInvariantError(f"block at {blocks[position][0]} lies in no slab")

    def _check_indexes(self) -> None:
        by_size = sorted(size << _SHIFT | address for address, size in self._free.items())
        if by_size != self._by_size:
            raise BrokenInvariantError("the index by size does not match the free blocks")
        if self._ends != {address + size: address for address, size in self._free.items()}:
            raise BrokenInvariantError("the index by end does not match the free blocks")

    def _allocate_aligned(self, size: int, align: int, index: int) -> int | None:
        for position in range(index, len(self._by_size)):
            key = self._by_size[position]
            address = key & _ADDRESS
            length = key >> _SHIFT
            start = (address + align - 1) // align * align
            tail = address + length - start - size
            if tail < 0:
                continue
            self._cut(address, length)
            if start > address:
                self._put(address, start - address)
            if tail:
                self._put(start + size, tail)
            self._used[start] = size
            self.allocations += 1
            return start
        return None

    def _put(self, address: int, size: int) -> None:
        self._free[address] = size
        self._ends[address + size] = address
        insort(self._by_size, size << _SHIFT | address)

    def _cut(self, address: int, size: int) -> None:
        del self._free[address]
        del self._ends[address + size]
        del self._by_size[bisect_left(self._by_size, size << _SHIFT | address)]
