"""The fused CUDA kernels of whole layers against plain fp32 arithmetic: cases for cuda_timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from ..service.kernels.cuda.sdpa_kernels import CudaKernels
from ..service.kernels.delta_rule import DeltaHeads, DeltaOperands, convolve_chunk, delta_chunk, unit
from ..service.kernels.forward_batch import FEW_ROWS, NormWeight, Slots
from ..service.kernels.operands import (
    ConnectionOperands,
    ExpertOperands,
    ExpertWeights,
    HyperConnection,
    NgramOperands,
    NgramWeights,
    SharedWeights,
    pick_numbers,
)
from ..service.kernels.reference import ReferenceKernels
from ..service.quant.formats import INT8, MXFP8, NVFP4, int4
from ..service.quant.weight import Format, QuantizedWeight, Weight
from .cuda_cases import BOUNDS, Finding, Maker, apart, wide


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """Sizes of a network's experts."""

    hidden: int
    width: int
    count: int
    active: int
    shared: int
    normalized: bool


EXPERTS = (ExpertCase(2560, 640, 64, 10, 640, normalized=True), ExpertCase(2048, 768, 24, 8, 0, normalized=False))
EXPERT_FORMATS: tuple[Format | None, ...] = (None, INT8, MXFP8, int4(128), int4(32), NVFP4)
# Heads of a delta net: key heads, value heads per key head, both widths, fused, gate activation.
DELTAS: Sequence[tuple[int, int, int, int, bool, Literal["silu", "sigmoid"]]] = (
    (16, 3, 128, 128, False, "sigmoid"), (16, 2, 128, 128, True, "silu"), (2, 2, 16, 24, False, "silu"),
)  # fmt: skip
STREAM_ROWS: Sequence[int] = (1, 3, 8, 40)
# Streams, hidden, width, taps, and tokens between taps.
NGRAMS: Sequence[tuple[int, int, int, int, int]] = ((4, 2560, 2048, 4, 3), (2, 96, 64, 2, 2))
NGRAM_STEPS: Sequence[int] = (1, 3, 8)
NGRAM_TRAILS: Sequence[int] = (1, 2, 5, 8)
DELTA_KINDS = ("step", "verify", "chunk")
DELTA_STEPS: Sequence[int] = (1, 3, 8)
DELTA_TRAILS: Sequence[int] = (1, 2, 3, 5, 8)
DELTA_CHUNKS: Sequence[int] = (1, 2, 63, 64, 65, 500)
EXPERT_ROWS: Sequence[int] = (1, 3, 8, 16, 40, 700)


