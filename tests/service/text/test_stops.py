from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import RequestError
from onedesk.service.text.stops import TOTAL_LIMIT, StopMatcher


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By brute force: read a character at a time; the first stop to be complete, the longest of those, is cut."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def could_become(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if n <= len(stop) and text.endswith(stop[:n])), default=0
    )


@settings(max_examples=600, deadline=None)
@given(
    text=st.text(alphabet="ab\n😀", max_size=40),
    stops=st.lists(st.text(alphabet="ab\n😀", min_size=1, max_size=5), max_size=6),
    data=st.data(),
)
def test_any_text_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, shown, read, rest = StopMatcher(stops), "", "", text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        shown += matcher.push(rest[:length])
        read, rest = read + rest[:length], rest[length:]
        if not matcher.stopped:
            assert len(read) - len(shown) == could_become(read, stops)
    assert (shown + matcher.finish(), matcher.stopped) == expected(text, stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["abc E", "N", "D tail"], "abc "),
        (["\nUser:"], ["Hi.", "\n", "Us", "er", ":", " more"], "Hi."),
        (["。"], ["你好", "。", "再见"], "你好"),
        (["👩🏽‍🚀"], ["go 👩", "🏽", "\u200d", "🚀!"], "go "),
        (["abcd", "bc"], ["abcd"], "a"),
        (["bc", "abc"], ["xabc"], "x"),
        (["aab"], ["aaaab"], "aa"),
        (["stop"], ["st", "stop"], "st"),
        (["stop", "stop"], ["xstop"], "x"),
    ],
)
def test_the_stop_string_is_cut_and_what_follows(stops: list[str], pieces: list[str], shown: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(matcher.push(piece) for piece in pieces) + matcher.finish() == shown
    assert matcher.stopped
    assert matcher.push("more") == ""


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert [matcher.push(piece) for piece in ("a", "", "bc\n")] == ["a", "", "bc\n"]
    assert matcher.finish() == ""


def test_what_became_no_stop_comes_out_in_the_end() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("text </ans") == "text "
    assert (matcher.finish(), matcher.stopped) == ("</ans", False)


def test_ten_thousand_stops() -> None:
    dice = random.Random(7)
    stops = ["#" + "".join(dice.choice("0123456789") for _ in range(12)) for _ in range(10_000)]
    text = "#0123 filler " * 5_000
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text[place : place + 3]) for place in range(0, len(text), 3))
    assert text.startswith(shown)
    assert len(text) - len(shown) < 13
    assert matcher.push(stops[4_321] + "tail") == text[len(shown) :]
    assert matcher.stopped


def test_a_long_stop_that_nearly_comes_again_and_again() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop])
    text = "a" * 49_999 + "c"
    shown = "".join(matcher.push(text) for _ in range(10))
    assert shown + matcher.push(stop) == text * 10
    assert matcher.stopped


def test_stop_strings_that_cannot_be_are_refused() -> None:
    with pytest.raises(RequestError, match="a stop string is empty"):
        StopMatcher(["a", ""])
    with pytest.raises(RequestError, match=r"have 200,001 characters; use at most 200,000"):
        StopMatcher(["a" * TOTAL_LIMIT, "b"])
