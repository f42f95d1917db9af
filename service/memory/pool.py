"""The pool: one budget, and the leases that owners hold of it. It knows bytes and owners, not models."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core import CancelCheck
from ..errors import Cancelled, MemoryFull, OnedeskError, RequestError
from .arbiter import Arbiter, Neighbour
from .backends.choose_backend import choose_backend
from .backends.protocol import Backend, Returned
from .budget import (
    MIB,
    Budget,
    MemorySettings,
    Need,
    PoolRoom,
    explain_lease_refusal,
    explain_refusal,
    make_budget,
    show,
)
from .claims import Claims
from .counters import Counters
from .external_lease import ExternalLease
from .file_cache import FileCache
from .guard_zones import broken_zones, plan_layout, write_zones
from .lease import (
    Lease,
    LeaseBusyError,
    LeaseDamagedError,
    LeaseInfo,
    LeaseReturnedError,
    Placement,
    Released,
)
from .policy import KINDS, Kind, eviction_order
from .slabs import SlabBlock, SlabStore
from .truth import Truth

__all__ = [
    "Kind",
    "Lease",
    "LeaseBusyError",
    "LeaseDamagedError",
    "LeaseInfo",
    "LeaseReturnedError",
    "Neighbour",
    "Pool",
    "Released",
]

log = logging.getLogger(__name__)

# Longest wait of a new load in seconds while memory is short or the machine throttles. Then it goes on, or is refused.
_ADMISSION = 2.0
_TURN = 0.05
# From this size on, a lease reads the machine's available memory first (about 0.2 ms). Smaller ones live within the
# headroom.
_LOOK = MIB


class Pool:
    """All bytes that Onedesk may hold on one device. Every method may be called from any thread.

    Invariants, checked by `verify`: the bytes of the leases never exceed the spendable bytes of the budget; every lease
    lies in exactly one block and no two leases share a byte; at most one empty slab is kept, and none that holds
    memory.
    """

    def __init__(
        self,
        device: str,
        settings: MemorySettings,
        truth_reader: Callable[[], Truth],
        claims: Claims | None = None,
        slow: Callable[[], bool] | None = None,
    ) -> None:
        """Make the budget from what is available now, less what `claims` know. New loads wait while `slow()` is true
        (MemoryWatch.slow); without it they never wait.

        Raises RequestError if this machine cannot meet the settings.
        """
        self.device = device
        self.settings = settings
        self.read_truth = truth_reader
        self.claims = claims or Claims(device, None)
        self.budget: Budget = self._size(settings, own=0)
        self.lock = threading.RLock()
        self.allocations = 0
        self.backend: Backend = choose_backend(device, managed=settings.managed, oversubscribe=settings.oversubscribe)
        self._store = SlabStore(self.backend, settings, self.lock)
        self._leases: dict[Lease, SlabBlock] = {}
        self._external: list[ExternalLease] = []
        self._returning: dict[Lease, SlabBlock] = {}
        self._used = 0
        self.arbiter = Arbiter(self)
        # The checkpoint files that stay in the page cache.
        self.files = FileCache(self._cache_room)
        self.slow = slow or (lambda: False)
        self._loading = threading.RLock()
        self._loaders = 0
        self._counts: dict[str, int] = dict.fromkeys(("releases", "shortfalls", "give_ways", "refusals", "damaged"), 0)
        self.seconds = 0.0  # inside lease()

    # State

    @property
    def residency(self) -> str:
        """Where the leases of this pool live: device or host."""
        return self.backend.residency

    @property
    def shares_host(self) -> bool:
        """Whether leases take host memory: on a CPU and an integrated GPU."""
        return not self.backend.commits or self.read_truth().integrated

    @property
    def loading(self) -> bool:
        """Whether a load runs now. The watch polls more often then."""
        return self._loaders > 0

    def used(self) -> int:
        """Bytes that all leases hold."""
        return self._used

    def held(self) -> int:
        """Bytes of all slabs. On the host these are addresses, and pages only where leases were touched."""
        return self._store.held

    def fragmentation(self) -> float:
        """Share of the held bytes, 0 to 1, in free blocks too small for an average lease."""
        return self._store.fragmentation()

    def counters(self) -> Counters:
        """Counts since the pool was made."""
        with self.lock:
            return Counters(allocations=self.allocations, seconds=self.seconds, **self._counts)

    def holders(self) -> list[Lease]:
        """All leases in the memory of this process, oldest first."""
        with self.lock:
            return list(self._leases)

    def owners(self) -> list[Lease | ExternalLease]:
        """All leases, including those of other processes."""
        with self.lock:
            return [*self._leases, *self._external]

    def leases(self) -> list[LeaseInfo]:
        """Describe all leases."""
        return [lease.info() for lease in self.owners()]

    def room(self) -> PoolRoom:
        """What could be leased now: within the budget, of the machine's memory, and of both after evicting everything
        evictable.
        """
        neighbours = self.arbiter.neighbours_could_free()
        with self.lock:
            yielding = [lease for lease in eviction_order(self.owners()) if lease.eviction.give_way is not None]
            machine, available = self._machine_room()
            return PoolRoom(
                budget=self.budget.spendable - self._used,
                machine=machine,
                yielding=sum(lease.nbytes for lease in yielding),
                neighbours=neighbours,
                used=self._used,
                available=available,
            )

    def check(self, owner: str, need: Need) -> None:
        """Raise MemoryFull unless `need` with its headroom fits, if necessary after evicting everything evictable.

        The message has every figure and a choice that would fit. Takes nothing and frees nothing.
        """
        room = self.room()
        if need.with_headroom(self.settings.headroom) > room.most:
            self.count("refusals")
            raise MemoryFull(explain_refusal(owner, need, self.settings, self.budget, room))

    # Leasing

    def lease(self, owner: str, kind: Kind, nbytes: int, *, align: int = 64) -> Lease:
        """Lease `nbytes` for `owner`, if necessary after evicting other leases.

        The start is aligned to `align`, and at least as a weight tensor needs. The lease stays until its owner returns
        it or makes it evictable with `offer`. Raises MemoryFull with the figures if it does not fit, RequestError for a
        wrong kind, size or alignment.
        """
        self._check_request(owner, kind, nbytes, align)
        started = time.perf_counter()
        try:
            self._free_pages(nbytes)
            for last in (False, True):
                with self.lock:
                    lacking = self._lacking(nbytes)
                    lease = self._allocate(owner, kind, nbytes, align, last=last) if lacking <= 0 else None
                if lease is not None:
                    return self._locked_in(lease)
                if not last:
                    self.make_room(lacking if lacking > 0 else nbytes)
        finally:
            with self.lock:
                self.seconds += time.perf_counter() - started
        self.count("refusals")
        raise MemoryFull(explain_lease_refusal(owner, kind, nbytes, self.budget, self.room()))

    def lease_external(self, owner: str, nbytes: int, held: Callable[[], int], *, exact: bool) -> ExternalLease:
        """Count `nbytes` that a child process is about to take, if necessary after evicting other leases; see
        ExternalLease for `held` and `exact`.

        Raises MemoryFull with the figures if it does not fit.
        """
        for last in (False, True):
            with self.lock:
                lacking = self._lacking(nbytes)
                if lacking <= 0:
                    external = ExternalLease(self, owner, nbytes, held, exact=exact)
                    self._external.append(external)
                    self._used += nbytes
                    return external
            if not last:
                self.make_room(lacking)
        self.count("refusals")
        raise MemoryFull(explain_lease_refusal(owner, "memory for its process", nbytes, self.budget, self.room()))

    def forget(self, lease: ExternalLease) -> None:
        """Only ExternalLease calls this, under the lock: its bytes are back."""
        self._external.remove(lease)
        self._used -= lease.nbytes
        self._counts["releases"] += 1

    def make_room(self, lacking: int) -> list[Released]:
        """Evict leases until `lacking` more bytes can be leased; see Arbiter.make_room."""
        return self.arbiter.make_room(lacking)

    @contextmanager
    def loads(self, owner: str, cancel: CancelCheck | None = None) -> Iterator[None]:
        """Wait until no other load runs, then hold the turn: two loads that size themselves at once would count the
        same bytes twice.

        Waits up to 2 s more while `slow()`. Raises Cancelled if `cancel()` turns true while waiting.
        """
        while not self._loading.acquire(timeout=_TURN):
            if cancel is not None and cancel():
                raise Cancelled(f"{owner} was stopped while it waited for another model to load")
        with self.lock:
            self._loaders += 1
        try:
            self._wait_for_admission(owner, cancel)
            yield
        finally:
            with self.lock:
                self._loaders -= 1
            self._loading.release()

    def resize(self, settings: MemorySettings) -> Budget:
        """Set new shares, floor and limits of the budget, counting leased bytes as available. Slab sizes stay.

        Raises RequestError if the new budget would be below what is leased.
        """
        budget = self._size(settings, own=self._resident())
        with self.lock:
            if budget.spendable < self._used:
                raise RequestError(
                    f"the new memory budget has {show(budget.spendable)} to lease (limit {show(budget.limit)}, "
                    f"kept back {show(budget.kept_back)}), but {show(self._used)} are leased now; release a model first"
                )
            self.settings, self.budget = settings, budget
        return budget

    # Returning

    def take_back(self, lease: Lease) -> Released:
        """Return a lease's bytes to the system and measure what came back. Lease.release calls it.

        On the host the measure is exact: mincore over the pages of the lease, before and after. MemAvailable moves with
        every other process and lags, so its change is only reported (`available_delta`). On a device it is the driver's
        free figure, or torch's reserve on an integrated GPU. Less than 98 % (settings.shortfall) of what was asked is a
        warning that names the owner, and a counter. Raises LeaseReturnedError the second time, LeaseBusyError while it
        is in use.
        """
        started = time.perf_counter()
        if self.settings.debug and not lease.released:
            self._inspect(lease)
        with self.lock:
            lease.detach()
            block = self._returning[lease] = self._leases.pop(lease)
        before = self._available(lease.nbytes)
        try:
            returned = self._store.give_back(block, lease)
        finally:
            with self.lock:
                del self._returning[lease]
                self._used -= lease.nbytes
                self._counts["releases"] += 1
        after = self._available(lease.nbytes)
        delta = None if before is None or after is None else after - before
        return self.report(lease, returned, delta, time.perf_counter() - started)

    def verify(self) -> None:
        """Check the invariants of the pool, and in debug mode the guard zones and the seals.

        Raises LeaseDamagedError naming every overwritten lease, BrokenInvariantError if the bookkeeping is wrong.
        """
        with self.lock:
            self._store.check(self._leases, settled=not self._returning)
            damage = [words for lease in self._leases for words in self._damage(lease)]
        if damage:
            self.count("damaged", len(damage))
            raise LeaseDamagedError(
                "; ".join(damage) + "; a writer went outside its lease: run doctor --check on the model in debug mode"
            )

    @property
    def debug(self) -> bool:
        """Whether leases have guard zones and seals."""
        return self.settings.debug

    def count_carve(self) -> None:
        """Only Lease calls this, under the lock: a carved tensor is an allocation too."""
        self.allocations += 1

    # Internals

    def _size(self, settings: MemorySettings, *, own: int) -> Budget:
        truth = self.read_truth()
        return self.claims.size(truth, lambda promised: make_budget(truth, settings, own=own, promised=promised))

    def _wait_for_admission(self, owner: str, cancel: CancelCheck | None) -> None:
        end = time.monotonic() + _ADMISSION
        while self.slow() and time.monotonic() < end:
            if cancel is not None and cancel():
                raise Cancelled(f"{owner} was stopped while it waited for memory, or for the machine to cool down")
            time.sleep(_TURN)

    def _check_request(self, owner: str, kind: Kind, nbytes: int, align: int) -> None:
        if kind not in KINDS:
            raise RequestError(f"lease kind is {kind!r}; use one of {', '.join(KINDS)}")
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise RequestError(f"{owner} asks for a lease of {nbytes!r} bytes; use a whole number from 1")
        if align < 1 or align & (align - 1) or align > self.backend.alignment:
            raise RequestError(f"lease alignment is {align!r}; use a power of two up to {self.backend.alignment}")

    def _lacking(self, nbytes: int) -> int:
        """Bytes that must come free before `nbytes` fit; 0 or less if they fit now."""
        lacking = self._used + nbytes - self.budget.spendable
        return max(lacking, nbytes - self._machine_room()[0]) if nbytes >= _LOOK else lacking

    def _machine_room(self) -> tuple[int, int]:
        """The machine's memory for new leases above the floor, and its available memory.

        An untouched leased page still counts as available, so leased but untouched bytes are subtracted.
        """
        truth, promised = self.read_truth(), self.arbiter.promised
        if self.backend.commits:
            aside = min(self.backend.movable, max(0, truth.host_available - self.budget.floor))
            ours = self._store.held + self._elsewhere()
            return truth.available - self.budget.floor + ours - self._used + aside - promised, truth.available
        available = min(truth.available, truth.host_available)
        return available - self.budget.floor - (self._used - self._resident()) - promised, available

    def _free_pages(self, nbytes: int) -> None:
        """On an integrated GPU drop cached file pages that the block needs: its driver has refused blocks while the
        page cache held many GiB.
        """
        if nbytes < _LOOK or not self.backend.commits:
            return
        truth = self.read_truth()
        if truth.integrated and truth.mem_free < nbytes:
            self.files.drop(nbytes - truth.mem_free)

    def _cache_room(self) -> int:
        """Host memory above the floor that no lease counts on."""
        with self.lock:
            if self.shares_host:
                return self._machine_room()[0]
            return self.read_truth().host_available - self.budget.floor

    def _allocate(self, owner: str, kind: Kind, nbytes: int, align: int, *, last: bool) -> Lease | None:
        """Place a lease. None if the system refuses, but on the `last` try its refusal is raised."""
        whole = (
            self.backend.page if nbytes >= self.backend.page > 0 else 1
        )  # whole pages, so that all of it can be returned
        align = max(align, self.settings.weight_align, whole)
        layout = plan_layout(nbytes, align, self.settings.guard if self.settings.debug else 0, whole)
        try:
            block = self._store.allocate(layout.total, align, self.budget.spendable - self._store.held)
        except MemoryFull:
            if last:
                raise
            return None
        lease = Lease(self, owner, kind, nbytes, Placement(block.slab, block.offset, layout, self.residency))
        write_zones(block.slab, block.offset, layout)
        self._leases[lease] = block
        self._used += nbytes
        self.allocations += 1
        return lease

    def _locked_in(self, lease: Lease) -> Lease:
        """The lease, locked in memory if the settings say so for its kind."""
        if self.settings.lock and lease.kind == "weights" and not self.backend.commits and not lease.lock_pages():
            log.warning(
                "%s of %s cannot be locked in memory: raise the limit of this user (ulimit -l, LimitMEMLOCK), "
                "or remove lock = true from [memory]",
                lease.title,
                show(lease.nbytes),
            )
        return lease

    def _inspect(self, lease: Lease) -> None:
        """Check guard zones and seal before the return. Damage is logged and does not stop the return."""
        for words in self._damage(lease):
            self.count("damaged")
            log.error("%s", words)

    def _damage(self, lease: Lease) -> list[str]:
        placement = lease.placement
        words = [
            f"the guard zone {zone} {lease.title} was overwritten"
            for zone in broken_zones(placement.slab, placement.block, placement.layout)
        ]
        if lease.sealed_content_changed():
            words.append(f"{lease.title} was overwritten: its checksum changed since it was sealed")
        return words

    def report(self, lease: Lease | ExternalLease, returned: Returned, delta: int | None, seconds: float) -> Released:
        """Only this room calls it: log a return, and warn if it falls short."""
        asked, measured = min(returned.asked, lease.nbytes), min(returned.measured, lease.nbytes)
        released = Released(lease.owner, asked, measured, seconds, delta)
        log.debug(
            "%s returned: asked %d, measured %d bytes, available %s, %.4f s",
            lease.title,
            asked,
            measured,
            delta,
            seconds,
        )
        if measured < (1 - self.settings.shortfall) * asked:
            self.count("shortfalls")
            log.warning(
                "%s returned %s of %s (%.0f %%): something still holds the rest, such as a live tensor or locked pages",
                lease.title,
                show(measured),
                show(asked),
                released.share * 100,
            )
        return released

    def _available(self, nbytes: int) -> int | None:
        """Available memory for judging a return of `nbytes`; None if that is too small, or nothing can be read."""
        if nbytes < _LOOK:
            return None
        try:
            return self.read_truth().available
        except OnedeskError as error:
            log.warning("the truth cannot be read while a lease is returned: %s", error)
            return None

    def _resident(self) -> int:
        return self._elsewhere() + sum(
            lease.placement.slab.resident(lease.placement.start, lease.nbytes) for lease in self.holders()
        )

    def _elsewhere(self) -> int:
        """Bytes that child processes have taken."""
        return sum(external.held() for external in list(self._external))

    def count(self, name: str, by: int = 1) -> None:
        """Only this room calls it: add to one of Counters."""
        with self.lock:
            self._counts[name] += by