def layer_groups(kernels: CudaKernels, make: Maker) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Every kind of layer: its name, and its findings as they are made."""
    for heads in DELTAS:
        yield "delta", delta_findings(kernels, make, delta_heads(make, *heads))
    for injects in (True, False):
        yield "streams", stream_findings(kernels, make, 2560, 320, 4, injects=injects)
    for sizes in NGRAMS:
        yield "ngrams", ngram_findings(kernels, make, *sizes)
    for held in EXPERT_FORMATS:
        for case in EXPERTS:
            yield "experts", expert_findings(kernels, make, held, case)


def expert_findings(kernels: CudaKernels, make: Maker, held: Format | None, case: ExpertCase) -> Iterator[Finding]:
    """Rows through experts. Scores are exact in 16 bits, some of them equal, so that both
    ways select the same experts.
    """
    gate_up, down = (
        _small(make, held, case.count * rows, cols)
        for rows, cols in ((2 * case.width, case.hidden), (case.hidden, case.width))
    )
    router = torch.zeros(case.count, case.hidden, device=make.device, dtype=make.activation)
    router.fill_diagonal_(1)
    shared = None
    if case.shared:
        gates = (
            make.rows(1, case.hidden) * 0.02,
            _small(make, None, 2 * case.shared, case.hidden),
            _small(make, None, case.hidden, case.shared),
        )
        shared = SharedWeights(*gates)
    experts = ExpertWeights(
        case.active, case.normalized, router, _parts(gate_up, case.count), _parts(down, case.count), shared
    )
    for count in EXPERT_ROWS:
        x = make.rows(count, case.hidden)
        x[:, : case.count] = (
            torch.stack([torch.randperm(case.count, device=make.device) // 2 for _ in range(count)]) / 8 - 2
        )
        picked = pick_numbers(case.count, case.active, case.hidden, case.width)
        widths = (case.count, case.hidden, case.width, 1, max(1, case.shared), picked)
        truth = _expert_truth(experts, x.float())
        before = truth.flip(0, 1).to(make.activation)
        out = before.clone()
        done = kernels.run_experts(experts, ExpertOperands(x, out, *(make.empty(count, width) for width in widths)))
        error = apart(out, before.float() + truth) if done else float("inf")
        form = (
            f"{held.name if held else 'float'}-{held.group if held else 0} {case.count} of {case.width}, rows {count}"
        )
        yield Finding("experts", form, error, 4 * BOUNDS[make.activation])


def _small(make: Maker, held: Format | None, rows: int, cols: int) -> Weight:
    """Weights small enough for fp16 to hold the result of three products with them."""
    weight = make.weight(held, rows, cols)
    if isinstance(weight, torch.Tensor):
        return weight * 0.25
    return replace(weight, scales=weight.scales * 0.05) if weight.format.name == "int8" else weight


def _parts(whole: Weight, count: int) -> list[Weight]:
    rows = whole.shape[0] // count
    cuts = [(at, at + rows) for at in range(0, rows * count, rows)]
    return [whole.row_slice(*cut) if isinstance(whole, QuantizedWeight) else whole[cut[0] : cut[1]] for cut in cuts]


def _expert_truth(experts: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    """What experts add to rows; the first of equal scores is selected."""
    likely, order = (x @ wide(experts.router).t()).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = likely[:, : experts.active], order[:, : experts.active]
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    added = torch.zeros_like(x)
    for expert in range(len(experts.gate_up)):
        rows, picks = (chosen == expert).nonzero(as_tuple=True)
        if len(rows):
            added.index_add_(
                0, rows, weights[rows, picks][:, None] * _feed(x[rows], experts.gate_up[expert], experts.down[expert])
            )
    shared = experts.shared
    if shared is not None:
        added += torch.sigmoid(x @ wide(shared.gate).t()) * _feed(x, shared.gate_up, shared.down)
    return added


def _feed(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    gate, up = (x @ wide(gate_up).t()).chunk(2, -1)
    return (F.silu(gate) * up) @ wide(down).t()


def delta_heads(
    make: Maker, key_heads: int, group: int, key_dim: int, value_dim: int, fused: bool, gate: Literal["silu", "sigmoid"]
) -> DeltaHeads:
    """A delta net with random taps and rates."""
    channels, every = (2 * key_dim + group * value_dim) * key_heads, (key_heads, group)
    taps, decay, bias = make.normal(4, channels) * 0.5, -make.normal(*every).exp(), make.normal(*every)
    return DeltaHeads(key_heads, group, key_dim, value_dim, fused, gate, taps, decay, bias, make.norm(value_dim))


def delta_findings(kernels: CudaKernels, make: Maker, heads: DeltaHeads) -> Iterator[Finding]:
    """Steps of several sequences in any slots, verify passes and chunks of one. In every second chunk all tokens have
    the same key and hardly decay.
    """
    every, width = heads.key_heads * heads.group, heads.channels + heads.values
    windows, states = (
        make.normal(12, heads.taps.shape[0] - 1, heads.channels),
        make.normal(12, *heads.decay.shape, heads.key_dim, heads.value_dim),
    )
    cases = [
        (kind, count)
        for kind, counts in zip(DELTA_KINDS, (DELTA_STEPS, DELTA_TRAILS, DELTA_CHUNKS), strict=True)
        for count in counts
    ]
    for turn, (kind, count) in enumerate(cases):
        projected, rates = make.rows(count, width), make.rows(count, 2 * every)
        if kind == "chunk" and turn % 2:
            projected[:] = projected[0]
            rates -= 6
        slot_ids = torch.randperm(11, device=make.device)[: 2 if kind == "chunk" else count + 1] + 1
        slots = Slots(slot_ids[:-1], slot_ids[:-1] if kind == "step" else slot_ids[1:])
        held = windows.clone(), states.clone()
        step = DeltaOperands(projected, rates, *held, slots, make.empty(count, heads.values), kind == "verify")
        done = kernels.delta_chunk(heads, step) if kind == "chunk" else kernels.delta_step(heads, step)
        form = f"{heads.key_heads}x{heads.group} of {heads.key_dim}x{heads.value_dim}, {kind} {count}"
        truth = [torch.empty(count, heads.values, device=make.device), windows.clone(), states.clone()]
        for row in range(1 if kind == "chunk" else count):
            rows = slice(0, count) if kind == "chunk" else slice(row, row + 1)
            source, target = int(slots.source[row]), int(slots.target[row])
            pieces = _delta_truth(
                heads, projected[rows].float(), rates[rows].float(), truth[1][source], truth[2][source].clone()
            )
            truth[0][rows], truth[1][target], truth[2][target] = pieces
        bound = 4 * BOUNDS[make.activation]
        for name, ours, theirs in zip(
            ("delta", "delta, window", "delta, state"), (step.out, *held), truth, strict=True
        ):
            yield Finding(name, form, apart(ours, theirs) if done else float("inf"), bound)


def _delta_truth(
    heads: DeltaHeads, projected: torch.Tensor, rates: torch.Tensor, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Answers, and window and state after the rows of one sequence."""
    h, r, d, e, count = heads.key_heads, heads.group, heads.key_dim, heads.value_dim, projected.shape[0]
    if heads.fused:
        parts = projected.view(count, h, -1).split((d, d, r * e, r * e), dim=2)
        seen, gates = (
            torch.cat([part.reshape(count, -1) for part in parts[:3]], dim=1),
            parts[3].reshape(count, h, r, e),
        )
        beta, speed = rates.view(count, h, 2, r).unbind(2)
    else:
        seen, gates = projected[:, : heads.channels], projected[:, heads.channels :].reshape(count, h, r, e)
        beta, speed = rates.view(count, 2, h, r).unbind(1)
    convolved, window = convolve_chunk(seen, window, heads.taps)
    q, k, v = convolved.split((heads.keys, heads.keys, heads.values), dim=1)
    q, k = unit(q.reshape(count, h, d)) * d**-0.5, unit(k.reshape(count, h, d))
    answers = delta_chunk(
        q, k, v.reshape(count, h, r, e), heads.decay * F.softplus(speed + heads.bias), beta.sigmoid(), state
    )
    normed = answers * torch.rsqrt(answers.square().mean(-1, keepdim=True) + heads.norm.eps) * heads.norm.weight
    opened = torch.sigmoid(gates) if heads.gate == "sigmoid" else F.silu(gates)
    return (normed * opened).reshape(count, -1), window, state


