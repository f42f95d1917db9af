"""Translates between the engine's vocabulary and OpenAI's API as a client: a request to a body, a stream's documents to
events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

from ..core import (
    SEED_LIMIT,
    Event,
    Finish,
    Message,
    ModelSpec,
    Progress,
    Request,
    Result,
    SamplingSource,
    SamplingValue,
    Stage,
    Usage,
    fp32,
)
from ..errors import Field, PeerError, RequestError
from ..memory.policy import Policy
from ..text.reasoning import ReasoningSplitter, Segment
from ..vision.encode import uri_of_picture
from .peer import PeerAddress
from .wire import failure

# Seeds are below this limit. Servers store them in 31 to 64 bits; ours accepts all of them.
_FOREIGN_SEEDS = 2**31
UNKNOWN_TOKEN = -1
_TEXT_LIMIT = 64 << 20  # characters of one response
_STAGES = ("queue", "load", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DialectRequest:
    """One choice of a request, ready to send: the route, the body, and the seed that the user sees."""

    route: str
    body: Mapping[str, Any]
    seed: int


def ask_of(
    request: Request, choice: int, seed: int, address: PeerAddress, wanted: ModelSpec, policy: Policy
) -> DialectRequest:
    """The HTTP request for choice `choice` of a validated request whose first choice has `seed`.

    Raises RequestError for options that this server's dialect does not have.
    """
    ours = address.dialect == "onedesk"
    _check_askable(request, address, ours=ours)
    drawn = (seed + choice) % SEED_LIMIT
    body: dict[str, Any] = {"model": wanted.name} if wanted.name else {}
    body |= {"stream": True} if ours else {"stream": True, "max_tokens": request.max_tokens}
    if request.total_tokens is not None:
        body["max_tokens"] = request.total_tokens
    body |= {"seed": drawn if ours else drawn % _FOREIGN_SEEDS, **_sampling(request)}
    if request.stop:
        body["stop"] = list(request.stop)
    if ours:
        body["onedesk"] = _own_options(request, wanted, policy)
        body |= {} if request.thinking_budget is None else {"thinking_budget": request.thinking_budget}
    else:
        body["stream_options"] = {"include_usage": True}
    if not request.messages:
        prompt = request.prompt if request.prompt is not None else list(request.ids or ())
        body |= {} if request.parse_special else {"parse_special": False}
        return DialectRequest("/completions", body | {"prompt": prompt}, drawn)
    options = dict(request.template_options)
    if request.thinking != "auto":
        options["enable_thinking"] = request.thinking == "on"
    body |= {"messages": [_message(message, request.pixels) for message in request.messages]}
    body |= {"chat_template_kwargs": options} if options else {}
    if not request.add_generation_prompt or request.continue_final_message:
        body |= {"add_generation_prompt": False, "continue_final_message": request.continue_final_message}
    return DialectRequest("/chat/completions", body, drawn)


def _check_askable(request: Request, address: PeerAddress, *, ours: bool) -> None:
    for name in ("best_of", "beams", "json_schema", "logprobs"):
        if getattr(request, name) is not None:
            raise RequestError(
                Field(name), f" is not passed on to {address.title}; leave it out, or run the model in this process"
            )
    if request.images:
        words = f" go to {address.title} in messages only; use them, or run the model in this process"
        raise RequestError(Field("images"), words)
    if request.tools:
        raise RequestError(
            Field("tools"), f" are not passed on to {address.title}; leave them out, or run the model in this process"
        )
    if not request.parse_special and not ours:
        raise RequestError(
            f"{address.title} does not know ",
            Field("parse_special"),
            "; leave it out, or run the model in this process",
        )
    if request.thinking_budget is not None and not ours:
        raise RequestError(
            f"{address.title} knows no ",
            Field("thinking_budget"),
            "; leave it out (-1), or run the model in this process",
        )


def _sampling(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    given = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return given


def _own_options(request: Request, wanted: ModelSpec, policy: Policy) -> dict[str, Any]:
    own: dict[str, Any] = {
        "detail": True,
        "quant": wanted.quant,
        "answer_tokens": request.max_tokens,
        **policy_fields(policy),
    }
    own |= {} if wanted.context is None else {"context": wanted.context}
    return own | ({} if request.repetition_stop is None else {"repetition_stop": request.repetition_stop})


def policy_fields(policy: Policy) -> dict[str, Any]:
    """A policy in the form of our service. Only ComfyUI knows when the last text node of a workflow has run, so that
    policy is sent as "stay".
    """
    fields: dict[str, Any] = {"policy": "stay" if policy.name == "phase" else policy.name}
    return fields | ({} if policy.seconds is None else {"ttl": policy.seconds})


def _message(message: Message, pixels: int | None) -> dict[str, Any]:
    document: dict[str, Any] = {"role": message.role, "content": _content(message, pixels)}
    document |= {"reasoning_content": message.reasoning} if message.reasoning else {}
    document |= {"tool_calls": [dict(call) for call in message.tool_calls]} if message.tool_calls else {}
    return document | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


def _content(message: Message, pixels: int | None) -> str | list[dict[str, Any]]:
    """The text, or texts and images in their order. Images are sent inline; nothing is fetched."""
    if not message.pictures:
        return message.content
    return [
        (
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": uri_of_picture(part, part.pixels or pixels)}}
        )
        for part in message.parts
    ]


class Reader:
    """Turns the documents of one choice's stream into events; the last event has the result. `started` is a
    perf_counter time.
    """

    def __init__(self, address: PeerAddress, seed: int, started: float) -> None:
        self._address = address
        self._seed = seed
        self._started = started
        self._first: float | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._characters = 0
        # High surrogates at the end of a document, whose low surrogate begins the next one.
        self._halves = {"text": "", "reasoning": ""}
        self._ids: list[int] = []
        self._pieces = 0
        self._usage: Mapping[str, Any] = {}
        self._own: Mapping[str, Any] = {}
        self._finish: Finish | None = None
        self._splitter = ReasoningSplitter()
        # Stands for the token of a piece of text if the server reports none: there was at least one.
        self._unknown = None if address.dialect == "onedesk" else UNKNOWN_TOKEN

    def events(self, document: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a document. Raises the error that it reports, PeerError for one that is malformed."""
        if document.get("error") is not None:
            raise failure(self._address, 200, document)
        own = _object(document.get("onedesk"))
        usage = _object(document.get("usage"))
        self._usage = usage or self._usage
        if (progress := _progress(own.get("progress"))) is not None:
            yield Event(progress=progress)
        choices = document.get("choices")
        choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
        yield from self._visible(choice, own)
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish = "length" if reason == "length" else "stop"
        if "finish" in own:
            self._own = own

    def end(self) -> Iterator[Event]:
        """The stream has ended. Raises PeerError if the response is incomplete."""
        if self._finish is None:
            raise PeerError(
                f"{self._address.title} ended in the middle of an answer, after {self._count} tokens; look at its log,"
                " then run again"
            )
        if self._own.get("finish") == "cancelled":
            raise PeerError(
                f"{self._address.title} was asked to end, after {self._count} tokens of the answer; run again"
            )
        text, reasoning = self._take(self._splitter.finish())
        if text or reasoning:
            yield Event(text=text, reasoning=reasoning)
        yield Event(result=self.result())

    def result(self, finish: Finish | None = None) -> Result:
        """The result so far; `finish` is the reason for its end if the server reports none."""
        own, now = self._own, time.perf_counter()
        how = own.get("finish")
        ended: Finish = finish or (cast(Finish, how) if how in get_args(Finish) else self._finish or "stop")
        whole = own.get("text"), own.get("reasoning")
        text, reasoning = (
            one if isinstance(one, str) else "".join(mine)
            for one, mine in zip(whole, (self._text, self._reasoning), strict=True)
        )
        seconds = {"load": _number(_object(own.get("seconds")).get("load")), "total": now - self._started}
        seconds["first_token"] = (self._first or now) - self._started
        ids = own.get("ids")
        return Result(
            text=text,
            reasoning=reasoning,
            ids=tuple(_whole(one) for one in ids) if isinstance(ids, list) else tuple(self._ids),
            finish=ended,
            seed=self._seed,
            usage=self._counts(),
            seconds=seconds,
            stages=_stages(own.get("stages")),
            sampling=_sampling_in_force(own.get("sampling")),
        )

    @property
    def _count(self) -> int:
        """Tokens so far; if the server does not report them, pieces of text."""
        return len(self._ids) or self._pieces

    def _visible(self, choice: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Event]:
        delta = _object(choice.get("delta"))
        content = _text(delta.get("content")) + _text(choice.get("text"))
        thought = self._whole_characters(
            "reasoning", _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        )
        came = own.get("tokens")
        ids = [_whole(one) for one in came] if isinstance(came, list) else []
        self._ids += ids
        if not content and not thought and not ids:
            return
        self._pieces += 1
        self._first = self._first or time.perf_counter()
        self._characters += len(content) + len(thought)
        if self._characters > _TEXT_LIMIT:
            raise PeerError(
                f"{self._address.title} wrote more than {_TEXT_LIMIT} characters; lower max_tokens, or look at its log"
            )
        self._reasoning.append(thought)
        text, reasoning = self._take(self._segments(self._whole_characters("text", content)))
        for token in ids[:-1]:
            yield Event(token=token)
        yield Event(text=text, reasoning=thought + reasoning, token=ids[-1] if ids else self._unknown)

    def _segments(self, content: str) -> list[Segment]:
        """The segments of the content. Our service separates reasoning; other servers may leave it in the text."""
        if self._address.dialect == "onedesk":
            return [("text", content)]
        return self._splitter.push(content)

    def _take(self, segments: list[Segment]) -> tuple[str, str]:
        text, reasoning = "", ""
        for channel, piece in segments:
            if channel == "reclaim":
                self._reasoning.append("".join(self._text).strip("\n"))
                self._text.clear()
            elif channel == "text":
                text += piece
                self._text.append(piece)
            else:
                reasoning += piece
                self._reasoning.append(piece)
        return text, reasoning

    def _whole_characters(self, channel: str, content: str) -> str:
        """`content` without lone surrogates: JSON can split a pair between two documents."""
        content, self._halves[channel] = self._halves[channel] + content, ""
        if content and "\ud800" <= content[-1] <= "\udbff":
            content, self._halves[channel] = content[:-1], content[-1]
        return content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _counts(self) -> Usage:
        usage = _object(self._own.get("usage"))
        if usage:
            return Usage(*(_whole(usage.get(name)) for name in ("prompt", "completion", "reasoning", "cached")))
        usage = self._usage
        reasoning = _object(usage.get("completion_tokens_details")).get("reasoning_tokens")
        cached = _object(usage.get("prompt_tokens_details")).get("cached_tokens")
        completion = _whole(usage.get("completion_tokens")) or self._count
        return Usage(_whole(usage.get("prompt_tokens")), completion, _whole(reasoning), _whole(cached))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _number(value: Any) -> float:
    return float(value) if fp32(value) is not None and value >= 0 else 0.0


def _progress(value: Any) -> Progress | None:
    progress = _object(value)
    stage = progress.get("stage")
    return Progress(stage, _whole(progress.get("done")), _whole(progress.get("total"))) if stage in _STAGES else None


def _sampling_in_force(value: Any) -> dict[str, SamplingValue]:
    """The sampling options that our service reports; other engines report none."""
    found = {name: _object(one) for name, one in _object(value).items()}
    sources = get_args(SamplingSource)
    known = {
        name: one for name, one in found.items() if one.get("source") in sources and fp32(one.get("value")) is not None
    }
    return {name: SamplingValue(one["value"], one["source"]) for name, one in known.items()}


def _stages(value: Any) -> dict[str, Stage]:
    names = {one.name for one in fields(Stage)}
    stages = {name: _object(stage) for name, stage in _object(value).items() if isinstance(name, str)}
    return {name: Stage(**{key: item for key, item in stage.items() if key in names}) for name, stage in stages.items()}
