"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from ..api import OpenModel
from ..core import (
    CancelCheck,
    Event,
    Logprobs,
    Progress,
    Request,
    Result,
    Usage,
)
from ..engine.completion import Prepared
from .body import PICTURE_BODY_LIMIT, read_json
from .connections import is_cancelled, is_gone
from .error_documents import ApiError, as_api_error, to_json
from .frames import Frames
from .models import Uses
from .pending import Call
from .requests import ParsedRequest, chat_ask, completion_ask, policy_of, spec_of
from .responses import AnswerWriter, ChatWriter, CompletionWriter, Document, Echo, added, usage
from .schemas import CHAT, COMPLETION
from .service import TICK, Service
from .sse import EventStream


async def chat(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    body = await read_json(service, request, CHAT, PICTURE_BODY_LIMIT)
    with service.models.using() as uses:
        name, calls, ask = await begin(service, body, chat_ask, uses)
        scored = ask.requests[0].logprobs is not None
        tokenizer = calls[0].model.tokenizer if scored else None
        writer = ChatWriter(name, tokenizer, stream=ask.stream, with_logprobs=scored, tools=ask.tools)
        writer.detail, writer.one_call = ask.detail, ask.one_call
        return await answer(service, request, ask, Answering(name, calls, writer))


async def completions(service: Service, request: web.Request) -> web.StreamResponse:
    """Continue a text or a list of token ids."""
    body = await read_json(service, request, COMPLETION)
    with service.models.using() as uses:
        name, calls, ask = await begin(service, body, completion_ask, uses)
        scored = ask.requests[0].logprobs is not None
        model = calls[0].model
        echoes = await _echoes(service, name, calls, ask) if ask.echo else {}
        writer = CompletionWriter(name, model.tokenizer if scored else None, with_logprobs=scored, echoes=echoes)
        writer.detail = ask.detail
        answering = Answering(name, calls, writer)
        return await (
            _only_prompts(request, ask, answering) if ask.only_prompt else answer(service, request, ask, answering)
        )


async def begin(
    service: Service, body: Mapping[str, Any], ask_of: Callable[[Mapping[str, Any], int], ParsedRequest], uses: Uses
) -> tuple[str, list[Call], ParsedRequest]:
    """The model, the calls (one per prompt) and the options, all checked. One trip to a thread, because each trip
    delays the first token.
    """

    def prepare(cancel: CancelCheck) -> tuple[str, OpenModel, ParsedRequest, list[Prepared]]:
        policy = policy_of(body)
        name, model = service.find(spec_of(body, service.models.served.usual), uses)
        ask = ask_of(body, model.context)
        prepared = [model.prepared(request, cancel=cancel) for request in ask.requests]
        if policy is not None:
            model.policy = policy
        return name, model, ask, prepared

    name, model, ask, prepared = await service.prepare(body.get("model"), prepare)
    return name, [Call(model, one) for one in prepared], ask


async def _echoes(service: Service, name: str, calls: Sequence[Call], ask: ParsedRequest) -> dict[int, Echo]:
    """Each choice's prompt. With log-probabilities, the prompt is scored first, queued by itself."""
    model, top = calls[0].model, ask.requests[0].logprobs
    texts = await service.prepare(name, lambda _: [_prompt_text(model, one) for one in ask.requests])
    scored: Sequence[Sequence[tuple[int, Logprobs | None]]] = [()] * len(texts)
    if top is not None:
        prompts = [call.task.ids for call in calls if isinstance(call.task, Prepared)]
        scored = await service.work_out(
            name, model, lambda model, stopping: [_scored(model, ids, top, stopping) for ids in prompts]
        )
    echoes = [Echo(text, rows) for text, rows in zip(texts, scored, strict=True)]
    return dict(enumerate(echo for echo, one in zip(echoes, ask.requests, strict=True) for _ in range(one.n)))


def _prompt_text(model: OpenModel, request: Request) -> str:
    return request.prompt if request.prompt is not None else model.tokenizer.decode(request.ids or ())


def _scored(model: OpenModel, ids: Sequence[int], top: int, cancel: CancelCheck) -> list[tuple[int, Logprobs | None]]:
    """Each id with its log-probability; the first has none."""
    return [(ids[0], None), *zip(ids[1:], model.scored(ids, top, cancel=cancel), strict=True)]


_Sink = Callable[[int, Event], bool]


def _offer(sink: _Sink, first: int, event: Event) -> bool:
    return sink(first + event.choice, event)


@dataclass(slots=True)
class Answering:
    """One response in progress: its model, its calls (one per prompt), its writer, and the calls' results."""

    name: str
    calls: Sequence[Call]
    writer: AnswerWriter
    results: list[list[Result]] = field(default_factory=list)

    async def events(
        self, service: Service, sink: _Sink | None = None
    ) -> AsyncIterator[tuple[Call, Sequence[tuple[int, Event]]]]:
        """Events, prompt by prompt, each with the index of its choice in the whole response. `sink` may take an event
        first.
        """
        first = 0
        for call in self.calls:
            results: dict[int, Result] = {}
            taking = None if sink is None else partial(_offer, sink, first)
            async for events in service.follow(self.name, call, taking):
                results |= {event.choice: event.result for event in events if event.result is not None}
                yield call, [(first + event.choice, event) for event in events]
            if len(results) < call.choices:
                raise ApiError(503, "the service stopped before the answer was there", code="stopped")
            self.results.append([results[choice] for choice in sorted(results)])
            first += call.choices

    def collect(self, events: Sequence[tuple[int, Event]]) -> None:
        """Collect events for the whole document."""
        for index, event in events:
            self.writer.collect(index, event)

    def collect_now(self, index: int, event: Event) -> bool:
        """Collect an event, in any thread, unless it ends a choice: its result is needed elsewhere too."""
        if event.result is None:
            self.writer.collect(index, event)
        return event.result is None

    @property
    def usage(self) -> Document:
        """The token counts of all finished prompts."""
        return added(usage(results) for results in self.results)


async def answer(
    service: Service,
    request: web.Request,
    ask: ParsedRequest,
    answering: Answering,
    stream: Callable[[web.Request], EventStream] = EventStream,
) -> web.StreamResponse:
    """Run the calls and send the response, whole or through `stream`."""
    async with service.waiting_for(answering.name, answering.calls):
        if ask.stream:
            return await _stream(service, stream(request), request, answering, include_usage=ask.include_usage)
        async for _, events in answering.events(service, answering.collect_now):
            answering.collect(events)
        return web.Response(body=to_json(answering.writer.whole(answering.usage)), content_type="application/json")


async def _only_prompts(request: web.Request, ask: ParsedRequest, answering: Answering) -> web.StreamResponse:
    """Responses with zero generated tokens: each choice is its prompt."""
    for prepared in (call.task for call in answering.calls if isinstance(call.task, Prepared)):
        read = Usage(len(prepared.ids), 0, 0)
        answering.results.append(
            [Result("", "", (), "length", prepared.seed_of(at), read, {}, {}) for at in range(prepared.n)]
        )
    ends = [
        (index, Event(result=one)) for index, one in enumerate(one for results in answering.results for one in results)
    ]
    if not ask.stream:
        answering.collect(ends)
        return web.Response(body=to_json(answering.writer.whole(answering.usage)), content_type="application/json")
    with EventStream(request) as out:
        await out.send(answering.writer.chunks(ends))
        if ask.include_usage:
            await out.send([answering.writer.usage_chunk(answering.usage)])
        return await out.done()


async def _stream(
    service: Service, stream: EventStream, request: web.Request, answering: Answering, *, include_usage: bool
) -> web.StreamResponse:
    """Send server-sent events. Headers go out with the first event or comment, so an earlier failure has a status of
    its own.
    """
    with stream as out:
        try:
            await _send_all(service, answering, out)
            if include_usage:
                await out.send([answering.writer.usage_chunk(answering.usage)])
        except BaseException as error:
            # Before the first part, the middleware sends the error. After it, an error can only be another part.
            begun = request.writer.output_size > 0
            if not begun or is_gone(request) or is_cancelled(request, error):
                raise
            await out.fail(as_api_error(error))
        return await out.done()


async def _send_all(service: Service, answering: Answering, out: EventStream) -> None:
    """Send events as they come, and a comment during long pauses."""
    writer, frames = answering.writer, Frames(answering.writer)
    shown: tuple[int, bool] | None = None
    sent, since = 0, time.perf_counter()  # parts sent at the last check, and the time of the last part

    def send_now(index: int, event: Event) -> bool:
        written = frames.of(index, event)
        return written is not None and out.send_now(written)

    async for call, events in answering.events(service, send_now):
        position = service.queue_position(answering.name, call) if call.entered is None else None
        if position is not None and (position, service.asleep) != shown:
            shown = position, service.asleep
            await out.comment(
                f"waiting, position {position}" + (", asleep until POST /v1/memory/wake" if service.asleep else "")
            )
            await out.send(writer.progress([(0, Event(progress=Progress("queue", position, 0)))]))
        elif not events and out.sent == sent and time.perf_counter() - since >= TICK / 2:
            await out.comment("working")
        visible = [(index, event) for index, event in events if event.progress is None]
        await out.send([*writer.progress(events), *writer.chunks(visible)])
        if out.sent != sent:
            sent, since = out.sent, time.perf_counter()
