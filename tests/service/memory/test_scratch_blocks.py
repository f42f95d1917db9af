"""Scratch blocks over one lease: counted references, steady steps without new tensors, nothing beside the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import MemoryFull, RequestError
from onedesk.service.memory.budget import KIB, MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.scratch import Scratch
from onedesk.service.memory.truth import read_truth

MakePool = Callable[..., Pool]


@pytest.fixture
def scratch(make_pool: MakePool) -> Scratch:
    return Scratch(make_pool().lease("writer", "scratch", 64 * KIB))


def test_blocks_are_apart_and_inside_the_lease(scratch: Scratch):
    first = scratch.take((10, 10), torch.float32)
    second = scratch.take((100,), torch.bfloat16, align=256)
    third = scratch.take((), torch.int64)
    for number, tensor in enumerate((first, second, third), 1):
        tensor.fill_(number)
    assert (first.sum().item(), second.sum().item(), third.item()) == (100, 200, 3)
    assert second.data_ptr() % 256 == 0
    assert scratch.used == 448 + 256 + 64
    scratch.check()


def test_a_steady_step_makes_no_new_tensors_and_no_pool_allocations(make_pool: MakePool):
    pool = make_pool()
    scratch = Scratch(pool.lease("writer", "scratch", 256 * KIB))
    shapes = [((1, 1024), torch.float32), ((1, 3072), torch.float32), ((16, 64), torch.bfloat16), ((1, 8000), torch.float32)]
    before = pool.allocations

    def step() -> list[int]:
        tensors = [scratch.take(shape, dtype) for shape, dtype in shapes]
        for tensor in tensors:
            scratch.give_back(tensor)
        return [id(tensor) for tensor in tensors]

    first = step()
    assert all(step() == first for _ in range(100))
    assert pool.allocations == before
    assert scratch.allocations == 101 * len(shapes)
    assert scratch.used == 0


def test_references_are_counted(scratch: Scratch):
    tensor = scratch.take((8,), torch.float32)
    scratch.hold(tensor)
    scratch.give_back(tensor)
    assert scratch.used == 64
    scratch.give_back(tensor)
    assert scratch.used == 0
    with pytest.raises(RequestError, match="not given out was returned to writer's scratch lease"):
        scratch.give_back(tensor)
    with pytest.raises(RequestError, match="not given out"):
        scratch.hold(torch.zeros(3))


def test_a_full_scratch_says_what_is_left(scratch: Scratch):
    scratch.take((48 * KIB,), torch.uint8)
    with pytest.raises(MemoryFull) as caught:
        scratch.take((20 * KIB,), torch.uint8)
    assert "writer's scratch lease of 65536 bytes has no block of 20480 left (49152 are given out, the largest free one has 16384)" in str(
        caught.value
    )
    scratch.reset()
    assert scratch.take((64 * KIB,), torch.uint8).numel() == 64 * KIB


def test_after_the_leases_return_nothing_is_given_out(make_pool: MakePool):
    lease = make_pool().lease("writer", "scratch", 64 * KIB)
    scratch = Scratch(lease)
    lease.release()
    with pytest.raises(RequestError, match="was returned; lease scratch again"):
        scratch.take((4,), torch.float32)


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([torch.uint8, torch.float32, torch.int64]), st.booleans()), max_size=40))
@settings(max_examples=50, deadline=None)
def test_random_steps_never_overlap(steps: list[tuple[int, torch.dtype, bool]]):
    pool = Pool("cpu", MemorySettings(limit_bytes=MIB, floor=MIB), read_truth)
    scratch = Scratch(pool.lease("writer", "scratch", 256 * KIB))
    live: list[tuple[torch.Tensor, int]] = []
    for number, (size, dtype, keep) in enumerate(steps, 1):
        tensor = scratch.take((size,), dtype)
        tensor.fill_(number)
        live.append((tensor, number))
        if not keep:
            scratch.give_back(live.pop(0)[0])
        scratch.check()
        assert all(torch.all(tensor == mark) for tensor, mark in live)
    scratch.reset()
    assert scratch.used == 0
