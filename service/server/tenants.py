"""Leases of other processes on the same memory, such as an image server. A heartbeat keeps a lease alive."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import MemoryFull
from ..memory.budget import show
from ..memory.pool import Pool, Released
from .error_documents import ApiError

HEARTBEAT = 10.0  # default, in seconds
TENANTS_LIMIT = 64
# How often a waiting thread checks a tenant's bytes, and for how long at most: a load or a release waits for it.
_LOOK_SECONDS = 0.05
WAIT_SECONDS = 10.0


@dataclass(slots=True)
class Tenant:
    """A lease of another process: `nbytes` in total, of which it has reported `held` as taken. `asked` is what it
    should give back.
    """

    owner: str
    nbytes: int
    held: int
    heartbeat: float
    gives_way: bool
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    beat: float = field(default_factory=time.monotonic)
    asked: int = 0
    timer: asyncio.TimerHandle | None = None  # checks when the next heartbeat would be late
    silent: bool = False  # was asked and has sent no heartbeat since: no more waiting for it until it does

    @property
    def promised(self) -> int:
        """Bytes that it may still take."""
        return max(0, self.nbytes - self.held)

    def document(self) -> dict[str, Any]:
        """The document for its owner."""
        return {
            "id": self.key,
            "owner": self.owner,
            "bytes": self.nbytes,
            "held": self.held,
            "heartbeat": self.heartbeat,
            "asked": self.asked,
        }


class Tenants:
    """The tenants of one pool. The pool counts their promised bytes as taken and asks them to give way. Thread-safe."""

    def __init__(self, pool: Callable[[], Pool]) -> None:
        """`pool` is called when the first tenant registers."""
        self._find_pool = pool
        self._pool: Pool | None = None
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # two concurrent tenants must not be promised the same bytes
        self._tenants: dict[str, Tenant] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """The service is stopping: stop waiting for tenants."""
        self._stopped.set()

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def all(self) -> list[Tenant]:
        """All tenants, oldest first."""
        with self._lock:
            return list(self._tenants.values())

    def take(self, tenant: Tenant) -> list[Released]:
        """Free memory for a new tenant, by releasing our own owners if necessary; returns what they gave back.

        Raises MemoryFull with the figures if the machine has too little memory, ApiError 429 if there are too many
        tenants.
        """
        with self._taking:
            return self._take(tenant)

    def _take(self, tenant: Tenant) -> list[Released]:
        with self._lock:
            pool = self._pool
            if pool is None:
                pool = self._pool = self._find_pool()
                pool.arbiter.add_promise(self._promised)
                pool.arbiter.add_neighbour(self)
            if len(self._tenants) >= TENANTS_LIMIT:
                raise ApiError(
                    429,
                    f"{TENANTS_LIMIT} leases of other processes are open already; give one back",
                    code="too_many_leases",
                )
        room = pool.room()
        most = max(0, room.machine + room.yielding + room.neighbours)
        if tenant.promised > most:  # do not release anything in vain
            raise MemoryFull(
                f"{tenant.owner} asks for {show(tenant.promised)}, and the machine would have {show(most)} above the"
                " floor if everybody gave way who can; ask for less, or close other programs"
            )
        lacking = tenant.promised - room.machine
        released = pool.make_room(lacking) if lacking > 0 else []
        left = pool.room().machine
        if tenant.promised > left:
            raise MemoryFull(
                f"{tenant.owner} asks for {show(tenant.promised)}, and the machine has {show(max(0, left))} above the"
                " floor, now that everybody gave way who could; ask for less, or close other programs"
            )
        with self._lock:
            self._tenants[tenant.key] = tenant
        return released

    def tell(self, key: str, held: int | None, nbytes: int | None) -> Tenant:
        """A heartbeat: the bytes held now, and the new total if it has changed. Raises ApiError 404 for an unknown
        lease.
        """
        with self._lock:
            tenant = self._of(key)
            tenant.beat, tenant.silent = time.monotonic(), False
            tenant.nbytes = tenant.nbytes if nbytes is None else nbytes
            if held is not None:
                tenant.asked = max(0, tenant.asked - max(0, tenant.held - held))
                tenant.held = held
            return tenant

    def give_back(self, key: str) -> Tenant:
        """End the lease. Raises ApiError 404 for an unknown lease."""
        with self._lock:
            tenant = self._of(key)
            del self._tenants[key]
            return tenant

    def expire(self) -> list[Tenant]:
        """Remove tenants whose heartbeat is late; returns them."""
        now = time.monotonic()
        with self._lock:
            late = [tenant for tenant in self._tenants.values() if now - tenant.beat >= tenant.heartbeat]
            for tenant in late:
                del self._tenants[tenant.key]
            return late

    # Called by the pool

    def could_free(self) -> int:
        """Bytes held by tenants that can give way."""
        return sum(tenant.held for tenant in self.all if tenant.gives_way)

    def free(self, nbytes: int) -> int:
        """Ask tenants that can give way for about `nbytes`, and wait for each as `ask` does."""
        freed = 0
        for tenant in self.all:
            if tenant.gives_way and freed < nbytes:
                freed += self.ask(tenant, min(tenant.held, nbytes - freed))
        return freed

    def ask(self, tenant: Tenant, nbytes: int) -> int:
        """Ask one tenant, and wait until it has reported the release, for at most two heartbeats and WAIT_SECONDS;
        returns what it gave back. A tenant that stayed silent is still asked, but not waited for until its next
        heartbeat.
        """
        with self._lock:
            before, asked_at, waits = tenant.held, time.monotonic(), not tenant.silent
            tenant.asked = min(tenant.held, tenant.asked + nbytes)
        until = asked_at + min(2 * tenant.heartbeat, WAIT_SECONDS)
        while waits and tenant.key in self._tenants and tenant.held > before - nbytes and time.monotonic() < until:
            if self._stopped.wait(_LOOK_SECONDS):
                break
        with self._lock:
            if tenant.key not in self._tenants:
                return before
            tenant.silent = tenant.beat < asked_at
            return before - tenant.held

    def release(self, owner: str) -> list[Released]:
        """Ask every lease of an owner for all that it holds. The result is the increase of the machine's available
        memory.
        """
        released = []
        for tenant in self.all:
            if tenant.owner == owner and tenant.gives_way and self._pool is not None:
                began, before, asked = time.perf_counter(), self._pool.read_truth().available, tenant.held
                self.ask(tenant, asked)
                delta = self._pool.read_truth().available - before
                released.append(Released(owner, asked, max(0, min(asked, delta)), time.perf_counter() - began, delta))
        return released

    def rows(self) -> list[dict[str, Any]]:
        """Rows for /v1/memory; `idle` is the seconds since the last heartbeat."""
        now = time.monotonic()
        return [
            {
                "owner": tenant.owner,
                "kind": "other process",
                "bytes": tenant.nbytes,
                "held": tenant.held,
                "residency": self._pool.residency if self._pool else "host",
                "policy": "stay" if tenant.gives_way else "pinned",
                "idle": now - tenant.beat,
            }
            for tenant in self.all
        ]

    def _promised(self) -> int:
        return sum(tenant.promised for tenant in self.all)

    def _of(self, key: str) -> Tenant:
        if key not in self._tenants:
            raise ApiError(
                404, "there is no such lease; its heartbeat was late, or it was given back", code="unknown_lease"
            )
        return self._tenants[key]
