"""Dynamic prompts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.nodes.wildcards import expand

TEXTS = st.text(alphabet="ab{}|\\ ", max_size=40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ('{"prompt": "a", "n": {"b": 1}}', '{"prompt": "a", "n": {"b": 1}}'),
        (r"\{a\|b\}", "{a|b}"),
        (r"back\\slash \n \x", r"back\slash \n \x"),
        ("a | b", "a | b"),
        ("open { a | b", "open { a | b"),
        ("close } a | b", "close } a | b"),
        ("{}", "{}"),
        ("ends in \\", "ends in \\"),
    ],
)
def test_what_is_no_group_stays(text: str, expected: str):
    assert expand(text, 0) == expected


def test_every_choice_is_drawn_and_nothing_else():
    assert {expand("{red|green|blue}", seed) for seed in range(60)} == {"red", "green", "blue"}
    assert {expand("a{|b}", seed) for seed in range(30)} == {"a", "ab"}


def test_groups_may_be_nested():
    assert {expand("{a|{b|c}} {d|e{f|g}}", seed) for seed in range(200)} == {
        f"{x} {y}" for x in "abc" for y in ("d", "ef", "eg")
    }


def test_a_choice_may_hold_escaped_signs():
    assert {expand(r"{a\|b|\{c\}}", seed) for seed in range(30)} == {"a|b", "{c}"}


@given(TEXTS, st.integers(0, 2**64 - 1))
def test_same_text_and_seed_give_the_same_and_leave_random_alone(text: str, seed: int):
    before = random.getstate()
    assert expand(text, seed) == expand(text, seed)
    assert random.getstate() == before


def test_deep_nesting_and_long_texts_end():
    assert expand("{" * 50_000 + "}" * 50_000, 1) == "{" * 50_000 + "}" * 50_000
    assert expand("{a|" * 20_000, 1) == "{a|" * 20_000
