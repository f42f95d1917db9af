"""A lease: bytes that an owner holds for a purpose, until they are returned."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import MemoryFull, OnedeskError, RequestError
from .backends.protocol import Slab
from .guard_zones import BlockLayout
from .policy import STAY, Kind, Policy

if TYPE_CHECKING:
    import torch


class LeaseBusyError(RequestError):
    """A running generation uses the lease, so it cannot be returned now."""


class LeaseReturnedError(RequestError):
    """The lease was returned before. It can be neither used nor returned again."""


class LeaseDamagedError(OnedeskError):
    """Something wrote outside its own lease, or over a sealed one. The message names the lease."""


@dataclass(frozen=True, slots=True)
class Released:
    """What a return of bytes did.

    `asked`: bytes of the lease that were in memory and so could come back (untouched pages hold nothing). `measured`:
    how many of them are gone afterwards. `seconds`: duration of the whole return. `available_delta`: how much
    Truth.available rose meanwhile, None for a small lease. Every other process moves that figure too.
    """

    owner: str
    asked: int
    measured: int
    seconds: float
    available_delta: int | None = None

    @property
    def share(self) -> float:
        """measured / asked, or 1 if there was nothing to return."""
        return self.measured / self.asked if self.asked else 1.0


def carved_bytes(shape: Sequence[int], dtype: torch.dtype, *, align: int = 256) -> int:
    """Bytes that `Lease.carve` takes for a tensor, up to where the next one can start."""
    return -(-math.prod(shape) * dtype.itemsize // align) * align


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """Description of a lease. `idle`: seconds since its last use, 0 while in use."""

    owner: str
    kind: Kind
    nbytes: int
    residency: str
    policy: Policy
    idle: float
    in_use: bool
    cold: bool


GiveWay = Callable[[], Sequence[Released]]


@dataclass(frozen=True, slots=True)
class Eviction:
    """When the pool may evict a lease, and the owner's function that does it (None: never); see BaseLease.offer."""

    policy: Policy = STAY
    give_way: GiveWay | None = None
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a lease lies: its slab, the offset of its block in the slab, and the layout of the block."""

    slab: Slab
    block: int
    layout: BlockLayout
    residency: str

    @property
    def start(self) -> int:
        """Offset of the first byte of the lease in the slab."""
        return self.block + self.layout.front


_L = TypeVar("_L", bound="BaseLease")


class BaseLease:
    """What all leases share: an owner, a size in the budget, an eviction policy, and a count of users."""

    def __init__(self, lock: threading.RLock, owner: str, kind: Kind, nbytes: int) -> None:  # type: ignore[valid-type]
        self.owner = owner
        self.kind: Kind = kind
        self.nbytes = nbytes
        self.eviction = Eviction()
        self._lock = lock  # the pool's
        self._users = 0
        self._last_used = time.monotonic()

    @property
    def title(self) -> str:
        """Its name in messages."""
        raise NotImplementedError

    @property
    def residency(self) -> str:
        """Where its bytes live: device, host or process."""
        raise NotImplementedError

    @property
    def released(self) -> bool:
        """Whether it was returned."""
        raise NotImplementedError

    @property
    def policy(self) -> Policy:
        """When it may be evicted."""
        return self.eviction.policy

    @property
    def cold(self) -> bool:
        """Whether it only keeps a prefix for reuse."""
        return self.eviction.cold

    @property
    def in_use(self) -> bool:
        """Whether a generation uses it."""
        return self._users > 0

    @property
    def idle(self) -> float:
        """Seconds since its last use, 0 while in use."""
        return 0.0 if self._users else time.monotonic() - self._last_used

    def offer(self, give_way: GiveWay, *, policy: Policy = STAY, cold: bool = False) -> None:
        """Let the pool evict the lease when it needs the bytes, or when `policy` says so. Call it once the owner is
        ready.

        The pool calls `give_way` without a lock, from any thread, while the lease is not in use. `give_way` returns
        this lease and everything else that its owner then has no use for, and reports what came back. `cold` marks KV
        that only keeps a prefix for reuse.
        """
        with self._lock:
            self.eviction = Eviction(policy, give_way, cold)

    @contextmanager
    def using(self: _L, *, touch: bool = True) -> Iterator[_L]:
        """Mark the lease as in use for the block: no thread can return it. `touch` counts this as a use.

        Raises LeaseReturnedError after its return.
        """
        with self._lock:
            self._check_held()
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                if touch:
                    self._last_used = time.monotonic()

    def info(self) -> LeaseInfo:
        """Describe it."""
        return LeaseInfo(
            self.owner, self.kind, self.nbytes, self.residency, self.policy, self.idle, self.in_use, self.cold
        )

    def _check_held(self) -> None:
        """Raise LeaseReturnedError after its return."""
        raise NotImplementedError


class LeasePool(Protocol):
    """What a lease needs of its pool."""

    @property
    def lock(self) -> threading.RLock: ...  # type: ignore[valid-type]

    @property
    def debug(self) -> bool: ...

    def count_carve(self) -> None: ...

    def take_back(self, lease: Lease) -> Released: ...


class Lease(BaseLease):
    """Bytes of a slab of this process. Only Pool.lease makes one.

    Tensors carved from it stay readable after its return (zeros on the host), but no longer hold it.
    """

    def __init__(self, pool: LeasePool, owner: str, kind: Kind, nbytes: int, placement: Placement) -> None:
        super().__init__(pool.lock, owner, kind, nbytes)
        self.placement = placement
        self._pool = pool
        view = placement.slab.view(placement.start, nbytes)
        self.alive = view.alive
        self._tensor: torch.Tensor | None = view.tensor
        self._cursor = 0
        self._seal: int | None = None

    def __repr__(self) -> str:
        return f"Lease({self.title}, {self.nbytes} bytes{', returned' if self.released else ''})"

    @property
    def title(self) -> str:
        return f"{self.owner}'s {self.kind} lease"

    @property
    def residency(self) -> str:
        return self.placement.residency

    @property
    def released(self) -> bool:
        return self._tensor is None

    @property
    def free(self) -> int:
        """Bytes that are not carved yet."""
        return self.nbytes - self._cursor

    def carve(self, shape: Sequence[int], dtype: torch.dtype, *, align: int = 256) -> torch.Tensor:
        """Return the next part of the lease as a tensor. Its offset in the lease is a multiple of `align` bytes.

        The start of a lease is aligned to at least 256 bytes. The content is undefined (zeros in a new host lease).
        Raises MemoryFull if the lease has too little left, LeaseReturnedError after its return.
        """
        if align < 1 or align & (align - 1):
            raise RequestError(f"carve alignment is {align!r}; use a power of two")
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        with self._lock:
            tensor = self.tensor
            start = -(-self._cursor // align) * align
            if nbytes < 0 or start + nbytes > self.nbytes:
                raise MemoryFull(
                    f"{self.title} of {self.nbytes} bytes has {max(0, self.nbytes - start)} left, "
                    f"but {nbytes} are needed for shape {tuple(shape)}; lease what the plan of all its tensors needs"
                )
            self._cursor = start + nbytes
            self._pool.count_carve()
            return tensor[start : start + nbytes].view(dtype).view(tuple(shape))

    @property
    def tensor(self) -> torch.Tensor:
        """The whole lease as [nbytes] uint8. Raises LeaseReturnedError after its return."""
        tensor = self._tensor
        if tensor is None:
            raise LeaseReturnedError(f"{self.title} was returned; open the model again to use it")
        return tensor

    def populate(self) -> None:
        """Fault every page in now, so that no later access faults."""
        with self.using():
            self.placement.slab.populate(self.placement.start, self.nbytes)

    def advise(self, advice: str) -> bool:
        """Give the whole lease one of the backend's advices, reset on return. False if this
        machine does not take it.
        """
        with self.using():
            return self.placement.slab.advise(advice, self.placement.start, self.nbytes)

    def lock_pages(self) -> bool:
        """Lock its pages in memory. False if the system does not allow that much."""
        with self.using():
            return self.placement.slab.lock(self.placement.start, self.nbytes)

    def resident(self) -> int:
        """Bytes of it that are in memory now, 0 after its return. A return by another thread waits for this call."""
        with self._lock:
            return 0 if self.released else self.placement.slab.resident(self.placement.start, self.nbytes)

    def seal(self) -> None:
        """In debug mode, remember a checksum for Pool.verify and for the return. The owner
        promises not to write again.
        """
        if self._pool.debug:
            self._seal = self.checksum()

    def checksum(self) -> int:
        """A checksum of the whole content. Raises LeaseReturnedError after its return."""
        with self.using(touch=False):
            return self.placement.slab.checksum(self.placement.start, self.nbytes)

    def sealed_content_changed(self) -> bool:
        """Whether the content differs from the sealed one. False if it was never sealed."""
        return self._seal is not None and self.checksum() != self._seal

    def release(self) -> Released:
        """Return the bytes and measure what came back; see Pool.take_back.

        Raises LeaseReturnedError the second time, LeaseBusyError while it is in use.
        """
        return self._pool.take_back(self)

    def detach(self) -> None:
        """Only the pool calls this, under its lock: drop the bytes, or raise why they cannot be dropped."""
        if self._tensor is None:
            raise LeaseReturnedError(f"{self.title} was returned before; a lease is returned once")
        if self._users:
            raise LeaseBusyError(f"{self.title} is in use; let the generation finish or stop it, then return the lease")
        self._tensor = None

    def _check_held(self) -> None:
        _ = self.tensor
