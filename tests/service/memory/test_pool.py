"""The pool over this machine's real memory: leasing, carving, returning, refusing, and views
that outlive their lease.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from onedesk.service.errors import MemoryFull, RequestError
from onedesk.service.memory.budget import GIB, KIB, MIB, MemorySettings, Need
from onedesk.service.memory.lease import LeaseBusyError, LeaseReturnedError
from onedesk.service.memory.policy import KINDS, PINNED
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import Truth, read_truth

MakePool = Callable[..., Pool]


@pytest.fixture
def pool(make_pool: MakePool) -> Iterator[Pool]:
    pool = make_pool()
    yield pool
    pool.verify()


def test_a_lease_is_counted_and_comes_back(pool: Pool):
    lease = pool.lease("writer", "weights", 8 * MIB)
    assert pool.used() == lease.nbytes == 8 * MIB
    assert pool.allocations == 1
    (info,) = pool.leases()
    assert (info.owner, info.kind, info.nbytes, info.residency) == ("writer", "weights", 8 * MIB, "host")
    assert str(info.policy) == "stay"
    lease.populate()
    assert lease.resident() == 8 * MIB
    released = lease.release()
    assert (released.owner, released.asked, released.measured) == ("writer", 8 * MIB, 8 * MIB)
    assert released.seconds > 0
    assert released.share == 1
    assert pool.used() == pool.held() == 0
    assert lease.resident() == 0
    assert pool.counters().releases == 1
    assert pool.counters().shortfalls == 0


def test_the_process_really_shrinks(make_pool: MakePool):
    pool = make_pool(limit_bytes=GIB)
    lease = pool.lease("writer", "weights", 256 * MIB)
    lease.tensor.fill_(1)
    full = psutil.Process().memory_info().rss
    released = lease.release()
    assert released.measured >= 0.98 * 256 * MIB
    assert full - psutil.Process().memory_info().rss >= 0.98 * 256 * MIB
    assert released.available_delta is not None


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 64 * KIB, 100 * KIB + 3, MIB, 3 * MIB + 5])
def test_every_size_comes_back_whole(pool: Pool, nbytes: int):
    neighbour = pool.lease("other", "kv", 10_000)
    neighbour.tensor.fill_(7)
    lease = pool.lease("writer", "kv", nbytes)
    lease.tensor.fill_(1)
    released = lease.release()
    assert released.measured == released.asked
    assert released.asked == (nbytes if nbytes >= 4096 else 0)
    assert torch.all(neighbour.tensor == 7)
    neighbour.release()


def test_what_was_never_touched_cannot_come_back(pool: Pool):
    lease = pool.lease("writer", "kv", 16 * MIB)
    lease.tensor[: 4 * MIB].fill_(1)
    released = lease.release()
    assert released.asked == released.measured == 4 * MIB
    assert pool.counters().shortfalls == 0


def test_small_leases_share_a_slab(pool: Pool):
    small = [pool.lease("a", "state", 10_000) for _ in range(5)]
    assert pool.held() == 4 * MIB
    large = pool.lease("a", "weights", 2 * MIB)
    assert pool.held() == 6 * MIB
    large.release()
    assert pool.held() == 4 * MIB
    more = [pool.lease("a", "kv", 1000 * KIB) for _ in range(6)]
    assert pool.held() == 8 * MIB
    for lease in [*small, *more]:
        lease.release()
    assert pool.held() <= 4 * MIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("align", [1, 64, 256, 4096])
def test_starts_are_aligned(pool: Pool, kind: str, align: int):
    sizes = (1, 777, 5000, MIB + 1)
    leases = [pool.lease("a", kind, nbytes, align=align) for nbytes in sizes]  # type: ignore[arg-type]
    for lease in leases:
        assert lease.tensor.data_ptr() % max(align, 256) == 0
        lease.release()


def test_carving(pool: Pool):
    lease = pool.lease("a", "weights", 4096)
    first = lease.carve((3, 5), torch.float32)
    second = lease.carve((7,), torch.bfloat16)
    third = lease.carve((2,), torch.int64, align=64)
    empty = lease.carve((0, 4), torch.float16)
    scalar = lease.carve((), torch.float64)
    assert (first.shape, first.dtype) == ((3, 5), torch.float32)
    assert (second.shape, scalar.shape, empty.shape) == ((7,), (), (0, 4))
    assert first.data_ptr() == lease.tensor.data_ptr()
    assert second.data_ptr() - first.data_ptr() == 256
    assert third.data_ptr() - second.data_ptr() == 64
    assert pool.allocations == 1 + 5
    first.fill_(1)
    second.fill_(2)
    third.fill_(3)
    assert (first.sum().item(), second.sum().item(), third.sum().item()) == (15, 14, 6)
    assert 0 < lease.free < 4096


@pytest.mark.parametrize(
    ("shape", "align", "error", "words"),
    [
        (
            (1025,),
            256,
            MemoryFull,
            "writer's kv lease of 4096 bytes has 4096 left, but 4100 are needed for shape (1025,)",
        ),
        ((1 << 62, 4), 256, MemoryFull, "are needed"),
        ((-1,), 256, MemoryFull, "are needed"),
        ((1,), 48, RequestError, "carve alignment is 48; use a power of two"),
        ((1,), 0, RequestError, "carve alignment is 0"),
    ],
)
def test_wrong_carving_is_refused(pool: Pool, shape: tuple[int, ...], align: int, error: type[Exception], words: str):
    lease = pool.lease("writer", "kv", 4096)
    with pytest.raises(error) as caught:
        lease.carve(shape, torch.float32, align=align)
    assert words in str(caught.value)
    assert lease.free == 4096
    lease.release()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "cache", 10), "lease kind is 'cache'; use one of weights, kv, state, scratch, table"),
        (("a", "kv", 0), "a lease of 0 bytes"),
        (("a", "kv", -4), "a lease of -4 bytes"),
        (("a", "kv", 1.5), "a lease of 1.5 bytes"),
        (("a", "kv", True), "a lease of True bytes"),
    ],
)
def test_wrong_leases_are_refused(pool: Pool, arguments: tuple[object, ...], words: str):
    with pytest.raises(RequestError) as caught:
        pool.lease(*arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    for align in (0, 3, 8192):
        with pytest.raises(RequestError, match="lease alignment"):
            pool.lease("a", "kv", 10, align=align)
    assert pool.used() == 0


def test_a_lease_is_returned_once(pool: Pool):
    lease = pool.lease("writer", "kv", 4096)
    lease.release()
    with pytest.raises(LeaseReturnedError, match="writer's kv lease was returned before; a lease is returned once"):
        lease.release()
    with pytest.raises(LeaseReturnedError, match="open the model again"):
        lease.carve((1,), torch.uint8)
    with pytest.raises(LeaseReturnedError), lease.using():
        pass
    assert pool.counters().releases == 1


def test_a_lease_in_use_is_not_returned(pool: Pool):
    lease = pool.lease("writer", "weights", 2 * MIB)
    lease.tensor.fill_(5)
    with lease.using():
        assert lease.info().in_use
        assert lease.idle == 0
        with lease.using(), pytest.raises(LeaseBusyError, match="writer's weights lease is in use"):
            lease.release()
        with pytest.raises(LeaseBusyError):
            lease.release()
        assert torch.all(lease.tensor == 5)
    assert not lease.info().in_use
    assert lease.release().measured == 2 * MIB


def test_views_of_returned_lease_read_zeros(pool: Pool):
    lease = pool.lease("old", "kv", 100_000)
    view = lease.carve((1000,), torch.float32)
    view.fill_(3)
    lease.release()
    assert view.abs().sum().item() == 0
    newer = [pool.lease("new", "kv", 100_000) for _ in range(30)]
    for lease in newer:
        lease.tensor.fill_(1)
    view.fill_(9)
    assert all(torch.all(lease.tensor == 1) for lease in newer)
    pool.verify()
    where = view.data_ptr()
    del view
    gc.collect()
    again = pool.lease("newest", "kv", 100_000)
    assert again.tensor.data_ptr() == where  # the block is free again: the last view has died
    for lease in [*newer, again]:
        lease.release()


def test_a_view_of_a_large_lease_outlives_it(pool: Pool):
    lease = pool.lease("old", "weights", 8 * MIB)
    view = lease.carve((1024, 1024), torch.float32)
    view.fill_(3)
    assert lease.release().measured == 4 * MIB
    del lease
    gc.collect()
    assert view.sum().item() == 0
    assert torch.mm(view[:4], view).sum().item() == 0


def test_a_shortfall_is_a_warning_with_the_owners_name(pool: Pool, caplog: pytest.LogCaptureFixture):
    """Pages locked by another user cannot be dropped, and the measure shows it."""
    lease = pool.lease("greedy writer", "kv", 16 * KIB)
    lease.populate()
    libc, address = ctypes.CDLL(None), lease.tensor.data_ptr()
    assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(4096)) == 0
    with caplog.at_level(logging.WARNING):
        released = lease.release()
    assert (released.asked, released.measured) == (16 * KIB, 0)
    assert pool.counters().shortfalls == 1
    assert "greedy writer's kv lease returned 0 B of 16 KiB (0 %)" in caplog.text
    assert libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(4096)) == 0


def test_locked_pages_of_our_own_come_back(pool: Pool):
    lease = pool.lease("writer", "weights", 32 * KIB)
    lease.populate()
    assert lease.lock_pages() == pool.backend.capabilities()["mlock"]
    assert lease.release().measured == 32 * KIB


def test_a_truth_that_breaks_does_not_keep_a_lease(make_pool: MakePool, caplog: pytest.LogCaptureFixture):
    pool = make_pool()
    lease = pool.lease("writer", "weights", 2 * MIB)
    lease.populate()
    pool.read_truth = lambda: read_truth(proc=Path("/nowhere"))
    with caplog.at_level(logging.WARNING):
        released = lease.release()
    assert (released.measured, released.available_delta, pool.used()) == (2 * MIB, None, 0)
    assert "the truth cannot be read while a lease is returned: meminfo cannot be read" in caplog.text


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that covers an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first:
            low, _, high = first.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def test_advice_is_reset_when_a_lease_is_returned(pool: Pool):
    lease, neighbour = (pool.lease("reader", "table", 64 * KIB) for _ in range(2))
    address = lease.tensor.data_ptr()
    assert lease.advise("random")
    assert "rr" in flags_of(address)
    assert "rr" not in flags_of(neighbour.tensor.data_ptr())
    lease.release()
    assert "rr" not in flags_of(address)
    neighbour.release()


def test_the_budget_is_never_exceeded(pool: Pool):
    spendable = pool.budget.spendable
    assert spendable == 256 * MIB - int(256 * MIB * 0.05)
    lease = pool.lease("a", "weights", spendable - MIB)
    with pytest.raises(MemoryFull) as caught:
        pool.lease("b", "kv", 2 * MIB)
    for figure in (
        "b asks for 2 MiB of kv",
        "1 MiB can be leased",
        "limit 256 MiB",
        "kept back 12.8 MiB",
        "used 242.2 MiB",
        "floor 64 MiB",
    ):
        assert figure in str(caught.value)
    pool.lease("b", "kv", MIB).release()
    lease.release()
    assert pool.counters().refusals == 1


def test_oversized_need_is_refused_before_leasing(pool: Pool):
    pool.check("small", Need(weights=100 * MIB, kv=50 * MIB))
    with pytest.raises(MemoryFull) as caught:
        pool.check("large", Need(weights=150 * MIB, kv=100 * MIB, scratch=MIB, context=4096))
    assert "large needs 301.2 MiB" in str(caught.value)
    assert "a context of" in str(caught.value)
    assert pool.used() == pool.allocations == 0
    assert pool.counters().refusals == 1


def poor_truth(available: int) -> Truth:
    """A machine of 16 GiB with `available` bytes left."""
    return Truth(
        total=16 * GIB,
        available=available,
        device_free=None,
        integrated=False,
        page_cache=0,
        mem_free=available,
        psi_some_avg10=None,
        host_available=available,
        swap_free=0,
        cgroup_limit=None,
        rule="MemAvailable",
    )


def test_machine_shortage_is_refused_within_budget():
    """Others took the memory after the pool was made: the budget would allow it, the machine does not."""
    readings = iter([poor_truth(8 * GIB)])
    pool = Pool("cpu", MemorySettings(limit=0.5), lambda: next(readings, poor_truth(600 * MIB)))
    assert pool.room().budget > 3 * GIB
    assert pool.room().machine == 88 * MIB
    with pytest.raises(MemoryFull, match="available 600 MiB"):
        pool.lease("a", "weights", 89 * MIB)
    lease = pool.lease("a", "weights", 80 * MIB)
    with pytest.raises(MemoryFull, match="8 MiB can be leased"):
        pool.lease("b", "weights", 9 * MIB)
    lease.release()


def test_untouched_leases_are_promised():
    """Untouched pages still count as available. The pool subtracts them until they are touched."""
    pool = Pool("cpu", MemorySettings(), lambda: poor_truth(8 * GIB))
    before = pool.room().machine
    lease = pool.lease("a", "kv", 64 * MIB)
    assert pool.room().machine == before - 64 * MIB
    lease.populate()
    assert pool.room().machine == before  # this reading is constant; a real one has fallen by now
    lease.release()
    assert pool.room().machine == before


def test_resizing(pool: Pool):
    lease = pool.lease("a", "weights", 100 * MIB)
    with pytest.raises(RequestError) as caught:
        pool.resize(MemorySettings(limit_bytes=64 * MIB, floor=64 * MIB))
    assert "60.8 MiB to lease" in str(caught.value)
    assert "100 MiB are leased now" in str(caught.value)
    assert pool.budget.limit == 256 * MIB
    assert pool.resize(MemorySettings(limit_bytes=128 * MIB, floor=64 * MIB)).limit == 128 * MIB
    with pytest.raises(MemoryFull):
        pool.lease("a", "kv", 40 * MIB)
    lease.release()


def test_pinned_pages_and_policies_are_shown(pool: Pool):
    lease = pool.lease("a", "kv", 4096)
    lease.offer(lambda: [lease.release()], policy=PINNED, cold=True)
    (info,) = pool.leases()
    assert info.policy == PINNED
    assert info.cold
    assert "a's kv lease, 4096 bytes" in repr(lease)
    lease.release()
    assert "returned" in repr(lease)


def test_many_cycles_leave_the_process_as_it_was(make_pool: MakePool):
    pool = make_pool()

    def cycle() -> None:
        leases = [
            pool.lease("writer", kind, nbytes)
            for kind, nbytes in (("weights", 48 * MIB), ("kv", 8 * MIB), ("state", 50_000))
        ]
        for lease in leases:
            lease.carve((lease.nbytes,), torch.uint8).fill_(1)
        for lease in leases:
            assert lease.release().share == 1

    for _ in range(5):
        cycle()
    before = psutil.Process().memory_info().rss
    for _ in range(30):
        cycle()
    assert psutil.Process().memory_info().rss - before <= 8 * MIB
    assert pool.counters().shortfalls == 0
