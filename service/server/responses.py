"""Translates the engine's events and results to the documents of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Protocol

from ..core import (
    Event,
    Finish,
    Logprobs,
    Progress,
    Result,
    SamplingValue,
    Stage,
    Usage,
)
from ..text.answer_parts import AnswerParts, Part, Thought
from ..text.tokenizer import Tokenizer
from ..text.tool_call_stream import CallArguments, CallStart
from ..text.tool_calls import split_calls

FINISH: Mapping[Finish, str] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "repetition": "length",
    "cancelled": "length",
}
Document = dict[str, Any]
Scored = Sequence[tuple[int, Logprobs]]


def usage(results: Sequence[Result]) -> Document:
    """The token counts of one prompt's choices."""
    prompt, completion = results[0].usage.prompt, sum(result.usage.completion for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": results[0].usage.cached},
        "completion_tokens_details": {"reasoning_tokens": sum(result.usage.reasoning for result in results)},
    }


def added(usages: Iterable[Mapping[str, Any]]) -> Document:
    """The sum of several prompts' usage."""
    total: Document = {}
    for one in usages:
        for key, value in one.items():
            total[key] = added([total.get(key, {}), value]) if isinstance(value, Mapping) else total.get(key, 0) + value
    return total


def own_fields(result: Result, *, detail: bool = False) -> Document:
    """The fields that OpenAI's API has no names for; with `detail` the complete result of the choice."""
    stages = {name: _parts_of(stage) for name, stage in result.stages.items()}
    document: Document = {
        "finish": result.finish,
        "seed": result.seed,
        "seconds": dict(result.seconds),
        "stages": stages,
    }
    document["sampling"] = {name: _parts_of(one) for name, one in result.sampling.items()}
    if detail:
        document |= {
            "text": result.text,
            "reasoning": result.reasoning,
            "ids": list(result.ids),
            "usage": _parts_of(result.usage),
        }
    return document


class CharacterCount:
    """Counts the characters of a text that comes as bytes, perhaps split inside a character; `count` is the number of
    complete ones.
    """

    def __init__(self) -> None:
        self.count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, raw: bytes) -> None:
        """Add the next bytes."""
        self.count += len(self._decoder.decode(raw))


@dataclass(slots=True)
class ChoiceState:
    """One choice in progress."""

    index: int
    parts: AnswerParts
    begun: bool = False
    call_count: int = 0  # calls that have begun
    characters: CharacterCount = field(default_factory=CharacterCount)
    scored: list[tuple[int, Logprobs]] = field(default_factory=list)
    result: Result | None = None


class AnswerWriter(Protocol):
    """Writes a response in one API's format; see Writer."""

    def collect(self, index: int, event: Event) -> None: ...

    def whole(self, total: Document) -> Document: ...

    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]: ...

    def progress(self, events: Iterable[tuple[int, Event]]) -> list[Document]: ...

    def only_adds(self, index: int) -> bool: ...

    def usage_chunk(self, total: Document) -> Document: ...


