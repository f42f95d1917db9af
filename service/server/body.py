"""Reads a JSON body, with limits on size, time and element count, and without blocking the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from .bounded_json import DEPTH_LIMIT, parse
from .check import Schema, check
from .error_documents import SOON, ApiError
from .service import Service

BODY_LIMIT = 8 << 20  # bytes; a text that fills the longest context of a Qwen, 1 million tokens, has 4 to 5 MB
PICTURE_BODY_LIMIT = 32 << 20  # for a conversation, which may contain images in base64
BODY_SECONDS = 30.0
# Bodies of up to this many bytes are parsed and checked on the event loop, which takes 1 ms. Larger ones go to a
# thread.
SMALL_BODY = 16 << 10
# Total bytes of larger bodies over all open requests. Parsed, they take up to ten times as much.
BODIES_LIMIT = 64 << 20


async def read_json(service: Service, request: web.Request, schema: Schema, limit: int = BODY_LIMIT) -> dict[str, Any]:
    """The body of `request`, an object that matches `schema`.

    Raises ApiError: 415 for another content type, 413 above `limit` bytes, 408 after BODY_SECONDS, 429 while too many
    bytes of large bodies are in use, 400 for any other fault.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="wrong_content_type")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "the body is compressed; send it as it is", code="wrong_content_type")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        # A body that arrived with its headers needs no waiting task.
        at_once = request.content.is_eof()
        raw = (
            request.content.read_nowait()
            if at_once
            else await asyncio.wait_for(_read(service, request, limit), BODY_SECONDS)
        )
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body was not there after {BODY_SECONDS:g} s; send it at once", code="slow_body"
        ) from None
    except web.RequestPayloadError as error:
        raise ApiError(
            400, "the body cannot be read: it is cut short, or its chunks are malformed", code="broken_body"
        ) from error
    if len(raw) <= SMALL_BODY:
        return _checked(raw, schema)
    _count(service, request, len(raw))
    return await service.parse(_checked, raw, schema)


async def _read(service: Service, request: web.Request, limit: int) -> bytes:
    raw = bytearray()
    async for chunk in request.content.iter_any():
        raw += chunk
        if len(raw) > limit:
            raise _too_large(limit)
        if len(raw) > SMALL_BODY:
            _count(service, request, len(raw))
    return bytes(raw)


def _count(service: Service, request: web.Request, nbytes: int) -> None:
    """Count the bytes of a large body until its request is answered. Raises ApiError 429 if the total is too large."""
    more = nbytes - service.bodies.get(id(request), 0)
    if sum(service.bodies.values()) + more > BODIES_LIMIT:
        message = f"large bodies of other requests have more than {BODIES_LIMIT - nbytes:,} bytes together; try again"
        raise ApiError(429, message, code="too_many_requests", retry_after=SOON)
    service.bodies[id(request)] = nbytes


def _checked(raw: bytes, schema: Schema) -> Any:
    try:
        document = parse(raw)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(
            400, f"the body is nested too deeply; at most {DEPTH_LIMIT} levels are read", code="invalid_json"
        ) from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    check(document, schema)
    return document


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; shorten it", code="body_too_large")
