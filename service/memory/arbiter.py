"""Evicts when memory is needed: first our own leases in the order of policy.py, then neighbours on the same memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..errors import OnedeskError
from .budget import show
from .external_lease import ExternalLease
from .lease import Lease, Released
from .policy import due, eviction_order

if TYPE_CHECKING:
    from .pool import Pool

log = logging.getLogger(__name__)


class Neighbour(Protocol):
    """Another user of the same memory that frees on request: ComfyUI's models, a peer engine."""

    def could_free(self) -> int:
        """Bytes that it would free if asked for everything."""
        ...

    def free(self, nbytes: int) -> int:
        """Free about `nbytes`. Returns what it reports as freed."""
        ...


class Arbiter:
    """Asks owners to give leases back. It holds no lock meanwhile, because an owner then returns its leases."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._neighbours: list[Neighbour] = []
        self._promises: list[Callable[[], int]] = []

    def add_promise(self, promised: Callable[[], int]) -> None:
        """Count the bytes that `promised` returns as taken: another process was promised them and has not taken them
        yet.
        """
        with self._pool.lock:
            self._promises.append(promised)

    @property
    def promised(self) -> int:
        """Bytes promised to other processes and not yet taken."""
        return sum(promised() for promised in list(self._promises))

    def add_neighbour(self, neighbour: Neighbour) -> None:
        """Let `neighbour` be asked when the machine, not the budget, lacks memory."""
        with self._pool.lock:
            self._neighbours.append(neighbour)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """All neighbours."""
        with self._pool.lock:
            return tuple(self._neighbours)

    def neighbours_could_free(self) -> int:
        """Bytes that all neighbours together would free."""
        return sum(neighbour.could_free() for neighbour in list(self._neighbours))

    def make_room(self, lacking: int) -> list[Released]:
        """Evict until `lacking` more bytes can be leased. Returns what came back, which may be less.

        Cached pages of checkpoint files go first, then our own leases, because a neighbour's bytes help only if the
        machine lacks them. A lease in use or pinned is never asked. Stops when no lease and no neighbour is left.
        """
        room = self._pool.room()
        goal = room.now + lacking
        if room.machine < goal and self._pool.shares_host:
            self._pool.files.drop(goal - room.machine)  # cheaper to bring back than any lease
        released: list[Released] = []
        asked: set[Lease | ExternalLease] = set()
        while self._pool.room().now < goal:
            order = [
                lease for lease in eviction_order(self._pool.owners()) if lease.eviction.give_way and lease not in asked
            ]
            if not order:
                break
            asked.add(order[0])
            released += self._ask(order[0])
        for neighbour in list(self._neighbours):
            room = self._pool.room()
            if room.machine < goal <= room.budget:
                freed = neighbour.free(goal - room.machine)
                log.debug("a neighbour was asked for %s and freed %s", show(goal - room.machine), show(freed))
        return released

    def release_due(self, *, phase_over: bool = False) -> list[Released]:
        """Evict the leases whose policy says so now: ttl has run out, or phase when `phase_over`."""
        leases = [lease for lease in due(self._pool.owners(), phase_over=phase_over) if lease.eviction.give_way]
        return [released for lease in leases if not lease.released for released in self._ask(lease)]

    def _ask(self, lease: Lease | ExternalLease) -> list[Released]:
        """Ask the owner of one lease. A lease that became busy meanwhile keeps its bytes."""
        if lease.eviction.give_way is None:
            return []
        try:
            released = list(lease.eviction.give_way())
        except OnedeskError as error:
            log.info("%s is not evicted: %s", lease.title, error)
            return []
        self._pool.count("give_ways")
        return released
