"""Debug mode: guard zones and seals name the lease that was overwritten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from onedesk.service.memory.budget import KIB, MIB
from onedesk.service.memory.guard_zones import plan_layout
from onedesk.service.memory.lease import LeaseDamagedError
from onedesk.service.memory.pool import Pool


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Iterator[Pool]:
    pool = make_pool(debug=True)
    yield pool
    assert pool.used() == 0


def raw(lease: object, before: int, after: int) -> torch.Tensor:
    """The bytes around a lease, which a faulty kernel could write to."""
    placement = lease.placement  # type: ignore[attr-defined]
    start, nbytes = placement.start - before, before + lease.nbytes + after  # type: ignore[attr-defined]
    return placement.slab.view(start, nbytes).tensor


@pytest.mark.parametrize("nbytes", [1, 100, 10_000, 2 * MIB + 100])
@pytest.mark.parametrize("zone", ["before", "after"])
def test_a_write_past_either_end_is_named(pool: Pool, nbytes: int, zone: str, caplog: pytest.LogCaptureFixture):
    other = pool.lease("innocent", "kv", nbytes)
    lease = pool.lease("session 2", "kv", nbytes)
    lease.tensor.fill_(0xA5)
    other.tensor.fill_(0)
    pool.verify()
    raw(lease, 16, 16)[0 if zone == "before" else -1] ^= 1
    with pytest.raises(LeaseDamagedError) as caught:
        pool.verify()
    assert f"the guard zone {zone} session 2's kv lease was overwritten" in str(caught.value)
    assert "innocent" not in str(caught.value)
    assert pool.counters().damaged == 1
    with caplog.at_level(logging.ERROR):
        lease.release()
    assert f"the guard zone {zone} session 2's kv lease was overwritten" in caplog.text
    assert pool.counters().damaged == 2
    pool.verify()
    other.release()


def test_two_sessions_are_kept_apart_by_two_zones(pool: Pool):
    first, second = (pool.lease(f"session {number}", "kv", 64 * KIB) for number in (1, 2))
    starts = sorted((lease.placement.start, lease.placement.start + lease.nbytes) for lease in (first, second))
    assert starts[1][0] - starts[0][1] >= 2 * 16
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    pool.verify()
    first.release()
    second.release()


def test_changed_sealed_lease_is_named_again_at_return(pool: Pool, caplog: pytest.LogCaptureFixture):
    lease = pool.lease("writer", "weights", 3 * MIB)
    weights = lease.carve((512, 512), torch.float32)
    weights.fill_(1.5)
    lease.seal()
    pool.verify()
    weights[511, 511] += 2**-20
    with pytest.raises(LeaseDamagedError, match="writer's weights lease was overwritten: its checksum changed"):
        pool.verify()
    lease.seal()
    pool.verify()
    lease.release()
    assert "overwritten" not in caplog.text
    again = pool.lease("writer", "weights", 3 * MIB)
    again.seal()
    again.tensor[7] = 1
    again.release()
    assert "writer's weights lease was overwritten: its checksum changed since it was sealed" in caplog.text
    assert pool.counters().damaged == 2


def test_no_guard_zones_without_debug_mode(make_pool: Callable[..., Pool]):
    pool = make_pool()
    lease = pool.lease("writer", "weights", 64 * KIB)
    assert lease.placement.layout.guard == 0
    lease.seal()
    lease.tensor.fill_(3)
    assert not lease.sealed_content_changed()
    pool.verify()
    lease.release()


@pytest.mark.parametrize("align", [64, 256, 4096])
@pytest.mark.parametrize("guard", [0, 16, 64, 100])
@pytest.mark.parametrize("whole", [1, 4096])
def test_the_layout_keeps_the_alignment(align: int, guard: int, whole: int):
    layout = plan_layout(1000, align, guard, whole)
    assert layout.front % align == 0
    assert layout.front >= guard
    assert layout.total >= layout.front + 1000 + guard
    assert layout.total % whole == 0
    zones = layout.zones(8192)
    assert zones == ({"before": 8192 + layout.front - guard, "after": 8192 + layout.front + 1000} if guard else {})


def test_a_guard_of_another_width(make_pool: Callable[..., Pool]):
    pool = make_pool(debug=True, guard=40)
    lease = pool.lease("writer", "kv", 1000)
    raw(lease, 40, 40)[-1] ^= 1
    with pytest.raises(LeaseDamagedError, match="after writer's kv lease"):
        pool.verify()
    lease.release()
