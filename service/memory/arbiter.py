"""Who gives way when there is no room: our own leases in the order of policy.py, then the neighbours on the same memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..errors import OnedeskError
from .budget import show
from .external_lease import Entrusted
from .lease import Lease, Released
from .policy import due, order_of_giving_way

if TYPE_CHECKING:
    from .pool import Pool

log = logging.getLogger(__name__)


class Neighbour(Protocol):
    """Somebody else on the same memory that frees on request: ComfyUI's models, a peer engine."""

    def could_free(self) -> int:
        """Bytes that it would free if asked for everything."""
        ...

    def free(self, nbytes: int) -> int:
        """Free about `nbytes`; return what it says it freed."""
        ...


class Arbiter:
    """Asks owners to give way. Holds no lock while it asks, because an owner's answer is to return its leases."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._neighbours: list[Neighbour] = []
        self._promises: list[Callable[[], int]] = []

    def add_promise(self, promised: Callable[[], int]) -> None:
        """Count the bytes that `promised` says as taken: they were promised to another process, which has not taken them yet."""
        with self._pool.lock:
            self._promises.append(promised)

    @property
    def promised(self) -> int:
        """Bytes that other processes were promised and have not taken."""
        return sum(promised() for promised in list(self._promises))

    def add_neighbour(self, neighbour: Neighbour) -> None:
        """Let `neighbour` be asked when the machine, not the budget, lacks room."""
        with self._pool.lock:
            self._neighbours.append(neighbour)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Those that are asked."""
        with self._pool.lock:
            return tuple(self._neighbours)

    def neighbours_could_free(self) -> int:
        """Bytes that all neighbours together would free."""
        return sum(neighbour.could_free() for neighbour in list(self._neighbours))

    def make_room(self, lacking: int) -> list[Released]:
        """Ask until `lacking` more bytes can be leased; return what came back, which may be less.

        Our own leases go first, because a neighbour's bytes help only where the machine lacks them; a lease in use or pinned is never
        asked. Stops when nobody is left to ask.
        """
        goal = self._pool.room().now + lacking
        released: list[Released] = []
        asked: set[Lease | Entrusted] = set()
        while self._pool.room().now < goal:
            order = [lease for lease in order_of_giving_way(self._pool.owners()) if lease.terms.give_way and lease not in asked]
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
        """Ask those leases to give way whose policy says so now: ttl run out, or phase when `phase_over`."""
        leases = [lease for lease in due(self._pool.owners(), phase_over=phase_over) if lease.terms.give_way]
        return [released for lease in leases if not lease.released for released in self._ask(lease)]

    def _ask(self, lease: Lease | Entrusted) -> list[Released]:
        """Ask one lease's owner; one that turned busy meanwhile keeps its bytes."""
        if lease.terms.give_way is None:
            return []
        try:
            released = list(lease.terms.give_way())
        except OnedeskError as error:
            log.info("%s does not give way: %s", lease.title, error)
            return []
        self._pool.count("give_ways")
        return released
