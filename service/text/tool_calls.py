"""Tool calls that a model writes into its answer, taken out of the text: JSON as Qwen3 writes it, or tags as Qwen3-Coder and Qwen3.5 do.

<tool_call>                                      <tool_call>
{"name": "draw", "arguments": {"what": "cat"}}   <function=draw><parameter=what>
</tool_call>                                     cat
                                                 </parameter></function>
                                                 </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


# What stands before and behind a call's JSON where one is forced.
FRAME = (f"{OPEN}\n", f"\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name and its arguments, an object as JSON text."""

    name: str
    arguments: str


def call_schema(tools: Sequence[Mapping[str, Any]]) -> str:
    """A JSON Schema of a call of one of `tools`, as the OpenAI API has them."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps({"anyOf": calls})


class ToolCallSplitter:
    """Takes an answer in pieces; gives back text that is certain to be no call, and calls that are complete.

    `tools` (as the OpenAI API has them) say which type a parameter written between tags has. Blanks beside a call belong to it. What is
    no call after all, because it is malformed or never closed, comes back as the text that it is.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._types = {tool["function"]["name"]: _types(tool["function"]) for tool in tools}
        self._held = ""
        self._inside = False
        self._called = False  # whether a call came last
        self._spoken = False  # whether there was text

    def push(self, text: str) -> list[str | ToolCall]:
        """What `text` made certain, in order."""
        self._held += text
        return self._run(last=False)

    def finish(self) -> list[str | ToolCall]:
        """The answer has ended: what was held back."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._held and (self._call(out, last) if self._inside else self._text(out, last)):
            pass
        return out

    def _text(self, out: list[str | ToolCall], last: bool) -> bool:
        """Give text before the next call; True when one begins."""
        place = self._held.find(OPEN)
        if place >= 0:
            before, self._held, self._inside = self._held[:place].rstrip(), self._held[place:], True
        elif last:
            before, self._held = self._held, ""
        else:
            cut = len(self._held[: len(self._held) - _begun(self._held)].rstrip())
            before, self._held = self._held[:cut], self._held[cut:]
        if self._called:
            before = before.lstrip()
        if before:
            out.append("\n" + before if self._called and self._spoken else before)
            self._called, self._spoken = False, True
        return place >= 0

    def _call(self, out: list[str | ToolCall], last: bool) -> bool:
        """Give the call that is held from its opening tag on, once it is closed; True then."""
        place = self._held.find(CLOSE)
        if place < 0 and not last:
            return False
        end = len(self._held) if place < 0 else place + len(CLOSE)
        call = self._read(self._held[len(OPEN) : end].removesuffix(CLOSE).strip())
        out.append(self._held[:end] if call is None else call)
        self._called, self._spoken = call is not None, self._spoken or call is None
        self._held, self._inside = self._held[end:], False
        return True

    def _read(self, body: str) -> ToolCall | None:
        if body.startswith("{"):
            return _from_json(body)
        match = _FUNCTION.match(body)
        if match is None:
            return None
        name = match[1].strip()
        types = self._types.get(name, {})
        given = {key.strip(): _value(text, types.get(key.strip())) for key, text in _PARAMETER.findall(match[2])}
        return ToolCall(name, json.dumps(given, ensure_ascii=False))


def _from_json(body: str) -> ToolCall | None:
    document = _parsed(body)
    if not isinstance(document, dict):
        return None
    name, arguments = document.get("name"), document.get("arguments", document.get("parameters", {}))
    if isinstance(arguments, str):  # some write the object as a text of its own
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _types(function: Mapping[str, Any]) -> dict[str, Any]:
    """Type by parameter, of a tool's JSON Schema."""
    properties = (function.get("parameters") or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}


def _value(text: str, kind: Any) -> Any:
    """A parameter between tags: a text stays one, anything else is JSON where it can be read as such."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    if text.strip() == "null":
        return None
    value = _parsed(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text) if value is None else value


def _parsed(text: str) -> Any:
    """The JSON document, None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _begun(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of the opening tag."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
