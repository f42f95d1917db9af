"""What a backend is: it opens slabs, says what this machine can do, and measures what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Slab(Protocol):
    """A run of bytes on one memory. Offsets and lengths are bytes from its start."""

    @property
    def nbytes(self) -> int:
        """The slab's whole length."""
        ...

    def storage(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return [nbytes] uint8 over that part. It stays readable for as long as it or any view of it lives."""
        ...

    def viewed(self, storage: object) -> bool:
        """Say whether any tensor still lives on what `storage` returned (False where it cannot be known)."""
        ...

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring every page of that part in now, writable, so that later touches do not fault."""
        ...

    def resident(self, offset: int, nbytes: int) -> int:
        """Bytes of that part that are in memory at this moment, as exactly as this kind of memory can say."""
        ...

    def discard(self, offset: int, nbytes: int) -> None:
        """Give the bytes of that part back and reset its advice; the content is lost, views stay readable."""
        ...

    def checksum(self, offset: int, nbytes: int) -> int:
        """A number that changes when a byte of that part changes."""
        ...

    def close(self) -> None:
        """Give the whole slab back. Views that still live stay readable."""
        ...


class Backend(Protocol):
    """A kind of memory. `commits` says whether opening a slab takes its bytes at once (device blocks) or only when touched (mmap)."""

    @property
    def name(self) -> str: ...

    @property
    def commits(self) -> bool: ...

    @property
    def page(self) -> int:
        """Bytes of the smallest part that can be given back on its own; 0 if only whole slabs can."""
        ...

    def open(self, nbytes: int, *, whole: bool) -> Slab:
        """Open a slab; `whole` means one lease will have it all. Raises MemoryFull if the system refuses."""
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """What was tried on this machine and worked."""
        ...
