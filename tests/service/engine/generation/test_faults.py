"""A fault of one request, of any class and at any stage, ends that request alone; the others stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from asking import ask
from choices import alone, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.api import OpenModel
from onedesk.service.core import Event, Request, Sampling
from onedesk.service.engine.batch_loop import BatchLoop
from onedesk.service.engine.beam_search import BeamSearch
from onedesk.service.engine.completion import Completion
from onedesk.service.engine.request_state import RunningSequence
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.speculate import Speculator
from onedesk.service.errors import MemoryFull, ModelError, OnedeskError

VICTIM = 666


class Panic(BaseException):
    """As the panics of libraries that are written in Rust: outside Exception."""


FAULTS: list[type[BaseException]] = [
    ValueError,
    OverflowError,
    OSError,
    RecursionError,
    MemoryError,
    AssertionError,
    KeyError,
    ModelError,
    MemoryFull,
    Panic,
]


@dataclass(frozen=True)
class Stage:
    """A method that works for one row, and how to see from its arguments whose row that is."""

    owner: type
    method: str
    seed: Callable[..., int | None]


def of_sampler(sampler: Sampler, *_: Any, **__: Any) -> int | None:
    return sampler.sampling.seed


def of_completion(completion: Completion, *_: Any, **__: Any) -> int | None:
    return completion._prepared.sampling.seed


def of_sequence(sequence: RunningSequence, request: Any = None, *_: Any, **__: Any) -> int | None:
    return (request or sequence).prepared.sampling.seed


STAGES = [
    Stage(RunningSequence, "__init__", of_sequence),
    Stage(BatchLoop, "_may_prefill", lambda loop, sequence, *_: of_sequence(sequence)),
    Stage(BatchLoop, "_finish_prefill", lambda loop, sequence, *_: of_sequence(sequence)),
    Stage(Sampler, "choose", of_sampler),
    Stage(Sampler, "accept", of_sampler),
    Stage(Completion, "take", of_completion),
    Stage(Completion, "end", of_completion),
    Stage(Completion, "flush", of_completion),
    Stage(Completion, "result", of_completion),
]


def failing(patch: pytest.MonkeyPatch, stage: Stage, fault: type[BaseException], call: int) -> None:
    """From its `call`th call on, counted from 0, the stage fails for the victim."""
    before, calls = getattr(stage.owner, stage.method), 0

    def method(*args: Any, **named: Any) -> Any:
        nonlocal calls
        if stage.seed(*args, **named) == VICTIM:
            calls += 1
            if calls > call:
                raise fault("injected")
        return before(*args, **named)

    patch.setattr(stage.owner, stage.method, method)


def served(model: OpenModel, *requests: Request) -> list[Event]:
    waiting = [[model.prepared(request) for request in requests]]
    return list(model.serve(lambda: waiting.pop() if waiting else ()))


def others() -> list[Request]:
    return [
        ask("first", sampling=Sampling(seed=1), max_tokens=12),
        ask("last", sampling=Sampling(seed=2), n=2, max_tokens=9),
    ]


def check_alone(model: OpenModel, stage: Stage, fault: type[BaseException], call: int, victim: Request) -> None:
    first, last = others()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, stage, fault, call)
        events = served(model, first, victim, last)
    errors = [event for event in events if event.error is not None]
    assert [event.request for event in errors] == [1]
    assert isinstance(errors[0].error, OnedeskError)
    assert [event for event in events if event.request == 1][-1] is errors[0]
    found = {(event.request, event.choice): event.result for event in events if event.result is not None}
    assert same(found[0, 0], alone(model, first))
    assert all(same(found[2, choice], alone(model, last, choice)) for choice in range(2))
    used, kept, _ = model.kv_blocks
    assert used == 0, f"{used} blocks have no owner; {kept} are cached"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage.owner.__name__}.{stage.method}")
def test_a_fault_ends_its_request_alone(stepped: OpenModel, stage: Stage) -> None:
    check_alone(stepped, stage, Panic, 0, ask("victim", sampling=Sampling(seed=VICTIM), n=2, max_tokens=10))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stage=st.sampled_from(STAGES[3:7]),
    fault=st.sampled_from(FAULTS),
    call=st.integers(0, 8),
    n=st.integers(1, 3),
    penalty=st.sampled_from([None, 0.5]),
)
def test_a_fault_of_any_class_at_any_token(
    stepped: OpenModel, stage: Stage, fault: type[BaseException], call: int, n: int, penalty: float | None
) -> None:
    sampling = Sampling(seed=VICTIM, frequency_penalty=penalty)
    victim = ask("victim", sampling=sampling, n=n, max_tokens=10)
    check_alone(stepped, stage, fault, min(call, n - 1 if stage.method == "end" else call), victim)


@pytest.mark.parametrize(
    "stage", [Stage(BeamSearch, "step", lambda search: VICTIM), Stage(BeamSearch, "best", lambda search, count: VICTIM)]
)
def test_a_fault_of_a_search_ends_it_alone(model: OpenModel, stage: Stage) -> None:
    model.load()
    check_alone(model, stage, OverflowError, 0, ask("victim", sampling=Sampling(), beams=3, n=2, max_tokens=6))


def test_a_fault_of_the_speculator_ends_its_request(model: OpenModel) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, Stage(Speculator, "plan", lambda *_: VICTIM), ZeroDivisionError, 2)
        events = served(model, ask("one two one two one two", max_tokens=20))
    assert isinstance(events[-1].error, OnedeskError)
    assert model.kv_blocks[0] == 0


def test_a_grammar_that_fails_ends_its_request_alone(model: OpenModel) -> None:
    model.load()
    allowed = Stage(Completion, "allowed", of_completion)
    victim = ask("victim", sampling=Sampling(seed=VICTIM), json_schema='{"type":"object"}', max_tokens=10)
    check_alone(model, allowed, Panic, 2, victim)


def test_broken_scores_of_one_prompt_end_that_request(stepped: OpenModel) -> None:
    """A damaged row of the embedding, that only the victim's prompt reads; blocks that held its keys and values do no
    harm later."""
    session = stepped.session
    assert session is not None
    table = session.runner.network.embedding
    token = 300
    victim = Request(ids=(token, *range(10, 40)), sampling=Sampling(seed=VICTIM), max_tokens=8)
    first, last = others()
    kept = table[token].clone()
    table[token] = float("nan")
    try:
        events = served(stepped, first, victim, last)
    finally:
        table[token] = kept
    errors = {event.request: event.error for event in events if event.error is not None}
    assert list(errors) == [1]
    assert isinstance(errors[1], ModelError)
    found = {(event.request, event.choice): event.result for event in events if event.result is not None}
    assert same(found[0, 0], alone(stepped, first))
    assert same(found[2, 1], alone(stepped, last, 1))


def test_orders_to_stop_stay_what_they_are(model: OpenModel) -> None:
    for order in (KeyboardInterrupt, SystemExit):
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, Stage(Sampler, "choose", of_sampler), order, 3)
            with pytest.raises(order):
                list(model.generate(ask("stop", sampling=Sampling(seed=VICTIM))))
    assert model.kv_blocks[0] == 0


def test_a_failed_request_raises_and_a_list_continues(model: OpenModel) -> None:
    victim, (first, last) = ask("victim", sampling=Sampling(seed=VICTIM)), others()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, Stage(Sampler, "choose", of_sampler), OverflowError, 1)
        with pytest.raises(OnedeskError, match="OverflowError injected") as caught:
            list(model.generate(victim))
        assert isinstance(caught.value.__cause__, OverflowError)
        listed = model.generate_batch([first, victim, last])
        ended = list(islice((event.request for event in listed if event.result is not None), 3))
        with pytest.raises(OnedeskError, match="injected"):
            next(listed)
    assert sorted(ended) == [0, 2, 2]


def test_a_fault_of_a_pass_is_everybodys_and_of_the_family(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    model.load()
    session = model.session
    assert session is not None
    monkeypatch.setattr(session.runner, "decode", decode)
    with pytest.raises(OnedeskError, match="RuntimeError the device is gone"):
        served(model, *others())
    monkeypatch.undo()
    assert len([event for event in served(model, *others()) if event.result is not None]) == 3
