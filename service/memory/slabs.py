"""The slabs of a pool: shared ones, divided by the arena, and a separate one for each large lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock

from ..errors import MemoryFull
from .arena import Arena, BrokenInvariantError
from .backends.protocol import Backend, Returned, Slab
from .budget import MemorySettings, show
from .lease import Lease

# Growth step of a shared slab if slabs take their bytes at once: CUDA's own page.
_DEVICE_STEP = 2 << 20


@dataclass(frozen=True, slots=True)
class SlabBlock:
    """Bytes in a slab. `address` is that of the arena, None if the slab belongs to this block alone."""

    slab: Slab
    offset: int
    address: int | None


class SlabStore:
    """Opens slabs when blocks are needed and closes empty ones. If slabs are only addresses, one empty slab is kept for
    the next block.
    """

    def __init__(self, backend: Backend, settings: MemorySettings, lock: RLock) -> None:  # type: ignore[valid-type]
        self.backend = backend
        self.arena = Arena(settings.align)
        self._settings = settings
        self._lock = lock
        self._shared: dict[int, Slab] = {}
        self._own: dict[int, Slab] = {}
        self._waiting: list[tuple[Lease, int]] = []

    @property
    def held(self) -> int:
        """Bytes of all slabs. On the host, where untouched pages hold nothing, these are
        addresses rather than memory.
        """
        with self._lock:
            return self.arena.held + sum(slab.nbytes for slab in self._own.values())

    @property
    def waiting(self) -> int:
        """Bytes of returned leases whose block is not reused because a view of them is still alive."""
        with self._lock:
            self._sweep()
            return sum(lease.nbytes for lease, _ in self._waiting)

    def fragmentation(self) -> float:
        """Share of the held bytes that is free but of little use; see Arena.fragmentation. Separate slabs have none."""
        with self._lock:
            held = self.held
            return self.arena.fragmentation() * self.arena.held / held if held else 0.0

    def allocate(self, nbytes: int, align: int, room: int) -> SlabBlock:
        """Allocate a block. `room` limits a new slab if slabs take their bytes at once.

        Raises MemoryFull if the system or `room` refuses.
        """
        with self._lock:
            if nbytes >= self._settings.own_slab:
                self._check_room(nbytes, room)
                slab = self.backend.open(nbytes, whole=True)
                self._own[id(slab)] = slab
                return SlabBlock(slab, 0, None)
            self._sweep()
            address = self.arena.allocate(nbytes, align)
            if address is None:
                self._grow(nbytes + align, room)
                address = self.arena.allocate(nbytes, align)
            if address is None:
                raise BrokenInvariantError(f"a new slab has no block of {nbytes} bytes")
            base = self.arena.slab_of(address).base
            return SlabBlock(self._shared[base], address - base, address)

    def give_back(self, block: SlabBlock, lease: Lease) -> Returned:
        """Return the bytes of a block to the system. Returns what was measured.

        The slow part runs without the lock. The block is reused only after the last view of the lease has died.
        """
        if block.address is None:
            returned = block.slab.close()
            with self._lock:
                del self._own[id(block.slab)]
            return returned
        layout = lease.placement.layout
        returned = block.slab.give_back(block.offset, layout.total)
        with self._lock:
            if lease.alive is not None and lease.alive():
                self._waiting.append((lease, block.address))
                return returned
            closed = self._free(block.address)
            return Returned(returned.asked + closed.asked, returned.measured + closed.measured)

    def check(self, blocks: Mapping[Lease, SlabBlock], *, settled: bool) -> None:
        """Raise BrokenInvariantError unless the invariants of the arena hold and every lease has a block of its own.

        `settled`: no lease is being returned, so every block belongs to a lease or waits for a view to die.
        """
        with self._lock:
            self._sweep()
            self.arena.check()
            addresses = {block.address: lease for lease, block in blocks.items() if block.address is not None}
            owned = {id(block.slab) for block in blocks.values() if block.address is None}
            waiting = {address for _, address in self._waiting}
            if len(addresses) + len(owned) != len(blocks) or waiting & addresses.keys():
                raise BrokenInvariantError("two leases share a block")
            for address, lease in addresses.items():
                if self.arena.size_of(address) < lease.placement.layout.total:
                    raise BrokenInvariantError(f"{lease.title} is larger than its block")
            if settled and (self.arena.blocks != len(addresses) + len(waiting) or self._own.keys() != owned):
                raise BrokenInvariantError(
                    f"{self.arena.blocks} blocks for {len(addresses)} leases and {len(waiting)} views"
                )
            if len(self._empty()) > (0 if self.backend.commits else 1):
                raise BrokenInvariantError("an empty slab was not closed")

    def _check_room(self, nbytes: int, room: int) -> None:
        if self.backend.commits and nbytes > room:
            raise MemoryFull(
                f"a slab of {show(nbytes)} does not fit: {show(max(0, room))} are left of the limit; release a model"
            )

    def _grow(self, nbytes: int, room: int) -> None:
        granule = self._settings.align
        wanted = -(-nbytes // granule) * granule
        size = max(wanted, self._settings.initial_slab // granule * granule)
        if self.backend.commits:  # an H200 once held 512 MiB for 14 MiB of scratch
            step = max(granule, _DEVICE_STEP)
            size = max(wanted, min(-(-wanted // step) * step, room // granule * granule))
            self._check_room(size, room)
        slab = self.backend.open(size, whole=False)
        slab_range = self.arena.add_slab(size, align=self.backend.alignment)
        self._shared[slab_range.base] = slab

    def _free(self, address: int) -> Returned:
        base = self.arena.slab_of(address).base
        self.arena.free(address)
        if not self.arena.is_empty(base) or (not self.backend.commits and len(self._empty()) == 1):
            return Returned(0, 0)
        self.arena.remove_slab(base)
        return self._shared.pop(base).close()

    def _empty(self) -> list[int]:
        return [base for base in self._shared if self.arena.is_empty(base)]

    def _sweep(self) -> None:
        """Free the blocks whose last view has died."""
        waiting, self._waiting = self._waiting, []
        for lease, address in waiting:
            if lease.alive is not None and lease.alive():
                self._waiting.append((lease, address))
            else:
                self._free(address)
