"""The protocol of backends: they open slabs, say what this machine can do, and measure what they give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SlabView:
    """A part of a slab as [nbytes] uint8. `alive` returns whether any tensor on it is alive, None if that cannot be
    known.
    """

    tensor: torch.Tensor
    alive: Callable[[], bool] | None


@dataclass(frozen=True, slots=True)
class Returned:
    """Bytes that were in memory before and could go back (`asked`), and how many of those are
    gone after (`measured`).
    """

    asked: int
    measured: int


class Slab(Protocol):
    """A contiguous range of bytes in one memory. Offsets and lengths are bytes from its
    start. Any thread may call it.
    """

    @property
    def nbytes(self) -> int:
        """Length of the slab."""
        ...

    def view(self, offset: int, nbytes: int) -> SlabView:
        """The part as a tensor. It stays readable as long as it or any view of it is alive."""
        ...

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault every page of the part in, writable, so that later accesses do not fault."""
        ...

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        """Give one of the advices that `capabilities` names. False if this memory or kernel refuses it."""
        ...

    def lock(self, offset: int, nbytes: int) -> bool:
        """Lock the part in memory. False if the system does not allow it."""
        ...

    def resident(self, offset: int, nbytes: int) -> int:
        """Bytes of the part that are in memory now, as exactly as this kind of memory can tell."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy that part out."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Copy `data` in."""
        ...

    def checksum(self, offset: int, nbytes: int) -> int:
        """A number that changes when a byte of the part changes."""
        ...

    def give_back(self, offset: int, nbytes: int) -> Returned:
        """Return the bytes of the part and reset its advice. The content is lost; views stay readable."""
        ...

    def close(self) -> Returned:
        """Return the whole slab. Live views stay readable."""
        ...


class Backend(Protocol):
    """A kind of memory."""

    @property
    def name(self) -> str: ...

    @property
    def residency(self) -> str:
        """Where its bytes live: device, host or file."""
        ...

    @property
    def commits(self) -> bool:
        """Whether opening a slab takes its bytes at once (device blocks) or page by page on first touch (mmap)."""
        ...

    @property
    def page(self) -> int:
        """Bytes of the smallest part that can be returned alone; 0 if only whole slabs can."""
        ...

    @property
    def alignment(self) -> int:
        """Alignment in bytes of the start of every slab."""
        ...

    @property
    def movable(self) -> int:
        """Bytes of its slabs that `open` would move to host memory if the device lacks memory; 0 if it never does."""
        ...

    def open(self, nbytes: int, *, whole: bool) -> Slab:
        """Open a slab. `whole`: one lease will have all of it. Raises MemoryFull if the system refuses."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """What was tried on this machine, and whether it worked."""
        ...
