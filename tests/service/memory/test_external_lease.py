"""Bytes of a child process: counted once, evicted in the same order, and measured by the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import GIB, MIB, MemorySettings
from onedesk.service.memory.external_lease import ExternalLease
from onedesk.service.memory.lease import LeaseBusyError, LeaseReturnedError, Released
from onedesk.service.memory.policy import PINNED, Policy
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

LIMIT = 256 * MIB


class Machine:
    """1 GiB of memory, which simulated processes take and return."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.taken: dict[str, int] = {}
        self._real = read_truth()
        self.pool = Pool(
            "cpu", MemorySettings(limit_bytes=LIMIT, floor=64 * MIB, kept_back=0.0, initial_slab=4 * MIB), self.truth
        )

    def truth(self):
        available = GIB - sum(self.taken.values())
        return replace(self._real, total=2 * GIB, available=available, host_available=available, rule="MemAvailable")

    def start(self, name: str, nbytes: int, *, takes: int | None = None) -> ExternalLease:
        lease = self.pool.lease_external(name, nbytes, lambda: self.taken.get(name, 0), exact=self.exact)
        self.taken[name] = nbytes if takes is None else takes
        return lease

    def end(self, name: str) -> None:
        self.taken[name] = 0


def test_its_bytes_are_counted_once():
    machine = Machine()
    before = machine.pool.room()
    lease = machine.pool.lease_external("peer", 100 * MIB, lambda: machine.taken.get("peer", 0), exact=False)
    promised = machine.pool.room()
    machine.taken["peer"] = 60 * MIB
    half = machine.pool.room()
    assert before.budget - promised.budget == before.machine - promised.machine == 100 * MIB
    assert (half.budget, half.machine) == (promised.budget, promised.machine)
    assert lease.held() == 60 * MIB
    assert [(info.owner, info.nbytes, info.residency) for info in machine.pool.leases()] == [
        ("peer", 100 * MIB, "process")
    ]
    assert machine.pool.holders() == []


def test_a_release_is_measured_by_the_machine():
    machine = Machine()
    lease = machine.start("peer", 100 * MIB)
    released = lease.release(lambda: machine.end("peer"))
    assert (released.asked, released.measured, released.available_delta) == (100 * MIB, 100 * MIB, 100 * MIB)
    assert machine.pool.used() == 0
    assert machine.pool.counters().shortfalls == 0
    with pytest.raises(LeaseReturnedError, match="start it again"):
        lease.release(lambda: None)


def test_a_process_that_keeps_its_bytes_is_a_shortfall(monkeypatch, caplog):
    monkeypatch.setattr("onedesk.service.memory.external_lease._SETTLE_SECONDS", 0.0)
    machine = Machine()
    released = machine.start("peer", 100 * MIB).release(lambda: machine.taken.update(peer=40 * MIB))
    assert (released.asked, released.measured) == (100 * MIB, 60 * MIB)
    assert machine.pool.counters().shortfalls == 1
    assert "peer's process returned 60 MiB of 100 MiB (60 %)" in caplog.text


def test_exact_lease_ignores_other_processes():
    machine = Machine(exact=True)
    lease = machine.start("peer", 100 * MIB, takes=80 * MIB)

    def end() -> None:
        machine.taken.update(peer=10 * MIB, somebody=500 * MIB)

    released = lease.release(end)
    assert (released.asked, released.measured, released.available_delta) == (80 * MIB, 70 * MIB, -430 * MIB)


def test_ended_process_is_no_longer_counted():
    machine = Machine()
    lease = machine.start("peer", 100 * MIB)
    with lease.using():
        lease.process_ended()
        lease.process_ended()
        assert machine.pool.used() == 0
    with pytest.raises(LeaseReturnedError):
        lease.release(lambda: None)


def test_nothing_is_released_where_the_end_fails():
    machine = Machine()
    lease = machine.start("peer", 100 * MIB)

    def fail() -> None:
        raise MemoryFull("does not stop")

    with pytest.raises(MemoryFull, match="does not stop"):
        lease.release(fail)
    assert not lease.released
    assert machine.pool.used() == 100 * MIB


def test_external_lease_is_evicted_only_when_idle():
    machine = Machine()
    peer = machine.start("peer", 200 * MIB)
    peer.offer(lambda: [peer.release(lambda: machine.end("peer"))])
    with peer.using(), pytest.raises(MemoryFull, match="100 MiB"):
        machine.pool.lease("model", "weights", 100 * MIB)
    with peer.using(), pytest.raises(LeaseBusyError, match="is at work"):
        peer.release(lambda: None)
    lease = machine.pool.lease("model", "weights", 100 * MIB)
    assert peer.released
    lease.release()


def test_external_lease_evicts_others_but_not_pinned():
    machine = Machine()
    first = machine.start("first", 200 * MIB)
    first.offer(lambda: [first.release(lambda: machine.end("first"))], policy=PINNED)
    with pytest.raises(MemoryFull, match="memory for its process"):
        machine.pool.lease_external("second", 100 * MIB, lambda: 0, exact=False)
    first.offer(lambda: [first.release(lambda: machine.end("first"))])
    machine.pool.lease_external("second", 100 * MIB, lambda: 0, exact=False)
    assert first.released


def test_its_time_runs_out():
    machine = Machine()
    lease = machine.start("peer", 100 * MIB)
    lease.offer(lambda: [lease.release(lambda: machine.end("peer"))], policy=Policy("ttl", 0.0))
    assert [released.owner for released in machine.pool.arbiter.release_due()] == ["peer"]


class Household(RuleBasedStateMachine):
    """Leases and processes come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.processes: dict[str, ExternalLease] = {}
        self.leases = []
        self.count = 0

    @rule(nbytes=st.integers(1, 300), share=st.floats(0, 1))
    def start(self, nbytes: int, share: float) -> None:
        self.count += 1
        name = f"p{self.count}"
        try:
            made = self.machine.start(name, nbytes * MIB, takes=int(nbytes * MIB * share))
        except MemoryFull:
            return
        made.offer(lambda: self._end(name))
        self.processes[name] = made

    def _end(self, name: str) -> list[Released]:
        return [self.processes[name].release(lambda: self.machine.end(name))]

    @rule(nbytes=st.integers(1, 300))
    def lease(self, nbytes: int) -> None:
        try:
            self.leases.append(self.machine.pool.lease("model", "kv", nbytes * MIB))
        except MemoryFull:
            return

    @precondition(lambda self: self.leases)
    @rule()
    def give_back(self) -> None:
        self.leases.pop().release()

    @precondition(lambda self: any(not one.released for one in self.processes.values()))
    @rule()
    def end(self) -> None:
        self._end(next(name for name, one in self.processes.items() if not one.released))

    @invariant()
    def counted_once(self) -> None:
        pool = self.machine.pool
        alive = [one for one in self.processes.values() if not one.released]
        assert pool.used() == sum(one.nbytes for one in alive) + sum(lease.nbytes for lease in self.leases)
        assert pool.used() <= LIMIT
        assert sorted(info.owner for info in pool.leases() if info.residency == "process") == sorted(
            one.owner for one in alive
        )
        pool.verify()

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()


TestHousehold = Household.TestCase
TestHousehold.settings = hypothesis_settings(max_examples=20, stateful_step_count=20, deadline=None)
