"""Graph steps without a CUDA device: replay repeats the captured work, and the host's sampler chooses by the device's
plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from adjusted_rows import Carver
from onedesk.service.api import OpenModel
from onedesk.service.cache.paged import SequenceKV
from onedesk.service.core import LOGPROBS_LIMIT, Sampling
from onedesk.service.engine import graph_stepper as graph_module
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.cuda_graphs import Graphs
from onedesk.service.engine.device_plan import BIASED, CHAINED, MASKED, NEWEST, PENALIZED, PLAN_ROWS, Needs
from onedesk.service.engine.device_sampler import MEASURED, mask_words
from onedesk.service.engine.device_slots import IN_PROMPT, DeviceSlots
from onedesk.service.engine.graph_stepper import GraphStepper
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import Checked, HostStepper


class Replayed:
    """What a captured graph does: the same work again, on the current content of the buffers."""

    def __init__(self, work: Any) -> None:
        self.replay = work


class Event:
    """Always complete: the CPU's work is done when the call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PlannedSampler:
    """Chooses by the plan's numbers and the slots alone, as the kernels do, with the host's sampler."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.plan = torch.zeros(PLAN_ROWS * MAX_BATCH, dtype=torch.int32)
        self.chosen = torch.zeros(MAX_BATCH, dtype=torch.int32)
        self.first = torch.zeros(1, dtype=torch.int32)
        self.masks = torch.zeros(MAX_BATCH, mask_words(vocab), dtype=torch.int32)
        self.measures = torch.zeros(MAX_BATCH, MEASURED, dtype=torch.int32)
        self.slots = DeviceSlots(Carver(), MAX_BATCH, vocab)  # type: ignore[arg-type]

    def close(self) -> None:
        self.slots.close()

    def feed(self, plan: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        batch = plan.shape[1]
        before = self.chosen[plan[1].long()].clamp(min=0)  # as in the kernel: -1 means no index
        ids[:batch] = torch.where(plan[0] < 0, before, plan[0])
        positions[:batch] = plan[2]

    def choose(self, scores: torch.Tensor, plan: torch.Tensor, needs: Needs, *, first: bool = False) -> None:
        target = self.first if first else self.chosen
        before = self.chosen.clone()
        for row in range(plan.shape[1]):
            self._count(plan, before, row)
        for row in range(plan.shape[1]):
            mode, flags, top = int(plan[3, row]), int(plan[11, row]), int(plan[17, row])
            assert needs.draws or not mode
            assert needs.adjusts or not flags
            assert needs.measures or top < 0
            found = scores[row].clone()
            good = bool(torch.isfinite(found).all())
            sampler = self._sampler(plan, row)
            target[row] = sampler.choose(found) if good and self._any_allowed(plan, row) else -1
            if good and sampler.logprobs is not None:
                ids, values = zip(*sampler.logprobs.top, strict=True) if top else ((), ())
                self.measures[row, 1 : 1 + top] = torch.tensor(ids, dtype=torch.int32)
                floats = self.measures[row].view(torch.float32)
                floats[0] = sampler.logprobs.token
                floats[1 + LOGPROBS_LIMIT : 1 + LOGPROBS_LIMIT + top] = torch.tensor(values)

    def _count(self, plan: torch.Tensor, before: torch.Tensor, row: int) -> None:
        flags, slot = int(plan[11, row]), int(plan[12, row])
        if flags & PENALIZED:
            for token in plan[18 : 18 + NEWEST, row].tolist():
                if 0 <= token < self.vocab:
                    self.slots.written[slot, token] += 1
            if flags & CHAINED:
                self.slots.written[slot, before[plan[1, row]]] += 1

    def _any_allowed(self, plan: torch.Tensor, row: int) -> bool:
        return not int(plan[11, row]) & MASKED or bool(self.masks[row].any())

    def _sampler(self, plan: torch.Tensor, row: int) -> Sampler:
        floats, flags, slot = plan.view(torch.float32), int(plan[11, row]), int(plan[12, row])
        mode, limit, top_k = plan[3:6, row].tolist()
        temperature, top_p, min_p = floats[6:9, row].tolist()
        bias = {}
        if flags & BIASED:
            ids = self.slots.bias[slot].nonzero()[:, 0].tolist()
            bias = dict(zip(ids, self.slots.bias[slot, ids].tolist(), strict=True))
        state = self.slots.written[slot] if flags & PENALIZED else torch.zeros(self.vocab, dtype=torch.int32)
        presence, frequency, repetition = floats[13:16, row].tolist() if flags & PENALIZED else (0.0, 0.0, 1.0)
        sampling = Sampling(
            temperature if mode else 0.0, top_k, top_p, min_p, presence, frequency, repetition, logit_bias=bias
        )
        prompt = (state < 0).nonzero()[:, 0].tolist()
        sampler = Sampler(sampling, 0, prompt, limit, top=int(plan[17, row]) if int(plan[17, row]) >= 0 else None)
        counts = (state & ~int(IN_PROMPT)).tolist()
        for token in [token for token, n in enumerate(counts) for _ in range(n)]:
            sampler.accept(token)
        for other in range(int(plan[16, row]), row + 1):
            sampler.accept(int(plan[0, other]))
        sampler.drawn = 0
        sampler._uniforms = [float(floats[9, row]) + float(floats[10, row])]
        if flags & MASKED:
            bits = np.unpackbits(self.masks[row].numpy().view(np.uint8), count=limit, bitorder="little")
            sampler.allowed = lambda: bits.view(np.bool_)
        return sampler


class ReplayedGraphs(Graphs):
    """Graphs whose replay repeats the work."""

    @property
    def keys(self) -> list[Any]:
        return list(self._graphs)

    def _captured(self, work: Any) -> Any:
        return Replayed(work)


class OnTheCpu(GraphStepper):
    """Counts its steps."""

    launches = 0
    checked = 0

    def launch(self, feeds: Any, /) -> None:
        self.launches += 1
        super().launch(feeds)

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Any, known: int, /) -> Checked:
        self.checked += 1
        return super().check(sequence, sampler, ids, known)

    @property
    def steps(self) -> list[int]:
        """The row counts for which steps have graphs."""
        graphs = self._graphs
        assert isinstance(graphs, ReplayedGraphs)
        return [key[0] for key in graphs.keys if key[0] not in ("check", "draft")]


@contextmanager
def stepping(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    """The loaded model steps with them until the block ends."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graph_module.torch.cuda, "Event", Event)
    session = model.session
    assert session is not None
    graphs, drafting = ReplayedGraphs(), session.runner.drafting
    made = OnTheCpu(session.runner, PlannedSampler(session.runner.scratch.logits(1).shape[1]), graphs)  # type: ignore[arg-type]
    session.stepper = made
    if drafting is not None:
        drafting._graphs = graphs
    yield made
    session.stepper = HostStepper(session.runner)
    if drafting is not None:
        drafting._graphs = None
