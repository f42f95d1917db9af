"""Tool calls in an answer: found in both forms, however the text is cut, and never at the cost of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.text.tool_call_stream import CallArguments, CallEnd, CallStart, ToolCallStream
from onedesk.service.text.tool_calls import ToolCall, ToolCallSplitter, call_schema

DRAW = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string"},
                "count": {"type": "integer"},
                "at": {"type": "array"},
                "big": {"type": "boolean"},
            },
        },
    },
}
EMPTY = {"type": "function", "function": {"name": "stop"}}
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
    return "".join(item for item in found if isinstance(item, str)), [
        item for item in found if isinstance(item, ToolCall)
    ]


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
    assert [json.loads(call.arguments) for call in calls] == [
        {"what": "12", "count": 12, "at": [1, 2], "big": True, "else": None}
    ]


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


@given(
    st.lists(st.sampled_from([AS_JSON, AS_TAGS, "text ", "\n", "<tool_call>", "<", "é"]), max_size=6),
    st.lists(st.integers(0, 10_000)),
)
def test_cutting_changes_nothing(parts: list[str], places: list[int]) -> None:
    whole = "".join(parts)
    assert split(*cut(whole, places)) == split(whole)


@pytest.mark.parametrize(
    "text",
    [
        "a blank <tool_call> and text",
        "I say\n\n<tool_call>nothing</tool_call>\n",
        "<function=paint>\n<parameter=what>\ncat\n</parameter>\n</function>",  # no tool of that name
        "<tool_call><function=draw>\n<parameter=what>\na cat",
        '<tool_call>{"name": "draw", "arguments": {"what": "a c',
        '<tool_call>{"name": "draw", "arguments": {"what": [}}</tool_call>',
    ],
)
def test_text_around_what_is_no_call_is_kept_to_the_character(text: str) -> None:
    assert split(text) == (text, [])
    assert split(*text) == (text, [])


def test_a_call_may_begin_without_its_outer_tag() -> None:
    bare = "<function=draw>\n<parameter=what>\ncat\n</parameter>\n</function>"
    for text in (f"Now.\n{bare}", f"Now.\n{bare}\n</tool_call>", f"Now.\n{bare}\n{bare}\n</tool_call>\n"):
        said, calls = split(text)
        assert said == "Now."
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("draw", {"what": "cat"})] * text.count(
            "<function"
        )


def test_a_closing_tag_inside_a_text_ends_no_call() -> None:
    code = 'print("</tool_call>")'
    written = f'<tool_call>\n{{"name": "draw", "arguments": {json.dumps({"what": code})}}}\n</tool_call>'
    assert [json.loads(call.arguments) for call in split(written)[1]] == [{"what": code}]


SCHEMAS: list[tuple[dict[str, object], str, object]] = [
    ({"type": ["string", "null"]}, "94103", "94103"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "94103", "94103"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "94103", "94103"),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "94103", "94103"),
    ({"$ref": "#/$defs/Code"}, "94103", "94103"),
    ({"$ref": "#/$defs/Nested"}, "94103", "94103"),
    ({"allOf": [{"$ref": "#/$defs/Code"}, {"minLength": 2}]}, "true", "true"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "7"}, "7", "7"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "", ""),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}', '{"a": 1}'),
    ({"$ref": "#/$defs/Count"}, "12", 12),
    ({"type": "integer"}, "12.0", 12),
    ({"type": "number"}, "12", 12),
    ({"type": "boolean"}, "TRUE", True),
    ({"type": "boolean"}, "False", False),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": "object"}, "no object", "no object"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "array"}, "['a', 'it is', True]", ["a", "it is", True]),
    ({"type": "array"}, "[open('x')]", "[open('x')]"),
    ({"type": "object"}, "{'a': {1}}", "{'a': {1}}"),
    ({"type": "string"}, "['a']", "['a']"),
    ({"$ref": "#/$defs/Loop"}, "12", 12),
    ({"$ref": "http://127.0.0.1/"}, "12", 12),
    ({}, "12", 12),
]


@pytest.mark.parametrize(("schema", "text", "value"), SCHEMAS)
def test_parameters_have_the_type_that_the_resolved_schema_says(
    schema: dict[str, object], text: str, value: object
) -> None:
    definitions = {
        "Code": {"type": "string"},
        "Nested": {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]},
        "Count": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
    parameters = {"type": "object", "properties": {"code": schema}, "$defs": definitions}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    written = f"<tool_call>\n<function=find>\n<parameter=code>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([written], list(written)):
        splitter = ToolCallSplitter([tool])
        found = [item for piece in pieces for item in splitter.push(piece)] + splitter.finish()
        assert [json.loads(item.arguments) for item in found if isinstance(item, ToolCall)] == [{"code": value}]
        assert all(isinstance(item, ToolCall) for item in found)


@given(
    st.dictionaries(st.sampled_from(["what", "count", "é", 'a"b']), st.text(max_size=30), max_size=4), st.integers(1, 9)
)
def test_parts_of_the_arguments_come_as_they_are_written_and_join_to_the_object(
    values: dict[str, str], step: int
) -> None:
    kinds = {name: {"type": "string"} for name in values}
    tool = {"type": "function", "function": {"name": "draw", "parameters": {"properties": kinds}}}
    clean = {name: value.replace("<", "(") for name, value in values.items()}
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in clean.items())
    for body in (json.dumps({"name": "draw", "arguments": clean}), f"<function=draw>\n{parameters}</function>"):
        text = f"<tool_call>\n{body}\n</tool_call>"
        stream = ToolCallStream([tool])
        events = [
            event for at in range(0, len(text), step) for event in stream.push(text[at : at + step])
        ] + stream.finish()
        assert events[0] == CallStart("draw")
        assert events[-1] == CallEnd(True, text)
        assert json.loads("".join(event.text for event in events[1:-1] if isinstance(event, CallArguments))) == clean


def test_a_long_text_comes_while_it_is_written() -> None:
    stream = ToolCallStream([DRAW])
    begun = stream.push("<tool_call>\n<function=draw>\n<parameter=what>\nOnce")
    assert "".join(event.text for event in begun if isinstance(event, CallArguments)) == '{"what": "Once'
    assert stream.push(" upon") == [CallArguments(" upon")]
    stream = ToolCallStream([DRAW])
    begun = stream.push('<tool_call>\n{"name": "draw", "arguments": {"what": "On')
    assert begun == [CallStart("draw"), CallArguments('{"what": "On')]
    assert stream.push('ce\\"}') == [CallArguments('ce\\"}')]


def test_references_of_a_forced_call_hold() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Point"},
            "tree": {"$ref": "#"},
            "$ref": {"type": "string"},
            "d": {"default": {"$ref": "#/x"}},
        },
        "$defs": {"Point": {"type": "array", "items": {"$ref": "#/$defs/Number"}}, "Number": {"type": "integer"}},
    }
    schema = json.loads(
        call_schema([DRAW, {"type": "function", "function": {"name": "move", "parameters": parameters}}, EMPTY])
    )
    moved = schema["$defs"]["tool1"]
    assert moved["properties"]["at"] == {"$ref": "#/$defs/tool1/$defs/Point"}
    assert moved["properties"]["tree"] == {"$ref": "#/$defs/tool1"}
    assert moved["properties"]["$ref"] == {"type": "string"}
    assert moved["properties"]["d"] == {"default": {"$ref": "#/x"}}
    assert moved["$defs"]["Point"]["items"] == {"$ref": "#/$defs/tool1/$defs/Number"}
    assert schema["anyOf"][1]["properties"]["arguments"] == {"$ref": "#/$defs/tool1"}
    assert moved["additionalProperties"] is False
    assert schema["$defs"]["tool2"] == {"type": "object"}