def stream_findings(
    kernels: CudaKernels, make: Maker, hidden: int, rank: int, streams: int, *, injects: bool
) -> Iterator[Finding]:
    """What layers read of residual streams, and the injection of their results."""
    wide, norm = streams * hidden, NormWeight(make.normal(streams, hidden).abs() + 0.5, 1e-6)
    down, up = make.rows(rank, wide) * 0.05, make.rows(wide, rank) * 0.2
    inject = make.rows(streams, wide) * 0.05
    connection = HyperConnection(streams, norm, down, up, inject if injects else None)
    for count in STREAM_ROWS:
        x = make.rows(count, wide)
        buffers = [make.empty(count, width) for width in (wide, rank, wide, hidden, streams, hidden)]
        at = ConnectionOperands(x, *buffers)
        done = kernels.read_connection(connection, at)
        form = f"{streams} of {hidden} by {rank}, rows {count}"
        normed = ReferenceKernels().rms_norm(
            x.float().view(count, streams, hidden), norm, torch.empty(count, streams, hidden, device=x.device)
        )
        low = F.silu(normed.flatten(1) @ down.float().t() / streams)
        mixed = torch.sigmoid(low @ up.float().t()).view(normed.shape) * normed
        yield Finding(
            "streams, read", form, apart(at.read, mixed.mean(1)) if done else float("inf"), 4 * BOUNDS[make.activation]
        )
        if not injects:
            continue
        weights = 2 * torch.sigmoid(normed.flatten(1) @ inject.float().t() / streams)
        yield Finding(
            "streams, weights",
            form,
            apart(at.weights, weights) + float(at.found.abs().max()),
            2 * BOUNDS[make.activation],
        )
        at.found.copy_(make.rows(count, hidden))
        truth = x.float().view(normed.shape) + at.weights.float()[:, :, None] * at.found.float()[:, None]
        other = ConnectionOperands(x.clone(), *(rows.clone() for rows in buffers))
        kernels.inject(at)
        yield Finding("streams, inject", form, apart(x.view(normed.shape), truth), BOUNDS[make.activation])
        done = kernels.read_connection(connection, at) and kernels.inject_and_read(connection, other)
        pairs = ((other.streams, at.streams), (other.read, at.read), (other.weights, at.weights))
        error = max(apart(*pair) for pair in pairs) + float(other.found.abs().max())
        yield Finding("streams, both", form, error if done else float("inf"), BOUNDS[make.activation])


