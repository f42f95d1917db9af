"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine as chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from ..engine.completion import Prepared
from .body import PICTURE_BODY_LIMIT, read_json
from .error_documents import to_json
from .generate import Answering, answer, begin
from .messages_requests import COUNT_TOKENS, MESSAGES, chat_body
from .messages_writer import MessagesWriter
from .requests import ParsedRequest, chat_ask
from .service import Service
from .typed_events import TypedEventStream


def _ask(body: Mapping[str, Any], context: int) -> ParsedRequest:
    return chat_ask(chat_body(body), context)


async def messages(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a conversation of content blocks."""
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


async def count_tokens(service: Service, request: web.Request) -> web.StreamResponse:
    """How many tokens a conversation has as a prompt."""
    body = await read_json(service, request, COUNT_TOKENS)
    with service.models.using() as uses:
        _, calls, _ = await begin(service, body, _ask, uses)
        count = sum(len(call.task.ids) for call in calls if isinstance(call.task, Prepared))
    return web.Response(body=to_json({"input_tokens": count}), content_type="application/json")
