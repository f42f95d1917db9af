"""The results of a list of requests, choice by choice, and the result of each request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onedesk.service.api import OpenModel
from onedesk.service.core import Event, Request, Result, Sampling

Place = tuple[int, int]

THINKING = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n<think>"


def results(events: Sequence[Event]) -> dict[Place, Result]:
    """The result of each choice; its events must add up to it, and none may follow it."""
    found: dict[Place, Result] = {}
    tokens: dict[Place, list[int]] = {}
    texts: dict[Place, str] = {}
    for event in events:
        place = event.request, event.choice
        assert place not in found, "an event after the result"
        if event.token is not None:
            tokens.setdefault(place, []).append(event.token)
        texts[place] = texts.get(place, "") + event.text
        if event.result is not None:
            found[place] = event.result
            assert tuple(tokens.get(place, [])) == event.result.ids
            assert event.result.text in ("", texts[place]) or event.result.reasoning
    return found


def run(model: OpenModel, *requests: Request, **options: Any) -> dict[Place, Result]:
    found = results(list(model.generate_batch(requests, **options)))
    check(model)
    return found


def check(model: OpenModel) -> None:
    """Nothing is held when nothing runs, except what is kept for reuse."""
    session = model.session
    assert session is not None
    session.runner.kv.check()
    assert session.runner.kv.available == session.runner.kv.blocks
    assert session.runner.kv.cold == len(session.prefix)


def alone(model: OpenModel, request: Request, choice: int = 0, *, known: dict[tuple[int, str], Result] = {}) -> Result:  # noqa: B006
    """One choice alone, without prefix cache and draft tokens; computed once for all tests."""
    seed = ((request.sampling.seed or 0) + choice) % 2**64
    single = replace(
        request, n=1, best_of=None, sampling=replace(request.sampling, seed=seed), prefix_reuse=False, speculation=False
    )
    key = (model.context, repr(single))
    if key not in known:
        known[key] = run(model, single)[0, 0]
    return known[key]


def same(one: Result, other: Result) -> bool:
    return (one.ids, one.text, one.reasoning, one.finish, one.seed) == (
        other.ids,
        other.text,
        other.reasoning,
        other.finish,
        other.seed,
    )


def tokens(events: Sequence[Event], request: int) -> int:
    return sum(event.request == request and event.token is not None for event in events)


def thinker(seed: int, **changes: Any) -> Request:
    """Reasons until its context is full: a random model almost never ends its reasoning."""
    asked = Request(
        prompt=THINKING, sampling=Sampling(seed=seed, temperature=0.5, top_k=0), max_tokens=10, repetition_stop=False
    )
    return replace(asked, **changes)
