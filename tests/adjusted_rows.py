"""Rows of every sampling setting, chosen by the device's kernels and by the host's sampler; `adjusted` runs in a child
of tests/interpreted.py, and `compare` as well on a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onedesk.service.core import Sampling
from onedesk.service.engine.device_plan import PLAN_ROWS, write_plan
from onedesk.service.engine.device_sampler import DeviceSampler, read_measures, write_mask
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import Feed

# Tokens whose probabilities differ by less than this may be exchanged: the steps of a rank, and rounding.
TIE = 2.5e-3


class Carver:
    """Stands in for a lease."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


@dataclass
class Row:
    """A row's settings; `bias`: 0 for none, else the share of ids that have one, up to `push`."""

    settings: tuple[float, int, float, float, float, float, float]
    written: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    bias: float = 0.0
    push: float = 1.0
    allowed: float | None = None
    top: int | None = None
    seed: int = 0

    def sampler(self, limit: int) -> Sampler:
        random = np.random.default_rng(self.seed)
        chosen = random.permutation(limit)[: round(self.bias * limit)].tolist()
        bias = {token: float(random.uniform(-1, 1) * self.push) for token in chosen}
        made = Sampler(Sampling(*self.settings, logit_bias=bias), self.seed, self.prompt, limit, top=self.top)
        for token in self.written:
            made.accept(token)
        if self.allowed is not None:
            mask = random.random(limit) < self.allowed
            mask[int(random.integers(limit))] = True
            made.allowed = lambda: mask
        return made


@dataclass
class Finding:
    """What a row got from the device and from the host, and whether that is the same but for ties."""

    ours: int
    host: int
    same: bool
    words: str


def compare(chooser: DeviceSampler, scores: torch.Tensor, rows: list[Row], limit: int) -> list[Finding]:
    """Two steps of `rows` over scores [rows, vocab]: the second is planned before the host has seen the first one's
    tokens, and counts them."""
    samplers, found, chosen = [row.sampler(limit) for row in rows], list[Finding](), list[int]()
    plan = torch.zeros(PLAN_ROWS, len(rows), dtype=torch.int32)
    for turn in range(2):
        feeds = [
            Feed(None, one, None if turn else 5, at if turn else -1, one.drawn + turn, wanted=True)  # type: ignore[arg-type]
            for at, one in enumerate(samplers)
        ]
        needs = write_plan(plan.numpy(), feeds, [0] * len(rows), chooser.slots.rows(feeds))
        for one, token in zip(samplers, chosen, strict=False):
            chooser.slots.note_chosen(one, token)
            one.accept(token)
        for at, one in enumerate(samplers):
            if one.allowed is not None:
                mask = np.zeros(chooser.masks.shape[1], np.int32)
                write_mask(mask, one.mask())
                chooser.masks[at].copy_(torch.from_numpy(mask))
        chooser.choose(scores, plan.to(scores.device), needs)
        chosen = chooser.chosen[: len(rows)].tolist()
        for at, one in enumerate(samplers):
            measures = chooser.measures[at].cpu().numpy()
            found.append(_finding(one, scores[at].float().cpu(), chosen[at], rows[at], measures))
    return found


def _finding(sampler: Sampler, scores: torch.Tensor, ours: int, row: Row, measures: np.ndarray) -> Finding:
    words, changed = f"{row} {sampler.drawn}", _adjusted(sampler, scores.clone())
    host = sampler.choose(scores.clone())
    same = ours == host or (ours >= 0 and ours in _neighbours(sampler, scores, changed))
    if same and sampler.top is not None and sampler.logprobs is not None and ours == host:
        got, wanted = read_measures(measures, sampler.top), sampler.logprobs
        values = [got.token, *(value for _, value in got.top)]
        same = np.allclose(values, [wanted.token, *(value for _, value in wanted.top)], atol=2e-3, rtol=1e-4)
        raw = scores.log_softmax(0)
        same &= all(abs(float(raw[token]) - value) < 2e-3 for token, value in got.top)
        words += f" {got} {wanted}"
    return Finding(ours, host, bool(same), words)


