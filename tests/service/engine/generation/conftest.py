"""A real tiny model, on steppers that wait for the host and that run ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from asking import CONTEXT
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import Feed, HostStepper, Picked, pick
from onedesk.service.registry import Registry
from tiny_qwen3 import write_tiny_qwen3

NARROW = 160


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "tiny", layers=2)
    made = Registry()
    made.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(registry: Registry) -> OpenModel:
    return registry.open("tiny", context=CONTEXT)


def _plain(sampler: Sampler) -> bool:
    """Whether the choice depends on the scores and the draw alone."""
    return not (sampler.penalized or sampler.biased or sampler.allowed or sampler.top is not None)


class AheadStepper(HostStepper):
    """A device that computes at once what is launched, before anybody has seen the step before, with draws that it is
    given.

    Rows that the host must choose for are chosen from the scores when they are collected: the next pass writes over
    them.
    """

    ahead = 1
    stage: Literal["decode", "sample"] = "decode"

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.blind = 0
        self._chosen: deque[list[Picked | tuple[Sampler, torch.Tensor]]] = deque()

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return _plain(sampler)

    def launch(self, feeds: Sequence[Feed], /) -> None:
        assert len(self._chosen) <= self.ahead
        before = self._chosen[-1] if self._chosen else []
        self.blind += sum(feed.token is None for feed in feeds)
        known = []
        for feed in feeds:
            chosen = before[feed.source] if feed.token is None else Picked(feed.token)
            assert isinstance(chosen, Picked)
            assert (chosen.token >= 0) == (chosen.error is None)
            known.append(replace(feed, token=max(0, chosen.token)))
        super().launch(known)
        scores = self._in_flight.pop()[1]
        self._chosen.append([self._picked(feed, row) for feed, row in zip(known, scores, strict=True)])

    def collect(self) -> list[Picked]:
        return [one if isinstance(one, Picked) else pick(*one) for one in self._chosen.popleft()]

    def _picked(self, feed: Feed, row: torch.Tensor) -> Picked | tuple[Sampler, torch.Tensor]:
        if not feed.wanted:
            return Picked(-1)
        if not _plain(feed.sampler):
            return feed.sampler, row
        row = row.clone()
        drawn, feed.sampler.drawn = feed.sampler.drawn, feed.draw
        picked = pick(feed.sampler, row)
        feed.sampler.drawn = drawn
        return picked


@pytest.fixture(params=["host", "ahead"])
def stepped(request: pytest.FixtureRequest, model: OpenModel) -> Iterator[OpenModel]:
    """The model on a stepper that waits for the host, and on one that runs ahead of it."""
    yield from on_stepper(model, request.param)


@pytest.fixture(params=["host", "ahead"])
def narrow(request: pytest.FixtureRequest, registry: Registry) -> Iterator[OpenModel]:
    """As `stepped`, with a context that few answers fill."""
    yield from on_stepper(registry.open("tiny", context=NARROW), request.param)


def on_stepper(model: OpenModel, kind: str) -> Iterator[OpenModel]:
    model.load()
    session = model.session
    assert session is not None
    before = session.stepper
    if kind == "ahead":
        session.stepper = AheadStepper(session.runner)
    yield model
    if isinstance(session.stepper, AheadStepper):
        assert session.stepper.blind, "nothing was launched ahead"
        assert not session.stepper._chosen, "a step was left under way"
    session.stepper = before
