"""Answers bound to a schema, log-probabilities, tools, vectors, requests that come meanwhile: what the door gives
beyond plain text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Event, Message, Request, Result, Sampling
from onedesk.service.engine.completion import Prepared
from onedesk.service.errors import RequestError
from onedesk.service.registry import Registry
from oracle import load_model
from tiny_qwen3 import TEMPLATE, write_tiny_qwen3

CONTEXT = 1024
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "sex": {"enum": ["f", "m", None]}},
        "required": ["name", "sex"],
        "additionalProperties": False,
    }
)
WITH_TOOLS = "{%- if tools %}<tools>{{ tools | tojson }} {{ mood }}</tools>{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[OpenModel]:
    keep_kernels(checkpoint.parent / "cache")
    registry = Registry()
    registry.configure(Config(tree=checkpoint.parent, model_roots=(checkpoint.parent,), memory={"floor": 64 << 20}))
    yield registry.open("tiny", context=CONTEXT)
    registry.close()


def ask(text: str = "a red cat", **changes: Any) -> Request:
    return replace(Request(messages=(Message("user", text),), sampling=Sampling(seed=7), max_tokens=500), **changes)


def run(model: OpenModel, request: Request) -> tuple[list[Event], Result]:
    events = list(model.generate(request))
    assert events[-1].result is not None
    return events, events[-1].result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("thinking", ["on", "off", "auto"])
def test_an_answer_follows_its_schema_and_reasoning_is_free(model: OpenModel, seed: int, thinking: Any) -> None:
    request = ask(
        json_schema=PERSON, sampling=Sampling(seed=seed, temperature=2.0), thinking=thinking, thinking_budget=20
    )
    _, result = run(model, request)
    assert result.finish == "stop"
    assert set(json.loads(result.text)) == {"name", "sex"}
    assert run(model, request)[1].ids == result.ids


def test_a_model_that_thinks_first_is_bound_afterwards(model: OpenModel) -> None:
    opener = model.tokenizer.id_of("<think>")
    assert opener is not None
    _, result = run(
        model, ask(json_schema=PERSON, sampling=Sampling(seed=1, logit_bias={opener: 1e4}), thinking_budget=12)
    )
    assert result.usage.reasoning > 0
    assert set(json.loads(result.text)) == {"name", "sex"}


def test_each_choice_follows_the_schema_by_itself(model: OpenModel) -> None:
    results = [event.result for event in model.generate(ask(json_schema=PERSON, n=3, thinking="off")) if event.result]
    assert all(set(json.loads(result.text)) == {"name", "sex"} for result in results)
    assert len({result.text for result in results}) > 1


@pytest.mark.parametrize("changes", [{"json_schema": '{"type": "strang"}'}, {"beams": 2}])
def test_what_cannot_be_followed_is_refused_before_any_work(model: OpenModel, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="schema"):
        model.generate(ask(sampling=Sampling(), **{"json_schema": PERSON, **changes}))


def test_each_token_of_the_answer_comes_with_its_log_probability(model: OpenModel) -> None:
    events, result = run(model, ask(logprobs=4, max_tokens=12))
    told = [event.logprobs for event in events if event.token is not None]
    assert len(told) == len(result.ids)
    prompt = model.encode(model.render((Message("user", "a red cat"),)))
    scored = model.score([*prompt, *result.ids])[len(prompt) - 1 :]
    for value, logprobs in zip(scored, told, strict=True):
        assert logprobs is not None
        assert len(logprobs.top) == 4
        assert logprobs.token == pytest.approx(value, abs=1e-3)
        assert logprobs.token <= logprobs.top[0][1] + 1e-6
    assert run(model, ask(max_tokens=12))[1].ids == result.ids
    assert all(event.logprobs is None for event in run(model, ask(max_tokens=4))[0])


def test_reasoning_has_no_log_probabilities(model: OpenModel) -> None:
    opener = model.tokenizer.id_of("<think>")
    assert opener is not None
    events, result = run(
        model, ask(logprobs=0, sampling=Sampling(seed=1, logit_bias={opener: 1e4}), thinking_budget=6, max_tokens=5)
    )
    told = [event.logprobs for event in events if event.token is not None]
    assert told.count(None) == result.usage.reasoning > 0
    assert all(logprobs.top == () and math.isfinite(logprobs.token) for logprobs in told if logprobs)


@pytest.mark.parametrize("wrong", [-1, 21, True, 1.5])
def test_a_wrong_count_of_log_probabilities_is_refused(model: OpenModel, wrong: Any) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        model.generate(ask(logprobs=wrong))


def test_tools_and_options_reach_the_template(model: OpenModel) -> None:
    tool = {"type": "function", "function": {"name": "draw", "parameters": {}}}
    plain = len(model.encode(model.render((Message("user", "a red cat"),))))
    _, result = run(model, ask(tools=(tool,), template_options={"mood": "dark"}, max_tokens=1))
    assert result.usage.prompt == plain + len(model.encode(f"<tools>{json.dumps([tool])} dark</tools>"))


def test_tool_turns_reach_the_template(model: OpenModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "draw", "arguments": {"what": "cat"}}}
    turns = (
        Message("user", "draw"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "done", tool_call_id="1"),
    )
    assert "<|im_start|>tool\ndone<|im_end|>" in model.render(turns)
    assert run(model, ask(messages=turns, max_tokens=1))[1].usage.completion == 1


def test_the_vector_of_a_text_is_what_transformers_computes(model: OpenModel, checkpoint: Path) -> None:
    ids = [*range(40, 300)]  # more than a chunk
    expected = load_model(checkpoint).model(torch.tensor([ids])).last_hidden_state[0, -1]
    assert model.embed(ids) == pytest.approx(expected.tolist(), abs=2e-3)
    with pytest.raises(RequestError, match="longer than the context"):
        model.embed([1] * (CONTEXT + 1))
    with pytest.raises(RequestError, match="not one of"):
        model.embed([100_000])


def test_concurrent_requests_give_the_same_texts_as_alone(model: OpenModel) -> None:
    requests = [ask(f"cat number {place}", sampling=Sampling(seed=place), max_tokens=10 + place) for place in range(12)]
    alone = [run(model, request)[1] for request in requests]
    waiting = [model.prepared(request) for request in requests]
    steps = 0

    def arrivals() -> list[Prepared]:
        nonlocal steps
        steps += 1
        return [waiting.pop(0)] if waiting and steps % 3 == 1 else []

    results: dict[int, Result] = {}
    most = 0
    for event in model.serve(arrivals):
        if event.result is not None:
            results[event.request] = event.result
        most = max(most, steps)
    assert [results[place].ids for place in range(12)] == [result.ids for result in alone]
    assert all(result.seconds["first_token"] <= result.seconds["total"] for result in results.values())
    # Each tells of its own time only: the stages of one that came late do not hold what the earlier ones cost.
    assert results[11].stages["decode"].seconds <= results[11].seconds["total"]


def test_nobody_came(model: OpenModel) -> None:
    assert list(model.serve(list)) == []


def test_one_of_many_can_be_stopped_and_another_takes_its_place(model: OpenModel) -> None:
    waiting = [model.prepared(ask(f"number {place}", max_tokens=60)) for place in range(10)]
    seen: dict[int, int] = {}
    results: dict[int, Result] = {}

    def arrivals() -> list[Prepared]:
        came, waiting[:] = waiting[:], []
        return came

    for event in model.serve(arrivals, cancel_request=lambda number: number == 2 and seen.get(2, 0) >= 3):
        seen[event.request] = seen.get(event.request, 0) + (event.token is not None)
        if event.result is not None:
            results[event.request] = event.result
    assert results[2].finish == "cancelled"
    assert seen[2] == 3
    assert results.keys() == {*range(10)}
    assert "cancelled" not in {results[place].finish for place in results if place != 2}
    assert sum(len(results[place].ids) == 60 for place in results) >= 8  # a text may end before its limit


def test_a_text_that_cannot_fit_is_refused_unread(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.tokenizer), "encode", None)  # 7 MB of text take half a minute
    with pytest.raises(RequestError, match=rf"more than \d+ tokens and the context is {CONTEXT}; shorten it"):
        model.prepared(ask("x" * 7_000_000))
