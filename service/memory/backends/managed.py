"""Managed device memory, whose pages the driver moves between card and host. Optional: needs cuda-bindings, and
[memory] managed = true.

On a card with its own memory, idle pages can be moved to host memory. A page that the card then touches comes back over
the bus, correct but slow. On unified memory it gains nothing. Asking a card for more than it has free can hang it, so
no slab is ever larger than that.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ...errors import MemoryFull, RequestError
from .cuda import DeviceSlab, empty_caches
from .protocol import Returned

# Abilities of a machine, by the names of the runtime's device attributes.
ATTRIBUTES = (
    "ManagedMemory",
    "ConcurrentManagedAccess",
    "PageableMemoryAccess",
    "PageableMemoryAccessUsesHostPageTables",
    "DirectManagedMemAccessFromHost",
    "Integrated",
)
# Lasting advice -> (the runtime's name, whether it is about the host). "willneed" and "aside" move pages once, to the
# card and to the host.
LASTING: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "read_mostly": ("ReadMostly", False),
        "prefer_device": ("PreferredLocation", False),
        "prefer_host": ("PreferredLocation", True),
        "accessed_by_device": ("AccessedBy", False),
        "accessed_by_host": ("AccessedBy", True),
    }
)
MOVES = ("willneed", "aside")
# Pages move in whole pieces of the card's page size, so that those of a neighbour stay in place.
PIECE = 2 << 20
_INSTALL = 'pip install "cuda-bindings>=13" into the environment of Onedesk'


class Runtime(Protocol):
    """The few calls of CUDA's runtime that managed memory needs. Sizes in bytes; a refused call raises MemoryFull."""

    def attribute(self, name: str) -> int:
        """One of ATTRIBUTES."""
        ...

    def free_bytes(self) -> int:
        """Free bytes of the card after emptying torch's caches."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocate managed memory. Returns its address."""
        ...

    def release(self, address: int) -> None:
        """Free what `allocate` gave."""
        ...

    def tensor(self, owner: Allocation) -> torch.Tensor:
        """The allocation as [nbytes] uint8 on the device; it keeps `owner` alive."""
        ...

    def advise(self, address: int, nbytes: int, advice: str, *, on: bool) -> None:
        """Set or unset one of LASTING."""
        ...

    def move(self, address: int, nbytes: int, *, to_host: bool) -> None:
        """Move pages, and wait for the end of the move."""
        ...


