"""Leases of other processes, without a server: what threads that come at once are promised."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.budget import MemorySettings, PoolRoom
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.server.tenants import HEARTBEAT, Tenant, Tenants


def test_two_who_come_at_once_are_not_promised_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = read_truth("cpu")
    pool = Pool("cpu", MemorySettings(), lambda: truth)
    look = pool.room

    def slowly() -> PoolRoom:
        room = look()
        time.sleep(0.05)  # long enough for the other one to look before this one is written down
        return room

    monkeypatch.setattr(pool, "room", slowly)
    tenants, nbytes, together = Tenants(lambda: pool), pool.room().machine * 6 // 10, Barrier(2)

    def take(owner: str) -> str:
        together.wait()
        try:
            tenants.take(Tenant(owner, nbytes, 0, HEARTBEAT, False))
        except MemoryFull as full:
            return str(full)
        return "taken"

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(take, ("one", "two")))
    assert told.count("taken") == 1  # of one or the other
    assert sum(" asks for " in answer for answer in told) == 1
    assert len(tenants) == 1


def test_nobody_gives_way_for_what_the_machine_can_never_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
    asked: list[int] = []
    monkeypatch.setattr(pool, "make_room", asked.append)
    tenants = Tenants(lambda: pool)
    with pytest.raises(MemoryFull, match="if everybody gave way who can; ask for less"):
        tenants.take(Tenant("one", 2**50, 0, HEARTBEAT, False))
    assert (asked, len(tenants)) == ([], 0)


def test_owners_give_way_for_what_the_machine_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
    freed: list[int] = []
    monkeypatch.setattr(
        pool,
        "room",
        lambda: PoolRoom(budget=0, machine=100 + sum(freed), yielding=50, neighbours=0, used=50, available=0),
    )
    monkeypatch.setattr(pool, "make_room", freed.append)
    Tenants(lambda: pool).take(Tenant("one", 130, 0, HEARTBEAT, False))
    assert freed == [30]
