"""Prefix caching: how much of the next prompt is reused, and that completions stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import CONTEXT, ask
from choices import alone, run, same
from onedesk.service.api import OpenModel
from onedesk.service.core import Message, Request, Sampling
from onedesk.service.kernels.forward_batch import BLOCK, FEW_ROWS

LONG = "You are a careful writer of prompts. " * 8


def with_system(text: str, **changes: Any) -> Request:
    return ask(messages=(Message("system", LONG), Message("user", text)), **changes)


def test_a_system_prompt_is_read_once(model: OpenModel) -> None:
    model.give_way()
    first = run(model, with_system("a cat"))[0, 0]
    assert first.usage.cached == 0
    second = run(model, with_system("a dog"))[0, 0]
    shared = len(model.encode(model.render((Message("system", LONG),)))) // BLOCK * BLOCK
    assert second.usage.cached in (shared - BLOCK, shared)
    assert same(second, alone(model, with_system("a dog")))
    again = run(model, with_system("a cat"))[0, 0]
    assert again.usage.cached == (again.usage.prompt - FEW_ROWS - 1) // BLOCK * BLOCK
    assert same(again, first)


@pytest.mark.parametrize("tail", [*range(1, 12), 31, 32, 33, 224, 225, 231, 232, 233])
def test_scores_do_not_depend_on_the_cached_prefix(model: OpenModel, tail: int) -> None:
    """After a prefix of 64 tokens, with last chunks of every awkward length."""
    model.load()
    session = model.session
    assert session is not None
    ids = [3 + (7 * place) % 250 for place in range(64 + tail)]
    scores = []
    for kept in (False, True):
        shared = session.prefix.match(ids[:-FEW_ROWS]) if kept else []
        with session.runner.kv.open(CONTEXT, shared) as kv:
            assert kv.length == (min(64 + tail - FEW_ROWS - 1, 64) // BLOCK * BLOCK if kept else 0)
            scores.append(session.runner.prefill(kv, ids[kv.length :], None, lambda _: None).clone())
            if not kept:
                session.prefix.insert(ids[:64], kv.table)
    assert torch.equal(scores[0], scores[1])
    session.prefix.clear()


def test_prompts_of_one_list_share_their_beginning(model: OpenModel) -> None:
    model.give_way()
    found = run(model, *(with_system(f"item {place}") for place in range(5)))
    assert [result.usage.cached > 200 for _, result in sorted(found.items())] == [False, True, True, True, True]


def test_scoring_keeps_the_prefix_and_eviction_drops_it(model: OpenModel) -> None:
    run(model, with_system("a cat"))
    model.score(range(3, 60))
    model.embed_prompt("a small text", [-1])
    assert run(model, with_system("a dog"))[0, 0].usage.cached > 200
    model.give_way()
    assert run(model, with_system("a dog"))[0, 0].usage.cached == 0


def test_a_prefix_gives_way_to_whoever_needs_the_room(model: OpenModel) -> None:
    run(model, with_system("a cat"))
    big = Request(ids=tuple(5 + place % 200 for place in range(CONTEXT - 20)), max_tokens=20, sampling=Sampling(seed=1))
    wanted = run(model, big)[0, 0]
    assert same(wanted, alone(model, big))
    assert run(model, with_system("a cat"))[0, 0].usage.cached < 200


def test_the_answer_is_part_of_the_next_turns_prefix(model: OpenModel) -> None:
    model.give_way()
    question = tuple(range(3, 43))
    first = run(model, Request(ids=question, max_tokens=40, sampling=Sampling(seed=3, logit_bias={2: -100.0})))[0, 0]
    following = Request(ids=(*question, *first.ids, 7, 8), max_tokens=5, sampling=Sampling(seed=3))
    found = run(model, following)[0, 0]
    assert found.usage.cached == (len(question) + len(first.ids) + 2 - FEW_ROWS - 1) // BLOCK * BLOCK
    assert same(found, alone(model, following))
