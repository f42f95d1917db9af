"""A lease: bytes held by an owner for a purpose, until they are returned."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import MemoryFull, OnedeskError, RequestError
from .backends.protocol import Slab
from .guard import Layout
from .policy import STAY, Kind, Policy

if TYPE_CHECKING:
    import torch


class LeaseBusyError(RequestError):
    """The lease is in use by a running generation, so it cannot be returned now."""


class LeaseReturnedError(RequestError):
    """The lease was returned before; it can be neither used nor returned again."""


class LeaseDamagedError(OnedeskError):
    """Somebody wrote outside a lease of theirs, or over a sealed one; the message names the lease."""


@dataclass(frozen=True, slots=True)
class Released:
    """What a return of bytes did.

    `asked`: bytes of the lease that were in memory and so could come back (pages never touched hold nothing). `measured`: bytes of
    them that are gone after. `seconds`: the whole return. `available_delta`: what Truth.available rose by meanwhile, None for a small
    lease; every other process moves it too.
    """

    owner: str
    asked: int
    measured: int
    seconds: float
    available_delta: int | None = None

    @property
    def share(self) -> float:
        """measured / asked; 1 if there was nothing to return."""
        return self.measured / self.asked if self.asked else 1.0


def carved_bytes(shape: Sequence[int], dtype: torch.dtype, *, align: int = 256) -> int:
    """Bytes that `Lease.carve` takes for a tensor, up to where the next one can start."""
    return -(-math.prod(shape) * dtype.itemsize // align) * align


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as others see it; `idle` is seconds since it was last used, 0 while it is in use."""

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
class Terms:
    """What an owner agrees to: when it gives way, and how; see Lease.offer."""

    policy: Policy = STAY
    give_way: GiveWay | None = None
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lease lies: its slab, the block's offset there, and the block's layout."""

    slab: Slab
    block: int
    layout: Layout
    residency: str

    @property
    def start(self) -> int:
        """Offset of the lease's first byte in the slab."""
        return self.block + self.layout.front


class Keeper(Protocol):
    """What a lease needs of its pool."""

    @property
    def lock(self) -> threading.RLock: ...  # type: ignore[valid-type]

    @property
    def debug(self) -> bool: ...

    def count_carve(self) -> None: ...

    def take_back(self, lease: Lease) -> Released: ...


