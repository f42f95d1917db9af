"""The n-gram block in one call matches plain torch; sequences of calls are captured once and replayed."""

from __future__ import annotations

import ctypes

import pytest
import torch
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.delta_rule import convolve_step
from onedesk.service.kernels.forward_batch import HeadShape, NormWeight, Slots
from onedesk.service.kernels.operands import NgramOperands, NgramWeights
from onedesk.service.kernels.reference import ReferenceKernels

COUNT, HIDDEN, WIDTH, TAPS, APART = 3, 48, 40, 4, 3
WIDE = COUNT * HIDDEN


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weights(hidden: int = HIDDEN) -> NgramWeights:
    wide = COUNT * hidden
    norms = [NormWeight(numbers(COUNT, hidden, seed=i).abs() + 0.5, 1e-6) for i in range(3)]
    return NgramWeights(numbers(wide, WIDTH), numbers(hidden, WIDTH, seed=2), *norms, numbers(TAPS, wide), APART)


def by_parts(w: NgramWeights, at: NgramOperands) -> torch.Tensor:
    """The streams afterwards, and the windows in at.windows, by the equations."""
    kernels, count = ReferenceKernels(), len(at.streams)
    heads = (count, *w.key_norm.weight.shape)
    assert isinstance(w.key, torch.Tensor)
    assert isinstance(w.value, torch.Tensor)
    keys, values = (at.embedded @ w.key.t()).view(heads), at.embedded @ w.value.t()
    keys, queries = (
        kernels.rms_norm(x, norm, torch.empty_like(x))
        for x, norm in ((keys, w.key_norm), (at.streams.view(heads), w.query_norm))
    )
    scores = (keys * queries).sum(-1) * heads[-1] ** -0.5
    added = (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()[..., None] * values[:, None]
    normed = kernels.rms_norm(added, w.conv_norm, torch.empty_like(added)).flatten(1)
    convolved, windows = convolve_step(normed, at.windows[at.slots.source], w.taps, w.apart)
    at.windows[at.slots.target] = windows
    return at.streams + added.flatten(1) + convolved


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("aside", [False, True])
def test_the_block_at_once_is_its_operations(library: ctypes.CDLL, count: int, aside: bool) -> None:
    w, kernels = weights(), CpuKernels(library, threads=2)
    source = torch.arange(count) + 1
    slots = Slots(source, source + 8 if aside else source)
    windows, streams = numbers(20, (TAPS - 1) * APART, WIDE), numbers(count, WIDE, seed=3)
    streams[0, :HIDDEN] = 0  # a score of 0
    buffers = torch.empty(count, WIDE), torch.empty(count, HIDDEN)
    ours = NgramOperands(numbers(count, WIDTH), streams.clone(), *buffers, windows.clone(), slots)
    plain = NgramOperands(ours.embedded, streams.clone(), *buffers, windows.clone(), slots)
    for _ in range(3):
        assert kernels.add_ngrams(w, ours)
        plain.streams = by_parts(w, plain)
    torch.testing.assert_close(ours.streams, plain.streams, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.windows, plain.windows, rtol=1e-4, atol=1e-4)
    assert (kernels.compiled, kernels.plain) == (3, 0)
    ours.embedded[0, 0] = float("nan")
    assert kernels.add_ngrams(w, ours)
    assert ours.streams[0].isnan().all()
    assert ours.streams[1:].isfinite().all()


def test_uncompiled_ngram_widths_fall_back(library: ctypes.CDLL) -> None:
    w, kernels = weights(40), CpuKernels(library)
    slots = Slots(torch.zeros(1).long(), torch.zeros(1).long())
    at = NgramOperands(
        numbers(1, WIDTH), numbers(1, 120), torch.empty(1, 120), torch.empty(1, 40), torch.zeros(1, 9, 120), slots
    )
    assert not kernels.add_ngrams(w, at)


@pytest.mark.parametrize("dim", [32, 6])
def test_gates_beside_queries_are_parted_and_closed(library: ctypes.CDLL, dim: int) -> None:
    heads, kernels = HeadShape(4, 2, dim), CpuKernels(library)
    projected, mixed = numbers(3, heads.queries + heads.qkv), numbers(3, heads.queries)
    found = [(torch.empty(3, heads.qkv), mixed.clone()) for _ in range(2)]
    for (qkv, out), which in zip(found, (kernels, ReferenceKernels()), strict=True):
        which.split_gates(projected, heads, qkv, out)
        which.apply_gates(projected, heads, qkv, out)
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert bool(kernels.compiled) == (dim == 32)


def test_sequence_is_captured_once_and_replayed(library: ctypes.CDLL) -> None:
    kernels, x, weight, out, owner = CpuKernels(library), numbers(2, 64), numbers(32, 64), torch.empty(2, 32), object()
    norm, normed, runs = NormWeight(torch.ones(64), 1e-6), torch.empty(2, 64), []

    def work() -> None:
        runs.append(1)
        kernels.rms_norm(x, norm, normed)
        kernels.linear(normed, weight, out)

    for turn in range(4):
        x.copy_(numbers(2, 64, seed=turn))
        kernels.run_captured(owner, 0, work)
        torch.testing.assert_close(
            out, torch.nn.functional.rms_norm(x, (64,), eps=1e-6) @ weight.t(), rtol=1e-4, atol=1e-4
        )
    # The workspace of products grew during the first capture, so it was recorded again.
    assert len(runs) == 2
    assert (kernels.compiled, kernels.plain) == (8, 0)
    kernels.reserve([torch.empty(1 << 20, dtype=torch.uint8)])
    kernels.run_captured(owner, 0, work)
    assert len(runs) == 3, "the workspace is another one"


def test_sequence_with_plain_operation_is_not_captured(library: ctypes.CDLL) -> None:
    kernels, owner, runs = CpuKernels(library), object(), []
    x, norm = numbers(2, 64).t(), NormWeight(torch.ones(2), 1e-6)

    def work() -> None:
        runs.append(1)
        kernels.rms_norm(x, norm, x)

    for _ in range(3):
        kernels.run_captured(owner, 0, work)
    assert len(runs) == 3
    with pytest.raises(ZeroDivisionError):
        kernels.run_captured(owner, 1, lambda: runs.append(1 // 0))
    kernels.run_captured(owner, 1, work)
    assert len(runs) == 4