def ngram_findings(
    kernels: CudaKernels, make: Maker, streams: int, hidden: int, width: int, taps: int, spaced: int
) -> Iterator[Finding]:
    """Steps of several sequences, whose windows stay in their slots or move to others, and verify passes of one, with a
    window after every row.
    """
    channels = streams * hidden
    norms = (NormWeight(make.normal(streams, hidden).abs() + 0.5, 1e-6) for _ in range(3))
    products = make.rows(channels, width) * 0.2, make.rows(hidden, width) * 0.2
    weights = NgramWeights(*products, *norms, taps=make.normal(taps, channels) * 0.5, apart=spaced)
    kinds = ("step", NGRAM_STEPS), ("aside", NGRAM_STEPS[-1:]), ("verify", NGRAM_TRAILS)
    cases = [(kind, count) for kind, counts in kinds for count in counts]
    for kind, count in cases:
        slot_ids = torch.randperm(2 * FEW_ROWS + 1, device=make.device)
        first = slot_ids[:count]
        slots = Slots(
            first, {"step": first, "aside": slot_ids[count : 2 * count], "verify": slot_ids[1 : count + 1]}[kind]
        )
        embedded, before = make.rows(count, width), make.rows(count, channels)
        before[0, :hidden] = 0  # a score of 0
        windows, x = make.normal(2 * FEW_ROWS + 1, (taps - 1) * spaced, channels), before.clone()
        truth = windows.clone(), before.float()
        buffers = make.empty(count, channels), make.empty(count, hidden)
        held = windows.clone()
        done = kernels.add_ngrams(weights, NgramOperands(embedded, x, *buffers, held, slots, kind == "verify"))
        for row in range(count):
            source, target = int(slots.source[row]), int(slots.target[row])
            truth[1][row], truth[0][target] = _ngram_truth(
                weights, embedded[row].float(), truth[1][row], truth[0][source]
            )
        form, bound = f"{streams} of {hidden} by {width}, {taps} taps, {kind} {count}", BOUNDS[make.activation]
        yield Finding("ngrams", form, apart(x, truth[1]) if done else float("inf"), 2 * bound)
        yield Finding("ngrams, window", form, apart(held, truth[0]) if done else float("inf"), 2 * bound)


def _ngram_truth(
    weights: NgramWeights, embedded: torch.Tensor, row: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of streams after the addition, and the window after it."""

    def normed(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        return ReferenceKernels().rms_norm(x.view(norm.weight.shape), norm, torch.empty_like(norm.weight))

    keys, values = wide(weights.key) @ embedded, wide(weights.value) @ embedded
    scores = (normed(keys, weights.key_norm) * normed(row, weights.query_norm)).sum(-1) * weights.key_norm.weight.shape[
        1
    ] ** -0.5
    gates = torch.sigmoid(scores.abs().clamp_min(1e-6).sqrt() * scores.sign())
    added = gates[:, None] * values
    convolved, after = convolve_chunk(normed(added, weights.conv_norm).view(1, -1), window, weights.taps, weights.apart)
    return row + added.view(-1) + convolved[0], after
