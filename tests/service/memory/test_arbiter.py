"""Eviction on a real pool: the order, who is never asked, due policies, neighbours, one load at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from onedesk.service.errors import Cancelled, MemoryFull
from onedesk.service.memory import pool as pool_module
from onedesk.service.memory.budget import GIB, MIB, MemorySettings, Need
from onedesk.service.memory.lease import Lease, Released
from onedesk.service.memory.policy import PHASE, PINNED, STAY, Kind, Policy
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import Truth, read_truth


class Owner:
    """Holds one lease, returns it when asked, and records the request."""

    def __init__(
        self,
        pool: Pool,
        asked: list[str],
        name: str,
        kind: Kind = "weights",
        policy: Policy = STAY,
        *,
        cold: bool = False,
    ) -> None:
        self.name, self.asked = name, asked
        self.lease: Lease = pool.lease(name, kind, 40 * MIB)
        self.lease.offer(self.give_way, policy=policy, cold=cold)

    def give_way(self) -> list[Released]:
        self.asked.append(self.name)
        return [self.lease.release()]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(kept_back=0.0)


def test_eviction_in_order_and_no_more_than_needed(pool: Pool):
    asked: list[str] = []
    Owner(pool, asked, "weights")
    Owner(pool, asked, "kv", "kv")
    Owner(pool, asked, "prefix", "kv", cold=True)
    Owner(pool, asked, "scratch", "scratch")
    Owner(pool, asked, "pinned", policy=PINNED)
    assert pool.room().budget == 56 * MIB
    assert pool.room().yielding == 160 * MIB
    lease = pool.lease("new", "weights", 130 * MIB)
    assert asked == ["scratch", "prefix"]
    assert pool.used() == (256 - 56 + 130 - 80) * MIB
    assert pool.counters().give_ways == 2
    lease.release()


def test_the_least_recently_used_weights_go_first(pool: Pool):
    asked: list[str] = []
    owners = [Owner(pool, asked, name) for name in ("first", "second", "third")]
    with owners[0].lease.using():
        pass
    pool.lease("new", "weights", 200 * MIB).release()
    assert asked == ["second", "third"]
    assert not owners[0].lease.released


def test_a_lease_in_use_is_never_asked(pool: Pool):
    asked: list[str] = []
    owner = Owner(pool, asked, "writing")
    with owner.lease.using(), pytest.raises(MemoryFull, match="216 MiB can be leased"):
        pool.lease("new", "weights", 230 * MIB)
    assert asked == []
    pool.lease("new", "weights", 230 * MIB).release()
    assert asked == ["writing"]


def test_busy_owner_is_skipped(pool: Pool):
    asked: list[str] = []
    busy = pool.lease("busy", "scratch", 40 * MIB)
    Owner(pool, asked, "idle")

    def give_way_while_used() -> list[Released]:
        with busy.using():
            return [busy.release()]

    busy.offer(give_way_while_used)
    pool.lease("new", "weights", 200 * MIB).release()
    assert asked == ["idle"]
    assert not busy.released
    assert pool.counters().give_ways == 1


def test_a_lease_that_was_not_offered_stays(pool: Pool):
    pool.lease("silent", "scratch", 100 * MIB)
    assert pool.room().yielding == 0
    with pytest.raises(MemoryFull):
        pool.lease("new", "weights", 200 * MIB)
    assert pool.used() == 100 * MIB


def test_check_counts_evictable_without_evicting(pool: Pool):
    asked: list[str] = []
    for name in ("a", "b", "c", "d"):
        Owner(pool, asked, name)
    pool.check("new", Need(weights=210 * MIB))
    with pytest.raises(MemoryFull) as caught:
        pool.check("new", Need(weights=220 * MIB))
    assert "of which 160 MiB would give way" in str(caught.value)
    assert asked == []


def test_ttl_and_phase_are_due(pool: Pool):
    asked: list[str] = []
    Owner(pool, asked, "stays")
    Owner(pool, asked, "phase", policy=PHASE)
    Owner(pool, asked, "hour", policy=Policy("ttl", 3600))
    Owner(pool, asked, "moment", policy=Policy("ttl", 0))
    (released,) = pool.arbiter.release_due()
    assert (released.owner, asked) == ("moment", ["moment"])
    assert [released.owner for released in pool.arbiter.release_due(phase_over=True)] == ["phase"]
    assert pool.arbiter.release_due(phase_over=True) == []


class ImageSide:
    """Stands in for ComfyUI: holds bytes outside the pool and frees them when asked."""

    def __init__(self, held: int) -> None:
        self.held, self.asked = held, []

    def could_free(self) -> int:
        return self.held

    def free(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        freed = min(self.held, nbytes)
        self.held -= freed
        return freed


def test_a_neighbour_frees_what_the_machine_lacks():
    image = ImageSide(3 * GIB)
    real = read_truth()

    def truth() -> Truth:
        left = 4 * GIB - image.held
        return replace(real, total=8 * GIB, available=left, host_available=left)

    settings = MemorySettings(limit_bytes=GIB // 2, floor=512 * MIB)
    pool = Pool("cpu", settings, truth)
    pool.arbiter.add_neighbour(image)
    assert pool.room().machine == 512 * MIB
    image.held += 400 * MIB
    assert pool.room().machine == 112 * MIB
    assert pool.room().most == min(pool.budget.spendable, 4 * GIB - 512 * MIB)
    pool.check("writer", Need(weights=300 * MIB))
    lease = pool.lease("writer", "weights", 300 * MIB)
    assert image.asked == [188 * MIB]
    with pytest.raises(MemoryFull):  # the budget is what lacks now: no neighbour can help
        pool.lease("writer", "kv", 300 * MIB)
    assert len(image.asked) == 1
    lease.release()


def test_one_tenant_loads_at_a_time(pool: Pool):
    assert not pool.loading
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with pool.loads("second"):
            order.append("second")

    with pool.loads("first"):
        assert pool.loading
        thread = threading.Thread(target=second)
        thread.start()
        assert started.wait(10)
        thread.join(0.2)
        order.append("first")
        with pool.loads("first again"):
            order.append("nested")
    thread.join(10)
    assert order == ["first", "nested", "second"]
    assert not pool.loading


def test_waiting_for_the_turn_can_be_cancelled(pool: Pool):
    caught: list[Exception] = []

    def second() -> None:
        try:
            with pool.loads("second", cancel=lambda: True):
                raise AssertionError("the turn was taken")
        except Cancelled as error:
            caught.append(error)

    with pool.loads("first"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
    assert "second was stopped while it waited" in str(caught[0])
    with pool.loads("third"):
        assert pool.loading


def test_load_waits_while_slow_but_not_forever(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    answers = [True, True, False]
    pool.slow = lambda: answers.pop(0)
    with pool.loads("first"):
        assert answers == []
        assert pool.loading
    monkeypatch.setattr(pool_module, "_ADMISSION", 0.1)
    asked: list[bool] = []

    def always() -> bool:
        asked.append(True)
        return True

    pool.slow = always
    with pool.loads("second"):
        assert len(asked) >= 2
    with (
        pytest.raises(Cancelled, match="third was stopped while it waited for memory, or for the machine to cool down"),
        pool.loads("third", cancel=lambda: True),
    ):
        raise AssertionError("the load went on")
    assert not pool.loading


def test_bytes_promised_to_other_process_are_not_leased(pool: Pool):
    reading = pool.read_truth()
    pool.read_truth = lambda: reading  # other processes move the real figures meanwhile
    before = pool.room()
    promised = 64 * GIB
    pool.arbiter.add_promise(lambda: promised)
    assert pool.room().machine == before.machine - 64 * GIB
    assert (pool.room().budget, pool.room().available) == (before.budget, before.available)
    with pytest.raises(MemoryFull):
        pool.lease("new", "weights", MIB)
    promised = 0
    pool.lease("new", "weights", MIB).release()
