"""The KV cache against a plain list of rows, through random writes and truncations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.cache.kv import KVCache, KVShape
from onedesk.service.errors import RequestError
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

CAPACITY = 20


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool("cpu", MemorySettings(debug=True), lambda: read_truth("cpu"))


@pytest.fixture
def two(pool: Pool) -> Iterator[tuple[KVCache, KVCache]]:
    shape = KVShape(layers=2, heads=3, head_dim=5, dtype=torch.float32)
    leases = [pool.lease(name, "kv", shape.nbytes(CAPACITY)) for name in ("one", "other")]
    yield tuple(KVCache(lease, shape, CAPACITY) for lease in leases)  # type: ignore[misc]
    pool.verify()
    for lease in leases:
        lease.release()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["write", "truncate"]), st.integers(0, 9)), max_size=30), seed=st.integers(0, 999))
def test_rows_are_kept_and_forgotten_like_a_lists(pool: Pool, steps: list[tuple[str, int]], seed: int) -> None:
    shape = KVShape(layers=2, heads=3, head_dim=5, dtype=torch.float32)
    lease = pool.lease("test", "kv", shape.nbytes(CAPACITY))
    cache, rows = KVCache(lease, shape, CAPACITY), torch.empty(0, 4, 3, 5)
    generator = torch.Generator().manual_seed(seed)
    for kind, size in steps:
        if kind == "truncate":
            length = min(size, len(rows))
            cache.truncate(length)
            rows = rows[:length]
            continue
        new = torch.randn(size, 4, 3, 5, generator=generator)
        if len(rows) + size > CAPACITY:
            with pytest.raises(RequestError, match=rf"{len(rows) + size} tokens do not fit a context of {CAPACITY}"):
                cache.write(0, new[:, 0], new[:, 1])
            continue
        rows = torch.cat([rows, new])
        for layer in range(2):
            keys, values = cache.write(layer, new[:, 2 * layer], new[:, 2 * layer + 1])
            assert torch.equal(keys, rows[:, 2 * layer].transpose(0, 1))
            assert torch.equal(values, rows[:, 2 * layer + 1].transpose(0, 1))
        cache.advance(size)
        cache.check()
        assert cache.length == len(rows)
    pool.verify()
    lease.release()


def test_two_sessions_do_not_touch_each_other(two: tuple[KVCache, KVCache], pool: Pool) -> None:
    full = torch.full((CAPACITY, 3, 5), 7.0)
    for cache, value in zip(two, (1.0, 2.0), strict=True):
        for layer in range(2):
            cache.write(layer, full * value, full * -value)
        cache.advance(CAPACITY)
    pool.verify()
    keys, values = two[0].write(1, full[:0], full[:0])
    assert torch.equal(keys, torch.full((3, CAPACITY, 5), 7.0))
    assert torch.equal(values, torch.full((3, CAPACITY, 5), -7.0))


def test_the_stated_size_is_what_is_carved(pool: Pool) -> None:
    for capacity in (1, 3, 64, 129):
        shape = KVShape(layers=5, heads=2, head_dim=7, dtype=torch.bfloat16)
        lease = pool.lease("test", "kv", shape.nbytes(capacity))
        assert KVCache(lease, shape, capacity).nbytes() == lease.nbytes
        assert lease.free < 256
        lease.release()


def test_truncating_to_more_than_there_is_is_our_bug(two: tuple[KVCache, KVCache]) -> None:
    with pytest.raises(ValueError, match="cannot truncate 0 tokens to 1"):
        two[0].truncate(1)
