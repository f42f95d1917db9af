"""Responses as Anthropic's Messages API has them: a message of content blocks, or the events that build it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core import Event, Finish, Result, Usage
from ..text.answer_parts import AnswerParts, Part, Thought
from ..text.tokenizer import Tokenizer
from ..text.tool_call_stream import CallArguments, CallStart
from ..text.tool_calls import split_calls
from .error_documents import ApiError, anthropic_document
from .responses import Document, own_fields
from .typed_events import TypedEventsWriter

_STOP_REASONS: Mapping[Finish, str] = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "repetition": "max_tokens",
    "cancelled": "max_tokens",
}


class MessagesWriter(TypedEventsWriter):
    """Writes one response. `prompt` is the number of prompt tokens, `stop` the requested stop sequences; `tools` and
    `one_call` are as in AnswerParts.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        *,
        one_call: bool,
        prompt: int,
        stop: Sequence[str],
    ) -> None:
        super().__init__()
        self._head: Document = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._tokenizer = tokenizer
        self._tools = tools
        self._one_call = one_call
        self._prompt = prompt
        self._stop = stop
        self._parts = AnswerParts(tools, one_call=one_call)
        self._begun = False
        self._index = -1  # of the latest block
        self._kind = ""  # of the open block, "" for none

    def whole(self, total: Document) -> Document:
        """The message; `total` is its usage in chat form."""
        result = self.result()
        text, reasoning, calls = split_calls(result.text, result.reasoning, self._tools, one_call=self._one_call)
        content: list[Document] = [_thinking_block(reasoning)] if reasoning else []
        if text.strip() or not calls:
            content.append({"type": "text", "text": text})
        content += [_call_block(call.name, json.loads(call.arguments)) for call in calls]
        own = {"usage": _usage(result.usage), "onedesk": own_fields(result)}
        return self._head | {"content": content, **self._end(result, called=bool(calls)), **own}

    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """The stream's events for engine events that came together."""
        out: list[Document] = []
        if not self._begun:
            self._begun = True
            begun = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(Usage(self._prompt, 0, 0)),
            }
            out.append({"type": "message_start", "message": self._head | begun})
        for _, event in events:
            out += self._written(self._parts.push(event.text, event.reasoning))
            if event.result is not None:
                out += self._written(self._parts.finish()) + self._close()
                end = self._end(event.result, called=self._parts.called)
                own = {"usage": _usage(event.result.usage), "onedesk": own_fields(event.result)}
                out += [{"type": "message_delta", "delta": end, **own}, {"type": "message_stop"}]
        return out

    def failure(self, error: ApiError) -> Document:
        """The error event, which is also the error document."""
        return anthropic_document(error)

    def _end(self, result: Result, *, called: bool) -> Document:
        reason = _STOP_REASONS[result.finish]
        if called and result.finish in ("stop", "stop_string"):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._stopped(result) if reason == "stop_sequence" else None}

    def _stopped(self, result: Result) -> str | None:
        """The stop sequence that ended the text. It was cut from the text, but its tokens are still in the result."""
        written = self._tokenizer.decode(result.ids)
        found = [(written.rfind(stop) + len(stop), len(stop), stop) for stop in self._stop if stop in written]
        return max(found)[2] if found else None

    def _written(self, parts: Sequence[Part]) -> list[Document]:
        out: list[Document] = []
        for part in parts:
            if isinstance(part, Thought):
                out += self._opened("thinking", _thinking_block(""))
                out.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
            elif isinstance(part, str):
                if self._kind != "text" and not part.strip() and self._index >= 0:
                    continue  # whitespace between reasoning and calls
                out += self._opened("text", {"type": "text", "text": ""})
                out.append(self._delta({"type": "text_delta", "text": part}))
            elif isinstance(part, CallStart):
                out += self._close() + self._opened("call", _call_block(part.name, {}))
            elif isinstance(part, CallArguments):
                out.append(self._delta({"type": "input_json_delta", "partial_json": part.text}))
            else:
                out += self._close()
        return out

    def _opened(self, kind: str, block: Document) -> list[Document]:
        """The events after which a block of `kind` is open."""
        if self._kind == kind:
            return []
        events = self._close()
        self._kind, self._index = kind, self._index + 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Document) -> Document:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Document]:
        if not self._kind:
            return []
        self._kind = ""
        return [{"type": "content_block_stop", "index": self._index}]


def _usage(usage: Usage) -> Document:
    """Token counts; cached prompt tokens are counted separately."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _thinking_block(text: str) -> Document:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call_block(name: str, arguments: Document) -> Document:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": arguments}