class Writer(ABC):
    """The part that chat and completions share: names, choices, chunks. `kind` is the documents' `object` field."""

    prefix: str

    def __init__(
        self,
        kind: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        with_logprobs: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._tools = tools
        # Whether text after the first call is dropped.
        self.one_call = False
        self._choices: dict[int, ChoiceState] = {}
        # Whether chunks also have token ids, progress, and each choice's complete result.
        self.detail = False

    def collect(self, index: int, event: Event) -> None:
        """Collect an event for the whole document."""
        choice = self._choice(index)
        choice.scored += _scored([event])
        choice.result = event.result or choice.result

    def whole(self, total: Document) -> Document:
        """The document of all collected events; `total` is its usage."""
        choices = [choice for _, choice in sorted(self._choices.items())]
        first = choices[0].result
        documents = [self._whole_choice(choice, choice.result) for choice in choices if choice.result is not None]
        return self._head | {"choices": documents, "usage": total, "onedesk": own_fields(first) if first else None}

    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """The chunks for events that came together; text of one choice is joined."""
        out: list[Document] = []
        for index, group in groupby(events, key=lambda pair: pair[0]):
            choice, came = self._choice(index), [event for _, event in group]
            parts = self._parts(choice, came)
            result = next((event.result for event in came if event.result is not None), None)
            if result is not None:
                parts += self._last(choice, result)
            chunks = [self._head | {"choices": [part]} for part in parts]
            tokens = [event.token for event in came if event.token is not None] if self.detail else []
            own: Document = {} if result is None else own_fields(result, detail=self.detail)
            own |= {"tokens": tokens} if tokens else {}
            if own:
                chunks = chunks or [self._head | {"choices": []}]
                chunks[-1]["onedesk"] = own
            out += chunks
        return out

    def progress(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """A chunk with the latest progress of each stage among events that came together, if the client asked for
        progress.
        """
        latest = (
            {event.progress.stage: event.progress for _, event in events if event.progress is not None}
            if self.detail
            else {}
        )
        return [
            self._head | {"choices": [], "onedesk": {"progress": _parts_of(progress)}} for progress in latest.values()
        ]

    def only_adds(self, index: int) -> bool:
        """Whether a piece of text or reasoning only extends its choice: the choice has begun, and its text is not
        searched for tool calls.
        """
        choice = self._choices.get(index)
        return choice is not None and choice.begun and choice.parts.plain

    def usage_chunk(self, total: Document) -> Document:
        """The last chunk, with the usage, if the client asked for it."""
        return self._head | {"choices": [], "usage": total}

    def _choice(self, index: int) -> ChoiceState:
        if index not in self._choices:
            self._choices[index] = ChoiceState(index, AnswerParts(self._tools, one_call=self.one_call))
        return self._choices[index]

    @abstractmethod
    def _whole_choice(self, choice: ChoiceState, result: Result) -> Document: ...

    @abstractmethod
    def _parts(self, choice: ChoiceState, events: Sequence[Event]) -> list[Document]: ...

    @abstractmethod
    def _last(self, choice: ChoiceState, result: Result) -> list[Document]: ...

    def _token(self, token: int) -> tuple[str, bytes]:
        r"""A token's text and bytes. Bytes of a partial character are \xf0 in the text, so that tokens differ."""
        raw = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        return raw.decode("utf-8", "backslashreplace"), raw


class ChatWriter(Writer):
    """Chat responses, whole or in chunks."""

    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        stream: bool,
        with_logprobs: bool,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, model, tokenizer, with_logprobs=with_logprobs, tools=tools)

    def _whole_choice(self, choice: ChoiceState, result: Result) -> Document:
        text, reasoning, calls = split_calls(result.text, result.reasoning, self._tools, one_call=self.one_call)
        message: Document = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message |= _thought(reasoning)
        if calls:
            message["tool_calls"] = [_tool_call(call.name, call.arguments) for call in calls]
        logprobs = self._logprobs(choice.scored) if self._with_logprobs else None
        end = _finish(result, called=bool(calls))
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": end}

    def _parts(self, choice: ChoiceState, events: Sequence[Event]) -> list[Document]:
        text, reasoning, scored = *_joined(events), _scored(events)
        deltas = self._deltas(choice, choice.parts.push(text, reasoning))
        if scored and not deltas:
            deltas.append({"content": ""})
        if not choice.begun:
            choice.begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        parts = [_delta(choice, delta) for delta in deltas]
        if scored:
            parts[-1]["logprobs"] = self._logprobs(scored)
        return parts

    def _last(self, choice: ChoiceState, result: Result) -> list[Document]:
        deltas = self._deltas(choice, choice.parts.finish())
        end = _delta(choice, {}) | {"finish_reason": _finish(result, called=choice.call_count > 0)}
        return [*(_delta(choice, delta) for delta in deltas), end]

    def _deltas(self, choice: ChoiceState, parts: Sequence[Part]) -> list[Document]:
        deltas: list[Document] = []
        for part in parts:
            if isinstance(part, Thought):
                deltas.append(_thought(part.text))
            elif isinstance(part, str):
                deltas.append({"content": part})
            elif isinstance(part, CallStart):
                deltas.append({"tool_calls": [{"index": choice.call_count, **_tool_call(part.name, "")}]})
                choice.call_count += 1
            elif isinstance(part, CallArguments):
                if not (deltas and "tool_calls" in deltas[-1]):
                    deltas.append({"tool_calls": [{"index": choice.call_count - 1, "function": {"arguments": ""}}]})
                deltas[-1]["tool_calls"][0]["function"]["arguments"] += part.text
        return deltas

    def _logprobs(self, scored: Scored) -> Document:
        content = [
            self._entry(token, one.token) | {"top_logprobs": [self._entry(*pair) for pair in one.top]}
            for token, one in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Document:
        text, raw = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its choices, and its ids with their log-probabilities, if requested."""

    text: str
    scored: Sequence[tuple[int, Logprobs | None]] = ()


class CompletionWriter(Writer):
    """Completion responses, whole or in chunks. `echoes` go before the choices of each prompt."""

    prefix = "cmpl"

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, *, with_logprobs: bool, echoes: Mapping[int, Echo]
    ) -> None:
        super().__init__("text_completion", model, tokenizer, with_logprobs=with_logprobs)
        self._echoes = echoes

    def _whole_choice(self, choice: ChoiceState, result: Result) -> Document:
        echo = self._echoes.get(choice.index, _NO_ECHO)
        part = self._part(choice, echo.text + result.text, result.reasoning, ())
        logprobs = self._logprobs(choice, [*echo.scored, *choice.scored]) if self._with_logprobs else None
        return part | {"logprobs": logprobs, "finish_reason": _finish(result)}

    def _parts(self, choice: ChoiceState, events: Sequence[Event]) -> list[Document]:
        text, reasoning, scored = *_joined(events), _scored(events)
        if not choice.begun:
            choice.begun = True
            echo = self._echoes.get(choice.index, _NO_ECHO)
            text, scored = echo.text + text, [*echo.scored, *scored]
        return [self._part(choice, text, reasoning, scored)] if text or reasoning or scored else []

    def _last(self, choice: ChoiceState, result: Result) -> list[Document]:
        return [self._part(choice, "", "", ()) | {"finish_reason": _finish(result)}]

    def _part(
        self, choice: ChoiceState, text: str, reasoning: str, scored: Sequence[tuple[int, Logprobs | None]]
    ) -> Document:
        logprobs = self._logprobs(choice, scored) if scored else None
        part: Document = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return part | (_thought(reasoning) if reasoning else {})

    def _logprobs(self, choice: ChoiceState, scored: Sequence[tuple[int, Logprobs | None]]) -> Document:
        offsets = []
        for token, _ in scored:
            offsets.append(choice.characters.count)
            choice.characters.push(self._token(token)[1])
        return {
            "tokens": [self._name(token) for token, _ in scored],
            "token_logprobs": [None if one is None else one.token for _, one in scored],
            "top_logprobs": [
                None if one is None else {self._name(token): value for token, value in one.top} for _, one in scored
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token as the legacy API writes it: a partial character begins with "bytes:"."""
        text, raw = self._token(token)
        return text if text.encode() == raw else f"bytes:{text}"


_NO_ECHO = Echo("")


def _parts_of(one: Stage | Usage | Progress | SamplingValue) -> Document:
    """Its fields, all plain values. asdict would copy each of them deeply, 20 us per stage."""
    return {part.name: getattr(one, part.name) for part in fields(one)}


def _joined(events: Sequence[Event]) -> tuple[str, str]:
    return "".join(event.text for event in events), "".join(event.reasoning for event in events)


def _scored(events: Sequence[Event]) -> list[tuple[int, Logprobs]]:
    return [(event.token, event.logprobs) for event in events if event.logprobs is not None and event.token is not None]


def _delta(choice: ChoiceState, delta: Document) -> Document:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _thought(reasoning: str) -> Document:
    """Reasoning under both names that clients read: DeepSeek's, and that of vLLM and OpenRouter."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _tool_call(name: str, arguments: str) -> Document:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _finish(result: Result, *, called: bool = False) -> str:
    reason = FINISH[result.finish]
    return "tool_calls" if called and reason == "stop" else reason
