"""CPU attention matches the reference in decode steps and chunks, with the same bits in any batching."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.forward_batch import (
    BLOCK,
    DecodeBatch,
    ForwardBatch,
    HeadShape,
    NormWeight,
    PrefillChunk,
    RotaryTable,
)
from onedesk.service.kernels.operands import AttentionHeads, AttentionOperands
from onedesk.service.kernels.reference import ReferenceKernels

SHAPES = [
    HeadShape(16, 8, 128),
    HeadShape(4, 2, 16),
    HeadShape(3, 1, 64),
    HeadShape(5, 1, 80),
    HeadShape(2, 2, 32),
    HeadShape(52, 1, 16),
]


@dataclass
class Layer:
    """The inputs of a call of attend, and where its results go."""

    heads: AttentionHeads
    qkv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: ForwardBatch

    def run(self, kernels: ReferenceKernels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mixed values, and the cache's keys and values afterwards."""
        keys, values = self.keys.clone(), self.values.clone()
        out = torch.full((self.qkv.shape[0], self.heads.shape.queries), float("nan"))
        kernels.attend(self.heads, AttentionOperands(self.qkv.clone(), keys, values, self.batch, out))
        return out, keys, values


def layer(heads: HeadShape, pasts: list[int], *, chunk: int = 0, seed: int = 0) -> Layer:
    """Sequences with `pasts` tokens in the cache, in shuffled blocks; one more token of each, or `chunk` tokens of the
    first alone.

    Slots after the end of a sequence hold NaN: they must not be read.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = [pasts[0] + chunk] if chunk else [past + 1 for past in pasts]
    longest, count = max(ends), chunk or len(pasts)
    blocks = -(-longest // BLOCK)
    tables = (
        torch.randperm(len(ends) * blocks + 2, generator=generator)[: len(ends) * blocks].view(len(ends), blocks).int()
    )
    size = (len(ends) * blocks + 2, heads.kv_heads, BLOCK, heads.head_dim)
    cache = [torch.full(size, float("nan")) for _ in range(2)]
    for table, past in zip(tables, pasts, strict=False):
        for position in range(past):
            for part in cache:
                part[table[position // BLOCK], :, position % BLOCK] = torch.randn(
                    heads.kv_heads, heads.head_dim, generator=generator
                )
    positions = torch.arange(pasts[0], pasts[0] + chunk) if chunk else torch.tensor(pasts)
    angles = torch.outer(torch.arange(longest).float(), 1e4 ** (-torch.arange(0, heads.head_dim, 2) / heads.head_dim))
    norms = [NormWeight(torch.rand(heads.head_dim, generator=generator) + 0.5, 1e-6) for _ in range(2)]
    qkv = torch.randn(count, heads.qkv, generator=generator)
    where = positions.int(), tables, longest
    batch = PrefillChunk(*where, start=pasts[0]) if chunk else DecodeBatch(*where)
    return Layer(AttentionHeads(heads, *norms, RotaryTable(angles.cos(), angles.sin())), qkv, cache[0], cache[1], batch)


def agrees(library: ctypes.CDLL, made: Layer) -> None:
    kernels = CpuKernels(library, 1)
    found = made.run(kernels)
    assert (kernels.compiled, kernels.plain) == (1, 0)
    torch.testing.assert_close(found, made.run(ReferenceKernels()), rtol=1e-4, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(found, made.run(CpuKernels(library, 2)), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(heads=st.sampled_from(SHAPES), past=st.integers(0, 150), chunk=st.integers(1, 100), seed=st.integers(0, 99))
def test_a_chunk_agrees(library: ctypes.CDLL, heads: HeadShape, past: int, chunk: int, seed: int) -> None:
    agrees(library, layer(heads, [past], chunk=chunk, seed=seed))


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from(SHAPES), pasts=st.lists(st.integers(0, 150), min_size=1, max_size=8), seed=st.integers(0, 99)
)
def test_a_decode_step_agrees(library: ctypes.CDLL, heads: HeadShape, pasts: list[int], seed: int) -> None:
    agrees(library, layer(heads, pasts, seed=seed))


def test_small_chunk_and_batch_match_single_steps_exactly(library: ctypes.CDLL) -> None:
    made, kernels = layer(HeadShape(4, 2, 16), [37], chunk=6), CpuKernels(library)
    together, keys, values = made.run(kernels)
    step = replace(made, keys=made.keys.clone(), values=made.values.clone())
    for i in range(6):
        one = DecodeBatch(made.batch.positions[i : i + 1], made.batch.tables, 37 + i + 1)
        alone, step.keys, step.values = replace(step, qkv=made.qkv[i : i + 1], batch=one).run(kernels)
        assert torch.equal(alone[0], together[i])
    torch.testing.assert_close((step.keys, step.values), (keys, values), rtol=0, atol=0, equal_nan=True)
    made = layer(HeadShape(4, 2, 16), [5, 70, 33, 0])
    together, *_ = made.run(kernels)
    for i in range(4):
        one = DecodeBatch(made.batch.positions[i : i + 1], made.batch.tables[i : i + 1], 71)
        alone, *_ = replace(made, qkv=made.qkv[i : i + 1], batch=one).run(kernels)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("chunk", [0, 20])
def test_large_scores_do_not_overflow(library: ctypes.CDLL, chunk: int) -> None:
    made = layer(HeadShape(4, 2, 32), [60], chunk=chunk)
    for norm in (made.heads.q_norm, made.heads.k_norm):
        norm.weight *= 200  # scores of many thousands: the softmax is one-hot
    agrees(library, made)


@pytest.mark.parametrize("chunk", [0, 4, 20])
def test_a_fault_in_the_cache_shows(library: ctypes.CDLL, chunk: int) -> None:
    made = layer(HeadShape(4, 2, 32), [60], chunk=chunk)
    made.keys[made.batch.tables[0, 1], 0, 3] = float("nan")
    mixed, *_ = made.run(CpuKernels(library))
    first, second = mixed.view(-1, 2, 2 * 32).unbind(1)  # queries of the two key heads
    assert bool(first.isnan().all())
    assert bool(second.isfinite().all())


def test_heads_that_the_c_has_not_run_in_plain_torch(library: ctypes.CDLL) -> None:
    made, kernels = layer(HeadShape(4, 2, 6), [5], chunk=3), CpuKernels(library)
    torch.testing.assert_close(made.run(kernels), made.run(ReferenceKernels()), equal_nan=True)
    assert (kernels.compiled, kernels.plain) == (0, 3), "attention, and the norms of its queries and keys"


def test_other_norms_over_the_same_cache_are_seen(library: ctypes.CDLL) -> None:
    made, kernels = layer(HeadShape(4, 2, 16), [40]), CpuKernels(library)
    other = replace(made.heads, q_norm=NormWeight(made.heads.q_norm.weight * 3, 1e-6))
    for heads in (made.heads, other):
        out, wanted = torch.empty(1, 64), torch.empty(1, 64)
        kernels.attend(heads, AttentionOperands(made.qkv.clone(), made.keys, made.values, made.batch, out))
        ReferenceKernels().attend(
            heads, AttentionOperands(made.qkv.clone(), made.keys, made.values, made.batch, wanted)
        )
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
