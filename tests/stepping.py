"""Graph steps without a CUDA device: replay repeats the captured work, and the host's sampler chooses by the device's
plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from onedesk.service.api import OpenModel
from onedesk.service.cache.paged import SequenceKV
from onedesk.service.core import Sampling
from onedesk.service.engine import graph_stepper as graph_module
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.cuda_graphs import Graphs
from onedesk.service.engine.device_sampler import PLAN_ROWS
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
    """Chooses by the plan's numbers alone, as the kernels do, with the host's sampler."""

    def __init__(self) -> None:
        self.plan = torch.zeros(PLAN_ROWS * MAX_BATCH, dtype=torch.int32)
        self.chosen = torch.zeros(MAX_BATCH, dtype=torch.int32)

    def feed(self, plan: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        batch = plan.shape[1]
        before = self.chosen[plan[1].long()].clamp(min=0)  # as in the kernel: -1 means no index
        ids[:batch] = torch.where(plan[0] < 0, before, plan[0])
        positions[:batch] = plan[2]

    def choose(self, scores: torch.Tensor, plan: torch.Tensor, *, draws: bool) -> None:
        floats = plan.view(torch.float32)
        for row in range(plan.shape[1]):
            mode, limit, top_k = plan[3:6, row].tolist()
            assert draws or not mode
            temperature, top_p, min_p = floats[6:9, row].tolist()
            sampling = Sampling(temperature if mode else 0.0, top_k, top_p, min_p, 0.0, 0.0, 1.0)
            sampler = Sampler(sampling, 0, [], limit)
            sampler._uniforms = [float(floats[9, row]) + float(floats[10, row])]
            found = scores[row].clone()
            self.chosen[row] = sampler.choose(found) if bool(torch.isfinite(found).all()) else -1


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
    made = OnTheCpu(session.runner, PlannedSampler(), graphs)  # type: ignore[arg-type]
    session.stepper = made
    if drafting is not None:
        drafting._graphs = graphs
    yield made
    session.stepper = HostStepper(session.runner)
    if drafting is not None:
        drafting._graphs = None
