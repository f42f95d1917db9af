"""The pool from several threads at once, and another thread that wants a lease in use."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import KIB, MIB
from onedesk.service.memory.lease import LeaseBusyError, LeaseReturnedError
from onedesk.service.memory.pool import Pool

MakePool = Callable[..., Pool]


def test_many_threads_lease_write_and_return(make_pool: MakePool):
    pool = make_pool(debug=True, own_slab=256 * KIB)

    def work(number: int) -> int:
        dice, done, live = random.Random(number), 0, []
        for _ in range(60):
            if live and dice.random() < 0.5:
                lease = live.pop(dice.randrange(len(live)))
                assert torch.all(lease.tensor == number)
                assert lease.release().measured >= 0
                done += 1
            else:
                lease = pool.lease(f"owner {number}", "kv", dice.randrange(1, 600 * KIB))
                lease.tensor.fill_(number)
                lease.carve((1,), torch.uint8)
                live.append(lease)
            pool.leases(), pool.used(), pool.held(), pool.fragmentation()
        pool.verify()
        for lease in live:
            assert torch.all(lease.tensor == number)
            lease.release()
        return done + len(live)

    with ThreadPoolExecutor(4) as threads:
        released = sum(threads.map(work, range(1, 5)))
    pool.verify()
    assert pool.used() == 0
    assert pool.leases() == []
    assert pool.counters().releases == released
    assert pool.allocations == 2 * released
    assert pool.counters().damaged == 0


def test_threads_together_never_exceed_the_budget(make_pool: MakePool):
    pool = make_pool(limit_bytes=64 * MIB, kept_back=0.0)
    barrier = threading.Barrier(4)

    def grab(number: int) -> int:
        barrier.wait(30)
        taken = 0
        for _ in range(10):
            try:
                pool.lease(f"owner {number}", "weights", 3 * MIB)
                taken += 1
            except MemoryFull:
                break
        return taken

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(grab, range(4))) == 64 // 3
    assert pool.used() == 63 * MIB
    assert max(info.nbytes for info in pool.leases()) == 3 * MIB


def test_one_lease_is_returned_by_one_thread_only(make_pool: MakePool):
    pool = make_pool()
    for _ in range(20):
        lease = pool.lease("writer", "kv", 64 * KIB)
        barrier = threading.Barrier(4)

        def give_back(_: int, lease: object = lease, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(30)
            try:
                lease.release()  # type: ignore[attr-defined]
            except LeaseReturnedError:
                return False
            return True

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(give_back, range(4))) == 1
    assert pool.used() == 0


def test_lease_cannot_be_returned_in_mid_generation(make_pool: MakePool):
    pool = make_pool()
    lease = pool.lease("writer", "weights", 2 * MIB)
    lease.tensor.fill_(4)
    inside, done = threading.Event(), threading.Event()

    def generate() -> bool:
        with lease.using():
            inside.set()
            assert done.wait(30)
            return bool(torch.all(lease.tensor == 4))

    with ThreadPoolExecutor(1) as threads:
        generation = threads.submit(generate)
        assert inside.wait(30)
        with pytest.raises(LeaseBusyError, match="let the generation finish or stop it"):
            lease.release()
        done.set()
        assert generation.result(30)
    assert lease.release().measured == 2 * MIB


def test_a_look_at_a_lease_never_stops_its_return(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch):
    """Counting resident bytes meanwhile, as another model's leak report does, must not leave a model half returned."""
    pool = make_pool()
    lease = pool.lease("writer", "scratch", 2 * MIB)
    lease.tensor.fill_(1)
    slab_type = type(lease.placement.slab)
    resident, looking, asked = slab_type.resident, threading.Event(), threading.Event()

    def slow(*arguments: object) -> int:
        if threading.current_thread().name.startswith("look"):
            looking.set()
            assert asked.wait(30)
            time.sleep(0.05)  # long enough for the return to meet the count
        return resident(*arguments)

    def give_back() -> int:
        assert looking.wait(30)
        asked.set()
        return lease.release().asked

    monkeypatch.setattr(slab_type, "resident", slow)
    with ThreadPoolExecutor(1, "look") as looker, ThreadPoolExecutor(1, "return") as owner:
        look, back = looker.submit(lease.resident), owner.submit(give_back)
        assert back.result(30) == 2 * MIB
        assert look.result(30) in (0, 2 * MIB)
    assert lease.resident() == 0
    assert pool.used() == 0


def test_mutual_eviction_does_not_deadlock(make_pool: MakePool):
    """Each thread's lease evicts the other's. The second one is served by the return of the first."""
    pool = make_pool(limit_bytes=64 * MIB, kept_back=0.0)

    def alternate(number: int) -> int:
        served = 0
        for _ in range(20):
            try:
                lease = pool.lease(f"owner {number}", "weights", 40 * MIB)
            except MemoryFull:
                continue
            lease.offer(lambda lease=lease: [lease.release()])
            served += 1
        return served

    with ThreadPoolExecutor(2) as threads:
        served = list(threads.map(alternate, range(2)))
    assert sum(served) >= 1
    pool.verify()
    assert pool.used() in (0, 40 * MIB)
