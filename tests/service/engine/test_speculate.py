"""Prompt lookup against a plain search, and the bound on what rejected draft tokens may cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.engine.speculate import (
    EXTRAPOLATION_FACTOR,
    MAX_LOSS,
    NGRAM_LENGTHS,
    DraftLimits,
    PassCosts,
    PromptLookup,
    Speculator,
)


def followers(ids: list[int], most: int) -> tuple[int, list[int]]:
    """What PromptLookup should propose, by a plain search."""
    for length in NGRAM_LENGTHS:
        latest = ids[len(ids) - length :]
        places = [i for i in range(len(ids) - length) if ids[i : i + length] == latest] if len(ids) > length else []
        if places:
            text = list(ids)
            for place in range(places[-1] + length, places[-1] + length + most):
                text.append(text[place])
            return length, text[len(ids) :]
    return 0, []


@given(ids=st.lists(st.integers(0, 3), max_size=40), most=st.integers(1, 9))
def test_a_draft_is_what_followed_last_time(ids: list[int], most: int) -> None:
    assert PromptLookup(ids).propose(most) == followers(ids, most)


def test_a_cycle_is_continued() -> None:
    assert PromptLookup([1, 2, 3] * 4).propose(7) == (4, [1, 2, 3, 1, 2, 3, 1])


def run(text: list[int], seconds: dict[int, float], prompt: int, most: int = 7) -> tuple[float, float, Speculator]:
    """Decode `text` after its first `prompt` tokens with passes of these costs: (seconds taken, seconds of single
    steps, speculator).
    """
    speculator = Speculator(text[:prompt], PassCosts())
    taken, at, worst = 0.0, prompt, 0.0
    while at < len(text):
        draft = speculator.plan(DraftLimits(min(most, len(text) - at - 1))).tokens
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[at + accepted]:
            accepted += 1
        for token in text[at : at + accepted + 1]:
            speculator.push(token)
        at += accepted + 1
        taken += seconds[len(draft) + 1]
        speculator.record(len(draft), accepted, seconds[len(draft) + 1])
        worst = max(worst, taken - (at - prompt) * seconds[1])
        assert worst <= MAX_LOSS * taken + 1e-9, "draft tokens have cost more than they may"
    return taken, (len(text) - prompt) * seconds[1], speculator


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    words=st.integers(2, 40),
    growth=st.floats(0.0, 1.0),
    repeats=st.floats(0.0, 1.0),
)
def test_drafting_never_costs_more_than_its_share(seed: int, words: int, growth: float, repeats: float) -> None:
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < 600:
        if text and draw.random() < repeats:
            at = draw.randrange(len(text))
            text += text[at : at + draw.randrange(1, 20)]
        else:
            text.append(draw.randrange(words))
    run(text, {rows: 1 + growth * (rows - 1) for rows in range(1, 9)}, 50)


def test_a_text_that_repeats_itself_is_faster() -> None:
    draw = random.Random(1)
    page = [draw.randrange(1000) for _ in range(200)]
    taken, plain, speculator = run(page * 8, {rows: 1 + 0.1 * (rows - 1) for rows in range(1, 9)}, 200)
    assert taken < 0.35 * plain
    assert speculator.accepted > 0.8 * speculator.proposed


def test_nothing_is_drafted_without_repeats() -> None:
    taken, plain, speculator = run(list(range(500)), {rows: float(rows) for rows in range(1, 9)}, 100)
    assert (taken, speculator.proposed) == (plain, 0)


def test_expensive_rows_are_not_worth_doubtful_drafts() -> None:
    draw = random.Random(2)
    text = [draw.randrange(2) for _ in range(800)]
    _, _, speculator = run(text, {rows: float(rows) for rows in range(1, 9)}, 50)
    assert speculator.proposed < 30


def test_costs_of_unmeasured_widths() -> None:
    costs = PassCosts()
    assert costs.upper_bound(3) == costs.estimate(3) == 0.0
    costs.record(1, 1.0)
    assert (costs.upper_bound(4), costs.estimate(4)) == (4.0 * EXTRAPOLATION_FACTOR, 1.0)
    costs.record(5, 2.0)
    assert costs.upper_bound(3) == 1.5
    assert costs.estimate(3) == pytest.approx(1 + 0.5 / 3), "a third of the extra cost of one pass"
    costs.record(5, 3.0)
    assert 2.0 < costs.upper_bound(5) < 3.0
    for _ in range(200):
        costs.record(5, 3.0)
    assert 1.95 < costs.estimate(3) <= costs.upper_bound(3) <= 2.0


def test_a_width_measured_slow_once_is_tried_again() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.record(1, 1.0)
    costs.record(2, 1.9)
    speculator = Speculator([1, 2, 3] * 9, costs, spent=1000.0)
    assert speculator.plan(DraftLimits(1)).tokens == (1,)
    for _ in range(20):
        costs.record(2, 1.9)
    assert speculator.plan(DraftLimits(1)).tokens == ()


def test_unread_rows_count_as_risk_only() -> None:
    costs = PassCosts({1: 1.0, 2: 1.2}, draft_share=0.3, measured_draft=0.3)
    text = range(100)
    assert Speculator(text, costs, spent=1000.0).plan(DraftLimits(1, unread=8)).layer_tokens == 1
    assert Speculator(text, costs, spent=80.0).plan(DraftLimits(1, unread=8)).layer_tokens == 0
    assert Speculator(text, costs, spent=80.0).plan(DraftLimits(1, unread=2)).layer_tokens == 1
