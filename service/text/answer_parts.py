"""An answer while it is written, as the parts that APIs have for it: thoughts, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .tool_call_stream import CallArguments, CallEnd, CallEvent, CallStart, ToolCallStream
from .tool_calls import ThoughtCalls


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


Part: TypeAlias = Thought | CallEvent


class AnswerParts:
    """Takes text and reasoning in pieces and gives their parts in order.

    Without `tools` (as the OpenAI API has them) no call is looked for. With `one_call` nothing comes after the first
    complete call.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool = False) -> None:
        self._calls = ToolCallStream(tools) if tools else None
        self._thoughts = ThoughtCalls(tools) if tools else None
        self._one_call = one_call
        self._ended = False  # whether all calls that are wanted are there
        self.called = False  # whether a call has begun

    @property
    def plain(self) -> bool:
        """Whether each piece is a part of its own, as it comes."""
        return self._calls is None

    def push(self, text: str, reasoning: str) -> list[Part]:
        """What is certain now. A call in thoughts may turn out to be one until the answer begins."""
        parts: list[Part] = []
        if self._thoughts is not None:
            reasoning = self._thoughts.push(reasoning)
            if text.strip():
                reasoning, self._thoughts = reasoning + self._thoughts.closed(), None
        if reasoning:
            parts.append(Thought(reasoning))
        if text:
            parts += [text] if self._calls is None else self._calls.push(text)
        return self._wanted(parts)

    def finish(self) -> list[Part]:
        """The answer has ended: what was held back."""
        parts: list[Part] = []
        if self._thoughts is not None:
            rest, calls = self._thoughts.finish()
            parts += [Thought(rest)] if rest else []
            for call in calls:
                parts += (CallStart(call.name), CallArguments(call.arguments), CallEnd(True, ""))
        return self._wanted([*parts, *(self._calls.finish() if self._calls is not None else ())])

    def _wanted(self, parts: Iterable[Part]) -> list[Part]:
        wanted: list[Part] = []
        for part in parts:
            if self._ended:
                break
            wanted.append(part)
            self.called = self.called or isinstance(part, CallStart)
            self._ended = self._one_call and isinstance(part, CallEnd) and part.complete
        return wanted