class Lease:
    """Made by Pool.lease only. Tensors carved from it stay readable after its return (zeros on the host), but no longer hold it."""

    def __init__(self, keeper: Keeper, owner: str, kind: Kind, nbytes: int, place: Place) -> None:
        self.owner = owner
        self.kind: Kind = kind
        self.nbytes = nbytes
        self.place = place
        self.terms = Terms()
        self._keeper = keeper
        part = place.slab.part(place.start, nbytes)
        self.alive = part.alive
        self._tensor: torch.Tensor | None = part.tensor
        self._cursor = 0
        self._users = 0
        self._last_used = time.monotonic()
        self._seal: int | None = None

    def __repr__(self) -> str:
        return f"Lease({self.title}, {self.nbytes} bytes{', returned' if self.released else ''})"

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"{self.owner}'s {self.kind} lease"

    @property
    def released(self) -> bool:
        """Whether it has been returned."""
        return self._tensor is None

    @property
    def policy(self) -> Policy:
        """When it gives way."""
        return self.terms.policy

    @property
    def cold(self) -> bool:
        """Whether it only keeps a prefix for reuse."""
        return self.terms.cold

    @property
    def in_use(self) -> bool:
        """Whether a generation holds it."""
        return self._users > 0

    @property
    def idle(self) -> float:
        """Seconds since it was last used, 0 while it is in use."""
        return 0.0 if self._users else time.monotonic() - self._last_used

    @property
    def free(self) -> int:
        """Bytes that have not been carved yet."""
        return self.nbytes - self._cursor

    def carve(self, shape: Sequence[int], dtype: torch.dtype, *, align: int = 256) -> torch.Tensor:
        """Return the next part of the lease as a tensor of `shape` and `dtype`, its offset in the lease a multiple of `align` bytes.

        The start of a lease is aligned to at least 256 bytes. The content is whatever the bytes hold (zeros in a new host lease).
        Raises MemoryFull if the lease has not that much left, LeaseReturnedError after its return.
        """
        if align < 1 or align & (align - 1):
            raise RequestError(f"carve alignment is {align!r}; use a power of two")
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        with self._keeper.lock:
            tensor = self.tensor
            start = -(-self._cursor // align) * align
            if nbytes < 0 or start + nbytes > self.nbytes:
                raise MemoryFull(
                    f"{self.title} of {self.nbytes} bytes has {max(0, self.nbytes - start)} left, but {nbytes} are needed for shape "
                    f"{tuple(shape)}; lease what the plan of all its tensors needs"
                )
            self._cursor = start + nbytes
            self._keeper.count_carve()
            return tensor[start : start + nbytes].view(dtype).view(tuple(shape))

    @property
    def tensor(self) -> torch.Tensor:
        """The whole lease as [nbytes] uint8. Raises LeaseReturnedError after its return."""
        tensor = self._tensor
        if tensor is None:
            raise LeaseReturnedError(f"{self.title} was returned; open the model again to use it")
        return tensor

    def offer(self, give_way: GiveWay, *, policy: Policy = STAY, cold: bool = False) -> None:
        """Let the pool ask for the lease when others need the room, or when `policy` says so; call it when the owner is ready for that.

        `give_way` is called without any lock, from any thread, while the lease is not in use. It returns this lease, and what else its
        owner then has no use for, and says what came back. `cold` marks KV that only keeps a prefix for reuse.
        """
        with self._keeper.lock:
            self.terms = Terms(policy, give_way, cold)

    def populate(self) -> None:
        """Bring every page in now, so that no later touch faults."""
        with self.using():
            self.place.slab.populate(self.place.start, self.nbytes)

    def advise(self, advice: str) -> bool:
        """Give the whole lease one of the backend's advices; it is reset on return. False if this machine does not take it."""
        with self.using():
            return self.place.slab.advise(advice, self.place.start, self.nbytes)

    def lock_pages(self) -> bool:
        """Keep it from being paged out; False if the system does not allow so much."""
        with self.using():
            return self.place.slab.lock(self.place.start, self.nbytes)

    def resident(self) -> int:
        """Bytes of it that are in memory now; 0 after its return. A return by another thread waits for the look, and is never refused."""
        with self._keeper.lock:
            return 0 if self.released else self.place.slab.resident(self.place.start, self.nbytes)

    def seal(self) -> None:
        """In debug mode remember a checksum of the content for Pool.verify and for the return; the owner promises not to write again."""
        if self._keeper.debug:
            self._seal = self.checksum()

    def checksum(self) -> int:
        """A number over the whole content. Raises LeaseReturnedError after its return."""
        with self.using(touch=False):
            return self.place.slab.checksum(self.place.start, self.nbytes)

    def sealed_content_changed(self) -> bool:
        """Whether the content differs from what was sealed; False if it was never sealed."""
        return self._seal is not None and self.checksum() != self._seal

    @contextmanager
    def using(self, *, touch: bool = True) -> Iterator[Lease]:
        """Hold the lease in use: until the block ends it cannot be returned, by any thread. `touch` counts it as used now."""
        with self._keeper.lock:
            _ = self.tensor
            self._users += 1
        try:
            yield self
        finally:
            with self._keeper.lock:
                self._users -= 1
                if touch:
                    self._last_used = time.monotonic()

    def release(self) -> Released:
        """Return the bytes and measure what came back; see Pool.take_back.

        Raises LeaseReturnedError the second time, LeaseBusyError while it is in use.
        """
        return self._keeper.take_back(self)

    def detach(self) -> None:
        """Pool only, under its lock: let go of the bytes, or say why they cannot be taken."""
        if self._tensor is None:
            raise LeaseReturnedError(f"{self.title} was returned before; a lease is returned once")
        if self._users:
            raise LeaseBusyError(f"{self.title} is in use; let the generation finish or stop it, then return the lease")
        self._tensor = None

    def info(self) -> LeaseInfo:
        """Describe it."""
        return LeaseInfo(self.owner, self.kind, self.nbytes, self.place.residency, self.policy, self.idle, self.in_use, self.cold)