def _neighbours(sampler: Sampler, scores: torch.Tensor, changed: torch.Tensor) -> set[int]:
    """The tokens that the host may be exchanged for: those between its choices for a draw that is TIE smaller and TIE
    larger, in the order that the draw goes through."""
    s, limit = sampler.sampling, sampler.limit
    if sampler.greedy:
        best = changed[:limit].max()
        return set((changed[:limit] >= best - abs(best) * 1e-6).nonzero()[:, 0].tolist())
    ends, u = [], sampler.uniform(sampler.drawn)
    for moved in (u - TIE, u + TIE):
        sampler._uniforms[sampler.drawn] = min(max(moved, 0.0), 1 - 1e-12)
        ends.append(sampler.choose(scores.clone()))
    sampler._uniforms[sampler.drawn] = u
    sampler.choose(scores.clone())
    if not s.top_k and (s.top_p or 1.0) == 1.0 and not s.min_p:  # in the order of ids
        return set(range(min(ends), max(ends) + 1))
    low, high = (float(one(changed[ends])) for one in (torch.min, torch.max))
    tie = TIE * (s.temperature or 1.0)
    near = (changed[:limit] >= low - tie) & (changed[:limit] <= high + tie)
    return set(near.nonzero()[:, 0].tolist())


def _adjusted(sampler: Sampler, scores: torch.Tensor) -> torch.Tensor:
    """The scores after bias, penalties and mask."""
    part = scores[: sampler.limit].numpy()
    if sampler.biased:
        ids = sampler.adjustments.biased
        part[ids] = np.clip(part[ids] + sampler.adjustments.biases, -3.4028234e38, 3.4028234e38)
    sampler._penalties.apply(part)
    mask = sampler.mask()
    if mask is not None:
        part[~mask] = -np.inf
    return scores


def adjusted(examples: int = 8) -> dict[str, Any]:
    """Rows of random settings, by hypothesis: how many were the same, and the first that was not."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from onedesk.service.engine import device_slots

    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]
    device_slots.torch.cuda.Event = lambda: _Done()  # type: ignore[assignment,misc]
    vocab, limit, total = 5000, 4900, {"rows": 0, "equal": 0}
    choosers = {
        half: DeviceSampler(Carver(), 8, vocab, half, early=False)  # type: ignore[arg-type]
        for half in ("bf16", "fp16")
    }
    one_of = st.sampled_from
    ids = st.lists(st.integers(0, vocab + 50), max_size=40)
    row = st.builds(
        Row,
        st.tuples(
            one_of([0.0, 0.01, 0.7, 1.0, 2.0]), one_of([0, 1, 20, 3000]), one_of([0.05, 0.8, 0.95, 1.0]),
            one_of([0.0, 0.05, 1.0]), one_of([0.0, 1.5, -2.0]), one_of([0.0, 0.5, -1.0]), one_of([1.0, 1.1, 0.5, 2.0]),
        ),
        ids, ids, one_of([0.0, 0.001, 1.0]), one_of([1.0, 100.0, 1e30]), one_of([None, 0.0, 0.01, 0.9]),
        one_of([None, 0, 5, 20]), st.integers(0, 1 << 40),
    )  # fmt: skip

    # A failure is not shrunk: a row takes the interpreter some tenths of a second.
    quick: dict[str, Any] = {"deadline": None, "database": None, "phases": (Phase.generate,)}

    @settings(max_examples=examples, derandomize=True, suppress_health_check=[*HealthCheck], **quick)
    @given(
        st.lists(row, min_size=1, max_size=4), one_of([0.05, 3.0, 60.0]), one_of(["bf16", "fp16"]), st.integers(0, 99)
    )
    def rows_agree(rows: list[Row], scale: float, half: str, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        scores = (torch.randn(len(rows), vocab, generator=random) * scale).to(
            torch.bfloat16 if half == "bf16" else torch.float16
        )
        scores[:, limit:] = 60  # ids that the tokenizer lacks
        chooser = choosers[half]
        found = compare(chooser, scores, rows, limit)
        for one in found:
            assert one.same, one
        total["rows"] += len(found)
        total["equal"] += sum(one.ours == one.host for one in found)
        for left in (chooser._counts, chooser._weights, chooser._seen):
            assert not left.any()

    rows_agree()
    return total


class _Done:
    """An event that is always complete."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...
