"""POST /v1/responses: OpenAI's Responses API over the same engine as chat. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from .body import PICTURE_BODY_LIMIT, read_json
from .generate import Answering, answer, begin
from .requests import ParsedRequest, chat_ask
from .responses_requests import RESPONSES, chat_body
from .responses_writer import ResponsesWriter
from .service import Service
from .typed_events import TypedEventStream


def _ask(body: Mapping[str, Any], context: int) -> ParsedRequest:
    return chat_ask(chat_body(body), context)


async def responses(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer an input of messages, calls and their results."""
    body = await read_json(service, request, RESPONSES, PICTURE_BODY_LIMIT)
    with service.models.using() as uses:
        name, calls, ask = await begin(service, body, _ask, uses)
        writer = ResponsesWriter(name, body, ask.tools, one_call=ask.one_call)
        return await answer(
            service, request, ask, Answering(name, calls, writer), partial(TypedEventStream, writer=writer)
        )
