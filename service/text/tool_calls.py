"""Tool calls that a model writes into its answer, taken out of the text: JSON as Qwen3 writes it, or tags as
Qwen3-Coder and Qwen3.5 do.

<tool_call>                                      <tool_call>
{"name": "draw", "arguments": {"what": "cat"}}   <function=draw><parameter=what>
</tool_call>                                     cat
                                                 </parameter></function>
                                                 </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .tool_call_stream import CLOSE, OPEN, CallArguments, CallEvent, CallStart, ToolCallStream
from .tool_schema import embedded_schema

__all__ = ["CLOSE", "FRAME", "OPEN", "ThoughtCalls", "ToolCall", "ToolCallSplitter", "call_schema", "split_calls"]

# Stand before and after a call's JSON where one is forced.
FRAME = (f"{OPEN}\n", f"\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name and its arguments, an object as JSON text."""

    name: str
    arguments: str


def call_schema(tools: Sequence[Mapping[str, Any]]) -> str:
    """A JSON Schema of a call of one of `tools`, as the OpenAI API has them.

    Arguments that a tool does not declare are left out: a small model would go on to invent them.
    """
    calls, definitions = [], {}
    for at, tool in enumerate(tools):
        parameters = tool["function"].get("parameters") or {"type": "object"}
        if "properties" in parameters:
            parameters = {"additionalProperties": False, **parameters}
        definitions[f"tool{at}"] = embedded_schema(parameters, f"tool{at}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": f"#/$defs/tool{at}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return json.dumps({"anyOf": calls, "$defs": definitions})


class ToolCallSplitter:
    """As ToolCallStream, but gives each call as a whole, and a call that is not complete as the text that it is."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._stream = ToolCallStream(tools)
        self._name = ""
        self._arguments: list[str] = []

    def push(self, text: str) -> list[str | ToolCall]:
        """What `text` made certain, in order."""
        return self._whole(self._stream.push(text))

    def finish(self) -> list[str | ToolCall]:
        """The answer has ended: what was held back."""
        return self._whole(self._stream.finish())

    def _whole(self, events: Iterable[CallEvent]) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        for event in events:
            if isinstance(event, str):
                out.append(event)
            elif isinstance(event, CallStart):
                self._name, self._arguments = event.name, []
            elif isinstance(event, CallArguments):
                self._arguments.append(event.text)
            else:
                out.append(ToolCall(self._name, _normal("".join(self._arguments))) if event.complete else event.raw)
        return out


class ThoughtCalls:
    """Looks for calls in thoughts: a complete call in thoughts that are never closed is a call, one in closed thoughts
    is a thought.

    Reasoning from the first tag of a call on is held back until one or the other is known.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._tags = (OPEN, *(f"<function={tool['function']['name']}>" for tool in tools))
        self._held = ""
        self._holding = False

    def push(self, reasoning: str) -> str:
        """Take a piece of reasoning; returns what certainly is some."""
        self._held += reasoning
        if self._holding:
            return ""
        begun = [at for tag in self._tags if (at := self._held.find(tag)) >= 0]
        if begun:
            self._holding, cut = True, min(begun)
        else:
            last = self._held.rfind("<")
            tail = self._held[last:]
            cut = last if last >= 0 and any(tag.startswith(tail) for tag in self._tags) else len(self._held)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def closed(self) -> str:
        """The thoughts were closed: what was held back is reasoning."""
        held, self._held, self._holding = self._held, "", False
        return held

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended inside the thoughts: the rest of the reasoning, and the calls."""
        held = self.closed()
        splitter = ToolCallSplitter(self._tools)
        found = [*splitter.push(held), *splitter.finish()]
        calls = [item for item in found if isinstance(item, ToolCall)]
        return ("".join(item for item in found if isinstance(item, str)) if calls else held), calls


def split_calls(
    text: str, reasoning: str, tools: Sequence[Mapping[str, Any]], *, one_call: bool = False
) -> tuple[str, str, list[ToolCall]]:
    """Text, reasoning and calls of a whole answer; with `one_call` without anything that comes after the first."""
    if not tools:
        return text, reasoning, []
    splitter = ToolCallSplitter(tools)
    found = [*splitter.push(text), *splitter.finish()]
    if not text.strip() and reasoning:
        thoughts = ThoughtCalls(tools)
        shown = thoughts.push(reasoning)
        rest, calls = thoughts.finish()
        reasoning, found = shown + rest, [*calls] or found
    first = next((at for at, item in enumerate(found) if isinstance(item, ToolCall)), len(found))
    if one_call:
        found = found[: first + 1]
    calls = [item for item in found if isinstance(item, ToolCall)]
    return "".join(item for item in found if isinstance(item, str)), reasoning, calls


def _normal(arguments: str) -> str:
    return json.dumps(json.loads(arguments), ensure_ascii=False)
