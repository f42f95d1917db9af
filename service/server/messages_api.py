"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine as chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from ..engine.completion import Prepared
from ..errors import OnedeskError
from .body import PICTURE_BODY_LIMIT, read_json
from .error_documents import as_api_error, to_json
from .generate import Answering, answer, begin
from .messages_requests import COUNT_TOKENS, MESSAGES, chat_body
from .messages_writer import MessagesWriter, error_document
from .requests import ParsedRequest, chat_ask
from .service import Service
from .typed_events import TypedEventStream


def _ask(body: Mapping[str, Any], context: int) -> ParsedRequest:
    return chat_ask(chat_body(body), context)


async def messages(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a conversation of content blocks."""
    return await _with_its_errors(request, partial(_answered, service, request))


async def count_tokens(service: Service, request: web.Request) -> web.StreamResponse:
    """How many tokens a conversation has as a prompt."""
    return await _with_its_errors(request, partial(_counted, service, request))


async def _answered(service: Service, request: web.Request) -> web.StreamResponse:
    body = await read_json(service, request, MESSAGES, PICTURE_BODY_LIMIT)
    with service.models.using() as uses:
        name, calls, ask = await begin(service, body, _ask, uses)
        writer = MessagesWriter(
            name,
            calls[0].model.tokenizer,
            ask.tools,
            one_call=ask.one_call,
            prompt=sum(len(call.task.ids) for call in calls if isinstance(call.task, Prepared)),
            stop=body.get("stop_sequences") or (),
        )
        return await answer(
            service, request, ask, Answering(name, calls, writer), partial(TypedEventStream, writer=writer)
        )


async def _counted(service: Service, request: web.Request) -> web.StreamResponse:
    body = await read_json(service, request, COUNT_TOKENS)
    with service.models.using() as uses:
        _, calls, _ = await begin(service, body, _ask, uses)
        count = sum(len(call.task.ids) for call in calls if isinstance(call.task, Prepared))
    return web.Response(body=to_json({"input_tokens": count}), content_type="application/json")


async def _with_its_errors(
    request: web.Request, work: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The response of `work`, or its error in the shape that clients of this API read."""
    try:
        return await work()
    except OnedeskError as error:
        if request.writer.output_size > 0:  # a stream has begun; a second response must not follow
            raise
        failed = as_api_error(error)
        body = to_json(error_document(failed))
        return web.Response(body=body, status=failed.status, headers=failed.headers(), content_type="application/json")
