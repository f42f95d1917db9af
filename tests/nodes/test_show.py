"""What nodes show: safe text, statistics, amounts."""

from __future__ import annotations

from onedesk.nodes.show import (
    SHOWN_CHARACTERS,
    View,
    displayable,
    numbered,
    returned,
    statistics,
)
from onedesk.service.core import Progress, Result, Usage
from onedesk.service.memory.pool import Released


def result(**changes: object) -> Result:
    values = {
        "text": "hello",
        "reasoning": "",
        "ids": (1, 2, 3),
        "finish": "stop",
        "seed": 2**64 - 1,
        "usage": Usage(prompt=10, completion=5, reasoning=2),
        "seconds": {"load": 0.0, "first_token": 0.5, "total": 2.5},
        "stages": {},
    }
    return Result(**(values | changes))


def test_control_characters_are_marked_and_the_rest_stays():
    assert displayable("a\0b\x1b[31m\u202e\ud800\x85") == "a\ufffdb\ufffd[31m\ufffd\ufffd\ufffd"
    assert displayable("line\r\nend\r\ttab 🧑‍🎨 مرحبا 红 <b>&amp;") == "line\nend\n\ttab 🧑‍🎨 مرحبا 红 <b>&amp;"


def test_a_long_text_shows_its_end():
    shown = displayable("x" * SHOWN_CHARACTERS + "end")
    assert shown.startswith("… x")
    assert shown.endswith("xend")
    assert len(shown) == SHOWN_CHARACTERS + 2


def test_statistics_are_one_line_with_every_figure():
    assert statistics("m", result()) == (
        "m: 10 tokens read, 5 written (2 of them thinking), 2.0 tokens/s; first token 0.50 s, total 2.50 s; "
        "seed 18446744073709551615; finished by itself"
    )
    assert "load 1.25 s, first token" in statistics(
        "m", result(seconds={"load": 1.25, "first_token": 1.5, "total": 2.0})
    )
    assert "1 written; " in statistics("m", result(usage=Usage(1, 1, 0)))


def test_what_gave_way_is_summed():
    parts = [Released("m", 1 << 30, 1 << 30, 0.25), Released("m", 1 << 29, 1 << 28, 0.25)]
    assert returned(parts) == "gave way: m, asked 1.5 GiB, measured 1.2 GiB back in 0.50 s"
    assert returned([]) == ""


def test_answers_are_numbered_unless_there_is_one():
    assert numbered(["a"], 1) == "a"
    assert numbered(["a", "b"], 3) == "[1/3] a\n\n[2/3] b"
    assert numbered([], 1) == ""


def test_a_view_tells_each_change_once():
    view = View("7")
    assert view.changes() == (None, None)
    view.write("a")
    view.report(Progress("decode", 1, 9))
    assert view.changes() == ("a", Progress("decode", 1, 9))
    assert view.changes() == (None, None)
    view.write("ab")
    assert view.changes() == ("ab", None)
    texts = ["a"]
    view.follow(lambda: "".join(texts))
    texts.append("c")
    assert view.changes() == ("ac", None)


def test_a_load_is_shown_until_done_even_during_prefill():
    view = View("7")
    view.report(Progress("load", 10, 100))
    view.report(Progress("prefill", 0, 50))
    assert view.changes()[1] == Progress("load", 10, 100)
    view.report(Progress("load", 100, 100))
    assert view.changes()[1] == Progress("prefill", 0, 50)
    view.report(Progress("decode", 1, 9))
    assert view.changes()[1] == Progress("decode", 1, 9)
