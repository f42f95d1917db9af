"""The gated delta rule: chunks against steps against its formula in fp64, and the compiled step against plain torch."""

from __future__ import annotations

import ctypes
from typing import Literal

import pytest
import torch
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.delta_rule import (
    CHUNK,
    DeltaHeads,
    DeltaOperands,
    convolve_chunk,
    convolve_step,
    delta_chunk,
    delta_step,
    unit,
)
from onedesk.service.kernels.forward_batch import NormWeight, Slots
from onedesk.service.kernels.reference import ReferenceKernels

EPS = 1e-6


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as published, one head and token after another, in fp64."""
    state, out = state.double().clone(), torch.zeros(v.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            for r in range(v.shape[2]):
                key, query, s = k[t, h].double(), q[t, h].double(), state[h, r]
                s *= decay[t, h, r].double().exp()
                s += torch.outer(key, beta[t, h, r].double() * (v[t, h, r].double() - s.t() @ key))
                out[t, h, r] = s.t() @ query
    return out, state


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("forgetting", [0.01, 1.0, 30.0])
def test_chunks_and_steps_follow_the_formula(count: int, forgetting: float) -> None:
    heads, group, keys, values = 2, 2, 8, 6
    q, k = unit(numbers(count, heads, keys)), unit(numbers(count, heads, keys, seed=1))
    v, beta = numbers(count, heads, group, values), numbers(count, heads, group).sigmoid()
    decay, state = -forgetting * numbers(count, heads, group, seed=2).abs(), numbers(heads, group, keys, values)
    wanted, left = token_by_token(q, k, v, decay, beta, state)
    chunked, stepped = state.clone(), state.clone()[None]
    found = delta_chunk(q, k, v, decay, beta, chunked)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(chunked.double(), left, rtol=1e-4, atol=1e-5)
    steps = [delta_step(*(x[t : t + 1] for x in (q, k, v, decay, beta)), stepped) for t in range(count)]
    torch.testing.assert_close(torch.cat(steps).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stepped[0].double(), left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("taps", "apart"), [(4, 1), (2, 1), (4, 3)])
def test_convolution_continues_across_chunks(taps: int, apart: int) -> None:
    x, window, weight = numbers(20, 5), numbers((taps - 1) * apart, 5), numbers(taps, 5)
    seen = torch.cat((window, x))
    wanted = sum(weight[tap] * seen[tap * apart : tap * apart + 20] for tap in range(taps))
    assert isinstance(wanted, torch.Tensor)
    whole, left = convolve_chunk(x, window, weight, apart)
    torch.testing.assert_close(whole, torch.nn.functional.silu(wanted))
    first, between = convolve_chunk(x[:7], window, weight, apart)
    rows, windows = [first], between[None]
    for token in x[7:]:
        out, windows = convolve_step(token[None], windows, weight, apart)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows), whole)
    torch.testing.assert_close(windows[0], left)


def parts_of(heads: DeltaHeads, step: DeltaOperands) -> torch.Tensor:
    """A step of the small operations in plain torch, on copies; it writes the states."""
    rows = step.projected.shape[0]
    each = heads.group * heads.value_dim
    if heads.fused:
        split = step.projected.view(rows, heads.key_heads, -1).split((heads.key_dim, heads.key_dim, each, each), dim=2)
        seen, gates = torch.cat([part.reshape(rows, -1) for part in split[:3]], dim=1), split[3]
        beta, speed = step.rates.view(rows, heads.key_heads, 2, heads.group).unbind(2)
    else:
        seen, gates = step.projected.split((heads.channels, heads.values), dim=1)
        beta, speed = step.rates.view(rows, 2, heads.key_heads, heads.group).unbind(1)
    windows, states = step.windows[step.slots.source], step.states[step.slots.source]
    convolved, windows = convolve_step(seen, windows, heads.taps)
    q, k, v = convolved.split((heads.keys, heads.keys, heads.values), dim=1)
    q, k = (unit(part.view(rows, heads.key_heads, -1)) for part in (q, k))
    v = v.view(rows, heads.key_heads, heads.group, -1)
    decay = heads.decay * torch.nn.functional.softplus(speed + heads.bias)
    answers = delta_step(q * heads.key_dim**-0.5, k, v, decay, beta.sigmoid(), states)
    step.windows[step.slots.target], step.states[step.slots.target] = windows, states
    normed = ReferenceKernels().rms_norm(answers, heads.norm, torch.empty_like(answers))
    gates = gates.reshape(normed.shape)
    return (normed * (gates.sigmoid() if heads.gate == "sigmoid" else torch.nn.functional.silu(gates))).flatten(1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("sizes", [(2, 2, 16, 16, 1), (3, 1, 32, 48, 3), (4, 3, 128, 128, 2)])
def test_the_compiled_step_is_that_of_its_parts(
    library: ctypes.CDLL, fused: bool, gate: Literal["silu", "sigmoid"], sizes: tuple[int, int, int, int, int]
) -> None:
    key_heads, group, key_dim, value_dim, rows = sizes
    values, channels, slots = key_heads * group * value_dim, key_heads * (2 * key_dim + group * value_dim), 7
    heads = DeltaHeads(
        *(key_heads, group, key_dim, value_dim, fused, gate),
        taps=numbers(4, channels),
        decay=-numbers(key_heads, group).exp(),
        bias=numbers(key_heads, group, seed=1),
        norm=NormWeight(numbers(value_dim).abs() + 0.5, EPS),
    )
    windows, states = numbers(slots, 3, channels), numbers(slots, key_heads, group, key_dim, value_dim)
    kernels = CpuKernels(library, threads=2)
    # Into the same slots, and into others, as for a chunk that may be stopped.
    for target in (torch.arange(1, rows + 1), torch.arange(rows + 1, 2 * rows + 1)):
        places = Slots(torch.arange(1, rows + 1), target)
        copied, out = [part.clone() for part in (windows, states)], torch.full((rows, values), float("nan"))
        projected, rates = numbers(rows, channels + values, seed=3), numbers(rows, 2 * key_heads * group, seed=4) * 3
        step = DeltaOperands(projected, rates, *copied, places, out)
        assert kernels.delta_step(heads, step)
        wanted = parts_of(heads, DeltaOperands(projected, rates, windows, states, places, out))
        torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(copied[0], windows)
        torch.testing.assert_close(copied[1], states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("fused", [False, True])
def test_verify_rows_continue_from_previous_row(library: ctypes.CDLL, rows: int, fused: bool) -> None:
    heads = DeltaHeads(
        *(2, 2, 32, 80, fused, "silu"),  # values are no multiple of the column block
        taps=numbers(4, 448),
        decay=-numbers(2, 2).exp(),
        bias=numbers(2, 2, seed=1),
        norm=NormWeight(numbers(80).abs() + 0.5, EPS),
    )
    windows, states, order = numbers(10, 3, 448), numbers(10, 2, 2, 32, 80), [7, 2, 9, 0, 4, 1, 8, 3, 6]
    places = Slots(torch.tensor(order[:rows]), torch.tensor(order[1 : rows + 1]))
    projected, rates = numbers(rows, 768, seed=3), numbers(rows, 8, seed=4)
    copied, out = [part.clone() for part in (windows, states)], torch.empty(rows, 320)
    assert CpuKernels(library, threads=2).delta_step(
        heads, DeltaOperands(projected, rates, *copied, places, out, verify=True)
    )
    for row in range(rows):
        one = slice(row, row + 1)
        step = DeltaOperands(projected[one], rates[one], windows, states, places.part(one), torch.empty(1, 320))
        torch.testing.assert_close(out[one], parts_of(heads, step), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(copied[0], windows)
    torch.testing.assert_close(copied[1], states, rtol=1e-4, atol=1e-5)


def test_unsupported_delta_heads_fall_back(library: ctypes.CDLL) -> None:
    heads = DeltaHeads(
        1, 1, 8, 16, False, "silu", numbers(4, 32), -numbers(1, 1).exp(), numbers(1, 1), NormWeight(numbers(16), EPS)
    )
    places = Slots(torch.tensor([0]), torch.tensor([0]))
    step = DeltaOperands(
        numbers(1, 48), numbers(1, 2), numbers(1, 3, 32), numbers(1, 1, 1, 8, 16), places, numbers(1, 16)
    )
    assert not CpuKernels(library).delta_step(heads, step)
    assert not ReferenceKernels().delta_step(heads, step)


@pytest.mark.parametrize("shape", [(1, 64), (3, 4, 40), (2, 37), (300, 1024), (2, 4, 8)])
@pytest.mark.parametrize("whole", [False, True])
def test_norms_of_rows_are_those_of_the_reference(library: ctypes.CDLL, shape: tuple[int, ...], whole: bool) -> None:
    x, norm = numbers(*shape), NormWeight(numbers(*shape[-2:] if whole and len(shape) > 2 else shape[-1:]), EPS)
    wanted = ReferenceKernels().rms_norm(x, norm, torch.empty_like(x))
    kernels = CpuKernels(library, threads=2)
    torch.testing.assert_close(kernels.rms_norm(x, norm, torch.empty_like(x)), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, norm, x), wanted, rtol=1e-5, atol=1e-6)
    wide = numbers(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    torch.testing.assert_close(
        kernels.rms_norm(wide, norm, torch.empty_like(wide)),
        ReferenceKernels().rms_norm(wide, norm, torch.empty_like(wide)),
    )
