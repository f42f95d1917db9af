"""The pool: one budget, and the leases that owners hold of it. Knows bytes and owners, not models."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import MemoryFull, RequestError
from .backends.cuda import CudaBackend
from .backends.mapped import MappedBackend
from .backends.protocol import Backend, Slab
from .budget import Budget, MemorySettings, Need, make_budget, show
from .truth import Truth

log = logging.getLogger(__name__)

Kind = Literal["weights", "kv", "state", "scratch", "table"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Released:
    """What a return of bytes did: bytes asked for, bytes measured to be back, seconds it took."""

    owner: str
    asked: int
    measured: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as others see it; `idle` is seconds since it was last used, 0 while it is in use."""

    owner: str
    kind: Kind
    nbytes: int
    residency: str
    idle: float
    in_use: bool


class Lease:
    """Bytes held by an owner for a purpose. Made by Pool.lease only."""

    def __init__(self, pool: Pool, owner: str, kind: Kind, nbytes: int, slab: Slab) -> None:
        self.owner = owner
        self.kind: Kind = kind
        self.nbytes = nbytes
        self._pool = pool
        self._slab = slab
        self._storage: torch.Tensor | None = slab.storage(0, nbytes)
        self._cursor = 0
        self._users = 0
        self._last_used = time.monotonic()

    @property
    def released(self) -> bool:
        """Whether the bytes have been returned."""
        return self._storage is None

    def carve(self, shape: Sequence[int], dtype: torch.dtype, *, align: int = 256) -> torch.Tensor:
        """Return the next unused part of the lease as a tensor of `shape` and `dtype`, its start aligned to `align` bytes.

        The content is whatever the bytes hold. Raises MemoryFull if the lease has not that much left, RequestError if it was returned.
        """
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        with self._pool.lock:
            if self._storage is None:
                raise RequestError(f"{self.owner}'s {self.kind} lease was returned; nothing can be carved from it")
            start = -(-self._cursor // align) * align
            if start + nbytes > self.nbytes:
                raise MemoryFull(
                    f"{self.owner}'s {self.kind} lease of {self.nbytes} bytes has {max(0, self.nbytes - start)} left, {nbytes} are needed"
                )
            self._cursor = start + nbytes
            self._pool.allocations += 1
            return self._storage[start : start + nbytes].view(dtype).view(tuple(shape))

    def populate(self) -> None:
        """Bring every page in now, so that later touches do not fault."""
        self._slab.populate(0, self.nbytes)

    @contextmanager
    def using(self) -> Iterator[Lease]:
        """Hold the lease in use: it cannot be returned meanwhile."""
        with self._pool.lock:
            if self._storage is None:
                raise RequestError(f"{self.owner}'s {self.kind} lease was returned; it cannot be used")
            self._users += 1
        try:
            yield self
        finally:
            with self._pool.lock:
                self._users -= 1
                self._last_used = time.monotonic()

    def release(self) -> Released:
        """Return the bytes and measure what came back."""
        return self._pool.take_back(self)

    def info(self) -> LeaseInfo:
        """Describe the lease."""
        idle = 0.0 if self._users else time.monotonic() - self._last_used
        return LeaseInfo(self.owner, self.kind, self.nbytes, self._pool.residency, idle, self._users > 0)


class Pool:
    """All bytes that Onedesk may hold on one device. Every method may be called from any thread."""

    def __init__(self, device: str, settings: MemorySettings, truth_reader: Callable[[], Truth]) -> None:
        self.device = device
        self.settings = settings
        self.read_truth = truth_reader
        self.lock = threading.RLock()
        self.allocations = 0
        self.budget: Budget = make_budget(truth_reader(), settings)
        self._backend: Backend = MappedBackend() if torch.device(device).type == "cpu" else CudaBackend(device)
        self._leases: list[Lease] = []

    @property
    def residency(self) -> str:
        """Where this pool's leases live."""
        return "host" if self._backend.name == "mmap" else "device"

    def used(self) -> int:
        """Bytes that all leases hold."""
        with self.lock:
            return sum(lease.nbytes for lease in self._leases)

    def leases(self) -> list[LeaseInfo]:
        """Describe all leases, oldest first."""
        with self.lock:
            return [lease.info() for lease in self._leases]

    def check(self, owner: str, need: Need) -> None:
        """Raise MemoryFull, with every figure, unless `need` and its headroom fit beside what is leased now."""
        wanted = need.with_headroom(self.settings.headroom)
        used = self.used()
        truth = self.read_truth()
        room = min(self.budget.spendable - used, truth.available - self.budget.floor)
        if wanted > room:
            raise MemoryFull(
                f"{owner} needs {show(wanted)} (weights {show(need.weights)}, KV {show(need.kv)}, scratch {show(need.scratch)}, "
                f"{self.settings.headroom:.0%} headroom), but the pool has room for {show(max(0, room))}: limit {show(self.budget.limit)}, "
                f"kept back {show(self.budget.kept_back)}, used {show(used)}, available {show(truth.available)}; "
                "choose a smaller context, int4, or another model"
            )

    def lease(self, owner: str, kind: Kind, nbytes: int, *, align: int = 64) -> Lease:
        """Lease `nbytes` for `owner`. Raises MemoryFull if the budget has not that much left."""
        if kind not in KINDS:
            raise RequestError(f"lease kind is {kind!r}; use one of {', '.join(KINDS)}")
        if nbytes < 1:
            raise RequestError(f"a lease of {nbytes} bytes was asked for; use at least 1")
        with self.lock:
            used = self.used()
            if used + nbytes > self.budget.spendable:
                raise MemoryFull(
                    f"{owner} asks for {show(nbytes)} of {kind}, but {show(used)} of {show(self.budget.spendable)} are leased; "
                    "release a model or choose a smaller context"
                )
            lease = Lease(self, owner, kind, nbytes, self._backend.open(nbytes, whole=True))
            self._leases.append(lease)
            self.allocations += 1
            return lease

    def take_back(self, lease: Lease) -> Released:
        """Return a lease's bytes to the system and measure it."""
        with self.lock:
            if lease.released:
                raise RequestError(f"{lease.owner}'s {lease.kind} lease was returned before; it cannot be returned twice")
            if lease._users:
                raise RequestError(f"{lease.owner}'s {lease.kind} lease is in use by a running generation; stop it first")
            started = time.monotonic()
            held = lease._slab.resident(0, lease.nbytes)
            lease._storage = None
            lease._slab.discard(0, lease.nbytes)
            left = lease._slab.resident(0, lease.nbytes)
            lease._slab.close()
            self._leases.remove(lease)
            return Released(lease.owner, held, held - left, time.monotonic() - started)
