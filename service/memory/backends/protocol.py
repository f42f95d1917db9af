"""What a backend is: it opens slabs, says what this machine can do, and measures what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SlabView:
    """A part of a slab as [nbytes] uint8. `alive` says whether any tensor still lives on it; None where that cannot be known."""

    tensor: torch.Tensor
    alive: Callable[[], bool] | None


@dataclass(frozen=True, slots=True)
class Returned:
    """Bytes that were in memory before and could go back (`asked`), and of those the bytes that are gone after (`measured`)."""

    asked: int
    measured: int


class Slab(Protocol):
    """A run of bytes on one memory. Offsets and lengths are bytes from its start; all calls may come from any thread."""

    @property
    def nbytes(self) -> int:
        """The slab's whole length."""
        ...

    def view(self, offset: int, nbytes: int) -> SlabView:
        """Return that part as a tensor; it stays readable for as long as it or any view of it lives."""
        ...

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring every page of that part in now, writable, so that later touches do not fault."""
        ...

    def advise(self, advice: str, offset: int, nbytes: int) -> bool:
        """Give one of the advices that `capabilities` names; False if this memory or kernel does not take it."""
        ...

    def lock(self, offset: int, nbytes: int) -> bool:
        """Keep that part from being paged out; False if the system does not allow it."""
        ...

    def resident(self, offset: int, nbytes: int) -> int:
        """Bytes of that part that are in memory at this moment, as exactly as this kind of memory can say."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy that part out."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Copy `data` in."""
        ...

    def checksum(self, offset: int, nbytes: int) -> int:
        """A number that changes when a byte of that part changes."""
        ...

    def give_back(self, offset: int, nbytes: int) -> Returned:
        """Give the bytes of that part back and reset its advice. The content is lost; views of it stay readable."""
        ...

    def close(self) -> Returned:
        """Give the whole slab back. Views that still live stay readable."""
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
        """Whether opening a slab takes its bytes at once (device blocks) or each page when it is touched (mmap)."""
        ...

    @property
    def page(self) -> int:
        """Bytes of the smallest part that can be given back on its own; 0 if only whole slabs can."""
        ...

    @property
    def alignment(self) -> int:
        """What the start of every slab is aligned to, in bytes."""
        ...

    @property
    def movable(self) -> int:
        """Bytes of its slabs that `open` would move into the host's memory where the device lacks room; 0 if it never does."""
        ...

    def open(self, nbytes: int, *, whole: bool) -> Slab:
        """Open a slab; `whole` means that one lease will have all of it. Raises MemoryFull if the system refuses."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """What was tried on this machine, and whether it worked."""
        ...
