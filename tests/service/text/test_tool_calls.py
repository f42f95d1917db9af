"""Tool calls in an answer: found in both forms, however the text is cut, and never at the cost of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.text.tool_calls import ToolCall, ToolCallSplitter

DRAW = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "count": {"type": "integer"}, "at": {"type": "array"}, "big": {"type": "boolean"}},
        },
    },
}
AS_JSON = '<tool_call>\n{"name": "draw", "arguments": {"what": "a 猫", "count": 2}}\n</tool_call>'
AS_TAGS = """<tool_call>
<function=draw>
<parameter=what>
12
</parameter>
<parameter=count>
12
</parameter>
<parameter=at>
[1, 2]
</parameter>
<parameter=big>
True
</parameter>
<parameter=else>
null
</parameter>
</function>
</tool_call>"""


def split(*pieces: str) -> tuple[str, list[ToolCall]]:
    """The text joined, and the calls."""
    splitter = ToolCallSplitter([DRAW])
    found: list[str | ToolCall] = []
    for piece in pieces:
        found += splitter.push(piece)
    found += splitter.finish()
    return "".join(item for item in found if isinstance(item, str)), [item for item in found if isinstance(item, ToolCall)]


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)]


def test_json() -> None:
    text, calls = split(f"I draw.\n{AS_JSON}\n")
    assert text == "I draw."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("draw", {"what": "a 猫", "count": 2})]
    assert "猫" in calls[0].arguments


def test_tags_have_the_types_of_the_tool() -> None:
    text, calls = split(AS_TAGS)
    assert text == ""
    assert [json.loads(call.arguments) for call in calls] == [{"what": "12", "count": 12, "at": [1, 2], "big": True, "else": None}]


def test_several_calls_and_text_between() -> None:
    text, calls = split(f"{AS_JSON}\n{AS_TAGS}\n\nand\n{AS_JSON}\nthat is all\n")
    assert text == "and\nthat is all\n"
    assert len(calls) == 3


@pytest.mark.parametrize(
    "text",
    [
        "no call at all\n",
        "a < b and <tool_cal",
        "<tool_call> is how calls begin",
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "draw", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "draw", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "draw"',
        "<tool_call>" + "[" * 50_000 + "</tool_call>",
        "",
        "  \n ",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert split(text) == (text, [])


def test_a_call_that_was_cut_short_after_its_content_counts() -> None:
    assert [call.name for call in split(AS_JSON.removesuffix("\n</tool_call>"))[1]] == ["draw"]


def test_arguments_as_a_text_of_their_own() -> None:
    assert split('<tool_call>{"name": "draw", "arguments": "{\\"what\\": \\"cat\\"}"}</tool_call>')[1] == [
        ToolCall("draw", '{"what": "cat"}')
    ]


@given(st.lists(st.sampled_from([AS_JSON, AS_TAGS, "text ", "\n", "<tool_call>", "<", "é"]), max_size=6), st.lists(st.integers(0, 10_000)))
def test_cutting_changes_nothing(parts: list[str], places: list[int]) -> None:
    whole = "".join(parts)
    assert split(*cut(whole, places)) == split(whole)
