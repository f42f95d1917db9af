"""Graph steps without a CUDA device: graphs are work that is done again, and the host's sampler chooses by the device's plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from onedesk.service.api import OpenModel
from onedesk.service.core import Sampling
from onedesk.service.engine import graph as graph_module
from onedesk.service.engine.buffers import MAX_BATCH
from onedesk.service.engine.device_sampler import PLAN_ROWS
from onedesk.service.engine.graph import GraphStepper
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import HostStepper


class Replayed:
    """What a captured graph does: the same work again, on what the buffers hold by then."""

    def __init__(self, work: Any) -> None:
        self.replay = work


class Event:
    """Everything is done when the CPU returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PlannedSampler:
    """Chooses by the numbers of the plan alone, as the kernels do, with the host's sampler."""

    def __init__(self) -> None:
        self.plan = torch.zeros(PLAN_ROWS * MAX_BATCH, dtype=torch.int32)
        self.chosen = torch.zeros(MAX_BATCH, dtype=torch.int32)

    def feed(self, plan: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        batch = plan.shape[1]
        before = self.chosen[plan[1].long()]
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


class OnTheCpu(GraphStepper):
    """Graphs are work that is done again."""

    launches = 0

    def launch(self, feeds: Any, /) -> None:
        self.launches += 1
        super().launch(feeds)

    def _captured(self, runner: Runner, batch: int, draws: bool) -> Any:
        return Replayed(partial(self._step, runner, batch, draws))


@contextmanager
def stepping(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    """The loaded model steps so until the block ends."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graph_module.torch.cuda, "Event", Event)
    session = model._session
    assert session is not None
    made = OnTheCpu(session.runner, PlannedSampler())  # type: ignore[arg-type]
    session.stepper = made
    yield made
    session.stepper = HostStepper(session.runner)
