"""Responses as the Responses API has them: a document of output items, or the events that build it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core import Event, Result
from ..text.answer_parts import AnswerParts, Part, Thought
from ..text.tool_call_stream import CallArguments, CallStart
from ..text.tool_calls import split_calls
from .error_documents import ApiError
from .responses import FINISH, Document, own_fields
from .typed_events import TypedEventsWriter

# Request fields that the document repeats, with their defaults.
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}


class ResponsesWriter(TypedEventsWriter):
    """Writes one response to `body`, a checked /v1/responses request. `tools` and `one_call`: see AnswerParts."""

    def __init__(
        self, model: str, body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], *, one_call: bool
    ) -> None:
        super().__init__()
        echoed = {name: body[name] if body.get(name) is not None else default for name, default in _ECHOED.items()}
        self._head: Document = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **echoed,
        }
        self._tools = tools
        self._one_call = one_call
        self._parts = AnswerParts(tools, one_call=one_call)
        self._output: list[Document] = []
        self._open: _Item | None = None
        self._count = 0  # events written so far
        self._begun = False

    def whole(self, total: Document) -> Document:
        """The document of the whole response; `total` is its usage in chat form."""
        result = self.result()
        text, reasoning, calls = split_calls(result.text, result.reasoning, self._tools, one_call=self._one_call)
        items = [_reasoning_item(reasoning)] if reasoning else []
        if text.strip() or not calls:
            items.append(_message_item(text))
        items += [_call_item(call.name, call.arguments) for call in calls]
        return self._document(result, items)

    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """The stream's events for engine events that came together."""
        out: list[Document] = []
        if not self._begun:
            self._begun = True
            begun = self._head | {"status": "in_progress", "output": [], "usage": None}
            out += [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        for _, event in events:
            out += self._written(self._parts.push(event.text, event.reasoning))
            if event.result is not None:
                out += self._written(self._parts.finish()) + self._close()
                document = self._document(event.result, self._output)
                out.append({"type": f"response.{document['status']}", "response": document})
        return self._numbered(out)

    def failure(self, error: ApiError) -> Document:
        """The error event that ends the stream."""
        said = error.document()["error"]
        return self._numbered(
            [{"type": "error", "code": said["code"], "message": said["message"], "param": said["param"]}]
        )[0]

    def _numbered(self, events: Sequence[Document]) -> list[Document]:
        numbered = [event | {"sequence_number": self._count + at} for at, event in enumerate(events)]
        self._count += len(events)
        return numbered

    def _document(self, result: Result, items: Sequence[Document]) -> Document:
        whole = FINISH[result.finish] == "stop"
        items = [
            item if whole or at < len(items) - 1 else item | {"status": "incomplete"} for at, item in enumerate(items)
        ]
        count = result.usage
        usage = {
            "input_tokens": count.prompt,
            "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": count.reasoning},
            "total_tokens": count.prompt + count.completion,
        }
        return self._head | {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": items,
            "usage": usage,
            "onedesk": own_fields(result),
        }

    def _written(self, parts: Sequence[Part]) -> list[Document]:
        out: list[Document] = []
        for part in parts:
            if isinstance(part, Thought | str):
                text, kind = (part.text, "reasoning") if isinstance(part, Thought) else (part, "message")
                if self._open is None or self._open.kind != kind:
                    if kind == "message" and not text.strip() and self._output:
                        continue  # whitespace between reasoning and calls
                    item = _reasoning_item("") if kind == "reasoning" else _message_item("")
                    out += self._close() + self._opened(_Item(kind, len(self._output), item))
                out += self._add(text)
            elif isinstance(part, CallStart):
                out += self._close() + self._opened(_Item("call", len(self._output), _call_item(part.name, "")))
            elif isinstance(part, CallArguments):
                out += self._add(part.text)
            else:
                out += self._close()
        return out

    def _opened(self, item: _Item) -> list[Document]:
        self._open = item
        return item.begin()

    def _add(self, text: str) -> list[Document]:
        return [] if self._open is None else self._open.add(text)

    def _close(self) -> list[Document]:
        item, self._open = self._open, None
        if item is None:
            return []
        events = item.end()
        self._output.append(item.document)
        return events


class _Item:
    """An output item in progress: `kind` is reasoning, message or call."""

    def __init__(self, kind: str, index: int, document: Document) -> None:
        self.kind = kind
        self.document: Document = document
        self._text: list[str] = []
        self._at = {"item_id": document["id"], "output_index": index}
        self._inside = self._at | {"content_index": 0}

    def begin(self) -> list[Document]:
        """The events that open it."""
        shown = self.document | {"status": "in_progress"}
        if self.kind == "call":
            return [{"type": "response.output_item.added", "output_index": self._at["output_index"], "item": shown}]
        opened = shown | {"content": []}
        return [
            {"type": "response.output_item.added", "output_index": self._at["output_index"], "item": opened},
            {"type": "response.content_part.added", **self._inside, "part": self.document["content"][0]},
        ]

    def add(self, text: str) -> list[Document]:
        """The event of a further piece."""
        self._text.append(text)
        if self.kind == "call":
            return [{"type": "response.function_call_arguments.delta", **self._at, "delta": text}]
        if self.kind == "reasoning":
            return [{"type": "response.reasoning_text.delta", **self._inside, "delta": text}]
        return [{"type": "response.output_text.delta", **self._inside, "delta": text, "logprobs": []}]

    def end(self) -> list[Document]:
        """The events that close it. After that, `document` is complete."""
        text = "".join(self._text)
        done: Document = {"type": "response.output_item.done", "output_index": self._at["output_index"]}
        if self.kind == "call":
            self.document = self.document | {"arguments": text}
            name = self.document["name"]
            written = {"type": "response.function_call_arguments.done", **self._at, "arguments": text, "name": name}
            return [written, done | {"item": self.document}]
        content: Document = self.document["content"][0]
        part = content | {"text": text}
        self.document = self.document | {"content": [part]}
        if self.kind == "reasoning":
            written = {"type": "response.reasoning_text.done", **self._inside, "text": text}
        else:
            written = {"type": "response.output_text.done", **self._inside, "text": text, "logprobs": []}
        closed = {"type": "response.content_part.done", **self._inside, "part": part}
        return [written, closed, done | {"item": self.document}]


def _reasoning_item(text: str) -> Document:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message_item(text: str) -> Document:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": content, "status": "completed"}


def _call_item(name: str, arguments: str) -> Document:
    known: Document = {"id": _new_id("fc"), "type": "function_call", "call_id": _new_id("call")}
    return known | {"name": name, "arguments": arguments, "status": "completed"}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
