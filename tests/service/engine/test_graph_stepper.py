"""Steps launched ahead, with what the device chose fed back to it: the same texts as step by step. The CPU stands in
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Message, Request, Result, Sampling
from onedesk.service.engine.completion import Completion
from onedesk.service.engine.stepper import HostStepper
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.registry import Registry
from stepping import OnTheCpu, stepping
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    folder: Path = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "tiny", layers=2)
    registry = Registry()
    registry.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    opened = registry.open("tiny", context=512)
    opened.load()
    yield opened
    registry.close()


@pytest.fixture
def stepper(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    with stepping(model, monkeypatch) as made:
        yield made


def ask(text: str, **changes: Any) -> Request:
    return replace(
        Request(messages=(Message("user", text),), sampling=Sampling(seed=5), max_tokens=20, prefix_reuse=False),
        **changes,
    )


def run(model: OpenModel, *requests: Request) -> dict[tuple[int, int], Result]:
    return {(e.request, e.choice): e.result for e in model.generate_batch(requests) if e.result is not None}


REQUESTS = {
    "greedy": (ask("a red cat", sampling=Sampling(temperature=0.0)),),
    "drawn": (ask("a red cat", sampling=Sampling(0.9, 20, 0.9, 0.02, seed=3)),),
    "drawn from all": (ask("a dog", sampling=Sampling(1.2, 0, 1.0, 0.0, seed=4)),),
    "several": (
        ask("a cat", n=3),
        ask("a blue house by the sea", max_tokens=5),
        ask("x", sampling=Sampling(temperature=0.0)),
    ),
    "penalties": (
        ask("a cat", sampling=Sampling(0.8, 20, 0.9, 0.0, presence_penalty=1.5, seed=9)),
        ask("a dog"),
        ask("a red cat", sampling=Sampling(1.0, 0, 1.0, 0.05, frequency_penalty=0.7, repetition_penalty=1.2, seed=8)),
    ),
    "a bias and log-probabilities": (
        ask("a cat", sampling=Sampling(0.8, 20, 0.9, 0.0, logit_bias={5: 3.0, 70: -100.0, 80: 2.5}, seed=9)),
        ask("a dog", logprobs=3),
        ask("a red cat", logprobs=0, sampling=Sampling(temperature=0.0, presence_penalty=2.0)),
    ),
    "penalties, reasoning cut short": (
        ask(
            "think",
            thinking="on",
            thinking_budget=4,
            max_tokens=30,
            sampling=Sampling(0.8, 20, 0.9, 0.0, presence_penalty=1.5, frequency_penalty=0.5, seed=9),
        ),
    ),
    "reasoning cut short": (ask("think", thinking="on", thinking_budget=4, max_tokens=12),),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_steps_ahead_change_no_text(model: OpenModel, stepper: OnTheCpu, name: str):
    session = model.session
    assert session is not None
    ahead = run(model, *REQUESTS[name])
    assert stepper.launches > 4
    session.stepper = HostStepper(session.runner)
    assert {k: (v.ids, v.text, v.finish) for k, v in run(model, *REQUESTS[name]).items()} == {
        k: (v.ids, v.text, v.finish) for k, v in ahead.items()
    }
    session.runner.kv.check()


def test_a_batch_is_filled_up_to_a_size_that_has_a_graph(model: OpenModel, stepper: OnTheCpu):
    for count, size in ((1, 1), (2, 2), (3, 4), (5, 8)):
        run(model, *(ask(f"picture {i}", sampling=Sampling(temperature=0.0), max_tokens=9) for i in range(count)))
        assert max(stepper.steps) == size


def test_scores_that_are_no_numbers_end_the_answer(
    model: OpenModel, stepper: OnTheCpu, monkeypatch: pytest.MonkeyPatch
):
    session = model.session
    assert session is not None
    step = session.runner.buffers.step
    monkeypatch.setattr(session.runner.buffers, "step", lambda *a, **more: step(*a, **more).fill_(float("nan")))
    with pytest.raises(ModelError, match="scores that are no numbers"):
        run(model, ask("a cat", sampling=Sampling(temperature=0.0)))


def test_more_steps_than_it_runs_ahead_are_refused(stepper: OnTheCpu):
    stepper._in_flight.extend([None, None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="too many steps"):
        stepper.launch([])
    stepper._in_flight.clear()


def bound(monkeypatch: pytest.MonkeyPatch, masks: Callable[[Completion], np.ndarray | None]) -> None:
    """Bind every answer to a grammar of `masks`."""
    monkeypatch.setattr(Completion, "guided", property(lambda self: True))
    monkeypatch.setattr(Completion, "allowed", masks)


def test_a_mask_binds_the_same_tokens_on_the_device(
    model: OpenModel, stepper: OnTheCpu, monkeypatch: pytest.MonkeyPatch
):
    def masks(completion: Completion) -> np.ndarray | None:
        """Other ids after each token, and none bound after the fifth."""
        if completion.taken > 5:
            return None
        ids = np.random.default_rng(completion.taken).random(1 << 16) < 0.01
        ids[40] = True
        return ids

    bound(monkeypatch, masks)
    session = model.session
    assert session is not None
    requests = (ask("a cat"), ask("a dog", sampling=Sampling(0.9, 0, 1.0, 0.0, presence_penalty=1.0, seed=2)))
    ahead = run(model, *requests)
    assert {"scores", "choice"} <= {key[1] for key in stepper._graphs._graphs if isinstance(key, tuple)}
    session.stepper = HostStepper(session.runner)
    host = run(model, *requests)
    assert {k: v.ids for k, v in host.items()} == {k: v.ids for k, v in ahead.items()}


@pytest.mark.parametrize("on_device", [True, False])
def test_a_mask_that_allows_nothing_ends_the_request_and_says_so(
    model: OpenModel, stepper: OnTheCpu, monkeypatch: pytest.MonkeyPatch, on_device: bool
):
    bound(monkeypatch, lambda completion: np.full(1 << 16, completion.taken < 3))
    session = model.session
    assert session is not None
    if not on_device:
        session.stepper = HostStepper(session.runner)
    with pytest.raises(RequestError, match=r"the grammar of this answer allows none of the [\d,]+ tokens after 3 of"):
        run(model, ask("a cat"))
