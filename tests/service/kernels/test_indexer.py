"""Attention to selected key blocks in one call matches plain torch; equal scores are selected as torch's topk does."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.cache.recurrent import RecurrentStates, StateShape
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.forward_batch import (
    BLOCK,
    DecodeBatch,
    HeadShape,
    NormWeight,
    PrefillChunk,
    RotaryTable,
    Slots,
)
from onedesk.service.kernels.operands import AttentionHeads, Indexer
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.lease import Lease
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.indexed import IndexedAttention

HEADS, DIM, HIDDEN, BLOCKS, LONGEST = HeadShape(4, 2, 32), 16, 48, 24, 320


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))


class Sequences:
    """A layer and the cache of up to three sequences, run by kernels of either kind over the same numbers."""

    def __init__(
        self, lease: Lease, kernels: ReferenceKernels, ratio: int, budget: int, seed: int, coarse: bool
    ) -> None:
        self.kernels, self.generator = kernels, torch.Generator().manual_seed(seed)
        self.coarse = coarse
        size = (BLOCKS, HEADS.kv_heads, BLOCK, HEADS.head_dim)
        self.states = RecurrentStates(lease, StateShape((((ratio - 1, DIM),),), 8, 3))
        self.cache = SimpleNamespace(
            keys=[torch.zeros(size)], values=[torch.zeros(size)], pooled=[torch.zeros(BLOCKS, BLOCK // ratio, DIM)]
        )
        self.cache.states = self.states
        self.tables = torch.randperm(BLOCKS, generator=self.generator)[: 3 * (BLOCKS // 3)].view(3, -1).int()
        self.lengths = [0, 0, 0]
        self.slots = [1, 2, 3]
        angles = torch.outer(torch.arange(LONGEST).float(), 1e4 ** (-torch.arange(0, 8, 2) / 8))
        norms = [NormWeight(torch.rand(width, generator=self.generator) + 0.5, 1e-6) for width in (32, 32, DIM, DIM)]
        self.layer = IndexedAttention(
            heads=AttentionHeads(HEADS, norms[0], norms[1], RotaryTable(angles.cos(), angles.sin())),
            index=0,
            norm=None,
            qkv=torch.empty(0),
            output=torch.empty(0),
            indexer=Indexer(2, DIM, budget, ratio, norms[2], norms[3]),
            state=0,
            index_qk=torch.randn(3 * DIM, HIDDEN, generator=self.generator),
        )

    def numbers(self, *shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=self.generator)
        return found.round().clamp(-1, 1) if self.coarse else found

    def step(self, sequences: list[int], chunk: int, aside: bool) -> torch.Tensor:
        """One token of each of `sequences`, or `chunk` of the first; `aside`: their states go to other slots."""
        count = chunk or len(sequences)
        chosen = sequences[:1] if chunk else sequences
        places = (
            [self.lengths[sequences[0]] + i for i in range(chunk)]
            if chunk
            else [self.lengths[which] for which in sequences]
        )
        targets = [self.slots[which] + (3 if aside and self.slots[which] < 4 else 0) for which in chosen]
        slots = Slots(torch.tensor([self.slots[which] for which in chosen]), torch.tensor(targets))
        where = torch.tensor(places).int(), self.tables[chosen], max(places) + 1, slots
        batch = PrefillChunk(*where, start=places[0]) if chunk else DecodeBatch(*where)
        views = {"indexed": torch.empty(count, 3 * DIM)}
        source = self.numbers(count, HIDDEN)
        qkv, mixed = self.numbers(count, HEADS.qkv), torch.full((count, HEADS.queries), float("nan"))
        project = lambda norm, weight, out: torch.mm(source, weight.t(), out=out)  # noqa: E731
        at = SimpleNamespace(kernels=self.kernels, cache=self.cache, batch=batch, views=views, project=project)
        self.layer._attend(at, qkv, mixed)  # pyright: ignore[reportArgumentType, reportPrivateUsage]
        for which, target in zip(chosen, targets, strict=True):
            self.slots[which] = target
            self.lengths[which] += chunk or 1
        return mixed

    @property
    def left(self) -> list[torch.Tensor]:
        """What all steps have stored."""
        ratio = self.layer.indexer.ratio
        tails = self.states.of_layer(0)[0]
        raw = [tails[slot, : length % ratio] for slot, length in zip(self.slots, self.lengths, strict=True)]
        return [self.cache.keys[0], self.cache.values[0], self.cache.pooled[0], *raw]


STEP = st.tuples(st.permutations([0, 1, 2]), st.integers(1, 3), st.sampled_from([0, 0, 0, 1, 5, 23, 60]), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    ratio=st.sampled_from([2, 4, 16]),
    key_blocks=st.integers(1, 4),
    coarse=st.booleans(),
    steps=st.lists(STEP, min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_indexed_attention_matches_reference(
    library: ctypes.CDLL,
    pool: Pool,
    ratio: int,
    key_blocks: int,
    coarse: bool,
    steps: list[tuple[list[int], int, int, bool]],
    seed: int,
) -> None:
    compiled = CpuKernels(library, threads=1 + seed % 2)
    lease = pool.lease("test", "scratch", 1 << 20)
    ours, plain = (
        Sequences(lease, which, ratio, ratio * key_blocks, seed, coarse) for which in (compiled, ReferenceKernels())
    )
    for order, count, chunk, aside in [([0, 1, 2], 1, 61, False), *steps]:
        if max(ours.lengths) + chunk >= 8 * BLOCK:
            continue
        found, wanted = ours.step(order[:count], chunk, aside), plain.step(order[:count], chunk, aside)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.left, plain.left, rtol=1e-4, atol=2e-5)
    lease.release()
    assert compiled.compiled
    assert not compiled.plain


def selected(library: ctypes.CDLL, scores: torch.Tensor, k: int) -> list[int]:
    found = torch.empty((len(scores), 2), dtype=torch.int32)
    found[:, 0] = scores.view(torch.int32)
    found[:, 1] = torch.arange(len(scores))
    library.select_largest(ctypes.c_void_p(found.data_ptr()), ctypes.c_long(k), ctypes.c_long(len(scores)))
    return sorted(found[:k, 1].tolist())


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 700),
    part=st.floats(0, 1),
    kinds=st.integers(1, 9),
    seed=st.integers(0, 999),
    fault=st.booleans(),
)
def test_equal_scores_are_chosen_as_torch_does(
    library: ctypes.CDLL, count: int, part: float, kinds: int, seed: int, fault: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, kinds, (count,), generator=generator).float()
    if seed % 3 == 0:
        scores = scores.sort(descending=seed % 2 == 0).values
    if fault:
        scores[seed % count] = float("nan")
    k = max(1, min(count, round(part * count) if seed % 2 else 1 + round(part * count / 64)))
    assert selected(library, scores, k) == sorted(scores.topk(k).indices.tolist())
