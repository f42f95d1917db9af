"""Guesses against a plain search, and the promise that they never cost more than they may."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.engine.speculate import (
    BEYOND,
    LENGTHS,
    RISK,
    Lookup,
    PassCosts,
    Room,
    Speculator,
)


def followers(ids: list[int], most: int) -> tuple[int, list[int]]:
    """What Lookup should guess, by looking through everything."""
    for length in LENGTHS:
        latest = ids[len(ids) - length :]
        places = [i for i in range(len(ids) - length) if ids[i : i + length] == latest] if len(ids) > length else []
        if places:
            text = list(ids)
            for place in range(places[-1] + length, places[-1] + length + most):
                text.append(text[place])
            return length, text[len(ids) :]
    return 0, []


@given(ids=st.lists(st.integers(0, 3), max_size=40), most=st.integers(1, 9))
def test_a_guess_is_what_followed_last_time(ids: list[int], most: int) -> None:
    assert Lookup(ids).guess(most) == followers(ids, most)


def test_a_cycle_is_guessed_as_far_as_asked() -> None:
    assert Lookup([1, 2, 3] * 4).guess(7) == (4, [1, 2, 3, 1, 2, 3, 1])


def run(text: list[int], seconds: dict[int, float], prompt: int, most: int = 7) -> tuple[float, float, Speculator]:
    """Write `text` behind its first `prompt` tokens with passes of these costs: (seconds taken, seconds of single steps, speculator)."""
    guesser = Speculator(text[:prompt], PassCosts())
    taken, at, worst = 0.0, prompt, 0.0
    while at < len(text):
        guess = guesser.plan(Room(min(most, len(text) - at - 1))).tokens
        right = 0
        while right < len(guess) and guess[right] == text[at + right]:
            right += 1
        for token in text[at : at + right + 1]:
            guesser.push(token)
        at += right + 1
        taken += seconds[len(guess) + 1]
        guesser.note(len(guess), right, seconds[len(guess) + 1])
        worst = max(worst, taken - (at - prompt) * seconds[1])
        assert worst <= RISK * taken + 1e-9, "guesses have cost more than they may"
    return taken, (len(text) - prompt) * seconds[1], guesser


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    words=st.integers(2, 40),
    growth=st.floats(0.0, 1.0),
    repeats=st.floats(0.0, 1.0),
)
def test_guessing_never_costs_more_than_its_share(seed: int, words: int, growth: float, repeats: float) -> None:
    draw = random.Random(seed)
    text: list[int] = []
    while len(text) < 600:
        if text and draw.random() < repeats:
            at = draw.randrange(len(text))
            text += text[at : at + draw.randrange(1, 20)]
        else:
            text.append(draw.randrange(words))
    run(text, {rows: 1 + growth * (rows - 1) for rows in range(1, 9)}, 50)


def test_a_text_that_repeats_itself_is_written_much_sooner() -> None:
    draw = random.Random(1)
    page = [draw.randrange(1000) for _ in range(200)]
    taken, plain, guesser = run(page * 8, {rows: 1 + 0.1 * (rows - 1) for rows in range(1, 9)}, 200)
    assert taken < 0.35 * plain
    assert guesser.accepted > 0.8 * guesser.proposed


def test_a_text_that_never_repeats_is_never_guessed_at() -> None:
    taken, plain, guesser = run(list(range(500)), {rows: float(rows) for rows in range(1, 9)}, 100)
    assert (taken, guesser.proposed) == (plain, 0)


def test_a_pass_that_costs_a_step_a_row_is_not_worth_a_doubtful_guess() -> None:
    draw = random.Random(2)
    text = [draw.randrange(2) for _ in range(800)]
    _, _, guesser = run(text, {rows: float(rows) for rows in range(1, 9)}, 50)
    assert guesser.proposed < 30


def test_costs_between_measured_ones_are_in_between_and_beyond_them_grow() -> None:
    costs = PassCosts()
    assert costs.at_most(3) == costs.likely(3) == 0.0
    costs.note(1, 1.0)
    assert (costs.at_most(4), costs.likely(4)) == (4.0 * BEYOND, 1.0)
    costs.note(5, 2.0)
    assert costs.at_most(3) == 1.5
    assert costs.likely(3) == pytest.approx(1 + 0.5 / 3), "a third of what one pass has cost more"
    costs.note(5, 3.0)
    assert 2.0 < costs.at_most(5) < 3.0
    for _ in range(200):
        costs.note(5, 3.0)
    assert 1.95 < costs.likely(3) <= costs.at_most(3) <= 2.0


def test_a_width_that_a_busy_moment_made_slow_is_tried_again() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.note(1, 1.0)
    costs.note(2, 1.9)
    speculator = Speculator([1, 2, 3] * 9, costs, spent=1000.0)
    assert speculator.plan(Room(1)).tokens == (1,)
    for _ in range(20):
        costs.note(2, 1.9)
    assert speculator.plan(Room(1)).tokens == ()


def test_what_a_pause_left_unread_counts_as_a_risk_not_against_every_guess() -> None:
    costs = PassCosts({1: 1.0, 2: 1.2}, guess_share=0.3, drafted=0.3)
    text = range(100)
    assert Speculator(text, costs, spent=1000.0).plan(Room(1, unread=8)).drafts == 1
    assert Speculator(text, costs, spent=80.0).plan(Room(1, unread=8)).drafts == 0
    assert Speculator(text, costs, spent=80.0).plan(Room(1, unread=2)).drafts == 1