class Allocation:
    """Owns managed memory until the last tensor over it has died."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = runtime.allocate(nbytes)
        weakref.finalize(self, runtime.release, self.address).atexit = False  # the driver frees everything at exit

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class ManagedSlab(DeviceSlab):
    """One managed allocation, all of it on the card when it is opened.

    `resident` counts the pieces that were not moved to the host. What the driver moves by itself it cannot know.
    """

    def __init__(self, nbytes: int, runtime: Runtime) -> None:
        owner = Allocation(runtime, nbytes)
        super().__init__(runtime.tensor(owner))
        self._runtime = runtime
        self._address = owner.address
        self._aside: set[int] = set()
        self._given: set[str] = set()
        runtime.move(self._address, nbytes, to_host=False)

    def populate(self, offset: int, nbytes: int) -> None:
        """Move the pieces of this part to the card."""
        first, last = offset // PIECE, -(-(offset + nbytes) // PIECE)
        if self._aside.intersection(range(first, last)):
            self._move(first, last, to_host=False)

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        """One of MOVES or LASTING, for the whole pieces inside this part. Lasting advice is undone when the part goes
        back.
        """
        self._open_block()
        first, last = self._whole_pieces(offset, nbytes)
        if advice not in MOVES and advice not in LASTING:
            return False
        if first >= last:
            return True
        if advice in MOVES:
            if "read_mostly" in self._given:  # such pages are copied, not moved
                self._runtime.advise(*self._span(first, last), "read_mostly", on=False)
            self._move(first, last, to_host=advice == "aside")
        else:
            self._runtime.advise(*self._span(first, last), advice, on=True)
            self._given.add(advice)
        return True

    def lock(self, offset: int, nbytes: int) -> bool:
        """Managed pages may always be moved."""
        return False

    def resident(self, offset: int, nbytes: int) -> int:
        if self._block is None:
            return 0
        pieces = self._aside.intersection(range(offset // PIECE, -(-(offset + nbytes) // PIECE)))
        return nbytes - sum(min(offset + nbytes, (piece + 1) * PIECE) - max(offset, piece * PIECE) for piece in pieces)

    def give_back(self, offset: int, nbytes: int) -> Returned:
        """A part cannot go back alone. Its advice is undone."""
        first, last = self._whole_pieces(offset, nbytes)
        if first < last:
            self._undo(first, last)
        return Returned(0, 0)

    def close(self) -> Returned:
        """Undo all advice, drop the memory, and measure how much more the card has free."""
        if self._block is None:
            return Returned(0, 0)
        self._undo(0, -(-self.nbytes // PIECE))
        asked, before = self.resident(0, self.nbytes), self._runtime.free_bytes()
        self._block = None
        return Returned(asked, max(0, min(asked, self._runtime.free_bytes() - before)))

    def _undo(self, first: int, last: int) -> None:
        for advice in sorted(self._given):
            self._runtime.advise(*self._span(first, last), advice, on=False)

    def _move(self, first: int, last: int, *, to_host: bool) -> None:
        self._runtime.move(*self._span(first, last), to_host=to_host)
        pieces = range(first, last)
        self._aside = self._aside.union(pieces) if to_host else self._aside.difference(pieces)

    def _whole_pieces(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The pieces inside a part, including a shorter last one of the slab: from the first to before the last."""
        end = offset + nbytes
        return -(-offset // PIECE), -(-end // PIECE) if end == self.nbytes else end // PIECE

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Address and bytes of the pieces from `first` to before `last`."""
        return self._address + first * PIECE, min(last * PIECE, self.nbytes) - first * PIECE


class ManagedBackend:
    """Managed memory of one card. With `oversubscribe` the oldest slabs are moved to the host when the card lacks
    memory.
    """

    name = "cuda managed"
    residency = "device"
    commits = True
    page = 0
    alignment = 512

    def __init__(self, device: str, *, oversubscribe: bool = False, runtime: Runtime | None = None) -> None:
        """Raises RequestError if cuda-bindings is missing, or the card does not support it."""
        self._runtime = runtime or CudaRuntime(torch.device(device))
        self._oversubscribe = oversubscribe
        self._slabs: list[weakref.ref[ManagedSlab]] = []
        if not self._runtime.attribute("ConcurrentManagedAccess"):
            raise RequestError(
                f"{device} or its driver cannot move managed memory on advice; take managed = true out of [memory]"
            )

    @property
    def movable(self) -> int:
        """Bytes that `open` could move to host memory."""
        return sum(slab.resident(0, slab.nbytes) for slab in self._open_slabs()) if self._oversubscribe else 0

    def open(self, nbytes: int, *, whole: bool) -> ManagedSlab:
        """Raises MemoryFull if the card has less free; with oversubscribe after moving other slabs."""
        lacking = nbytes - self._runtime.free_bytes()
        if lacking > 0 and self._oversubscribe:
            self._set_aside(lacking)
            lacking = nbytes - self._runtime.free_bytes()
        if lacking > 0:
            raise MemoryFull(
                f"{nbytes} bytes of managed memory are {lacking} more than the card has free; release a model or choose"
                " less"
            )
        slab = ManagedSlab(nbytes, self._runtime)
        self._slabs = [*(ref for ref in self._slabs if ref() is not None), weakref.ref(slab)]
        return slab

    def capabilities(self) -> Mapping[str, bool]:
        return {name: bool(self._runtime.attribute(name)) for name in ATTRIBUTES} | {
            "oversubscribe": self._oversubscribe
        }

    def _open_slabs(self) -> list[ManagedSlab]:
        return [slab for ref in self._slabs if (slab := ref()) is not None]

    def _set_aside(self, lacking: int) -> None:
        for slab in self._open_slabs():
            if lacking <= 0:
                return
            held = slab.resident(0, slab.nbytes)
            if held and slab.advise("aside", 0, slab.nbytes):
                lacking -= held


class CudaRuntime:
    """The real runtime, through cuda-bindings 13 or newer."""

    def __init__(self, device: torch.device) -> None:
        try:
            runtime = import_module("cuda.bindings.runtime")  # compiled, without stubs
        except ImportError as error:
            raise RequestError(f"managed memory needs cuda-bindings: {_INSTALL} ({error})") from error
        if not hasattr(runtime, "cudaMemLocation"):
            raise RequestError(f"managed memory needs cuda-bindings 13 or newer: {_INSTALL}")
        self._cuda: Any = runtime
        self._device = device
        self._index = device.index or 0

    def attribute(self, name: str) -> int:
        return int(
            self._ask("cudaDeviceGetAttribute", getattr(self._cuda.cudaDeviceAttr, f"cudaDevAttr{name}"), self._index)
        )

    def free_bytes(self) -> int:
        empty_caches(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def allocate(self, nbytes: int) -> int:
        with torch.cuda.device(self._index):
            return int(self._ask("cudaMallocManaged", nbytes, self._cuda.cudaMemAttachGlobal))

    def release(self, address: int) -> None:
        self._ask("cudaFree", address)

    def tensor(self, owner: Allocation) -> torch.Tensor:
        return torch.as_tensor(owner, device=self._device)

    def advise(self, address: int, nbytes: int, advice: str, *, on: bool) -> None:
        name, host = LASTING[advice]
        kind = getattr(self._cuda.cudaMemoryAdvise, f"cudaMemAdvise{'Set' if on else 'Unset'}{name}")
        self._ask("cudaMemAdvise", address, nbytes, kind, self._location(host))

    def move(self, address: int, nbytes: int, *, to_host: bool) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.synchronize(self._device)  # the pages may still be in use by work queued before
            self._ask("cudaMemPrefetchAsync", address, nbytes, self._location(to_host), 0, 0)
            self._ask("cudaStreamSynchronize", 0)

    def _location(self, host: bool) -> Any:
        location, kinds = self._cuda.cudaMemLocation(), self._cuda.cudaMemLocationType
        location.type = kinds.cudaMemLocationTypeHost if host else kinds.cudaMemLocationTypeDevice
        location.id = 0 if host else self._index
        return location

    def _ask(self, call: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cuda, call)(*arguments)
        if int(error) != 0:
            raise MemoryFull(f"the driver refused {call}: {error.name}; release a model or choose less")
        return values[0] if values else None
