"""Reads a JSON body, within bounds of size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from aiohttp import web

from .check import Schema, check
from .error_documents import ApiError

BODY_LIMIT = 8 << 20  # bytes; a text for the longest context of a Qwen, 1 million tokens, has 4 to 5 MB
PICTURE_BODY_LIMIT = 32 << 20  # of a conversation, which may hold pictures in base64
BODY_SECONDS = 30.0


async def read_json(request: web.Request, schema: Schema, limit: int = BODY_LIMIT) -> dict[str, Any]:
    """The body of `request`, an object that follows `schema`.

    Raises ApiError: 415 for another type, 413 beyond `limit` bytes, 408 after BODY_SECONDS, 400 for anything else that is wrong.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="wrong_content_type")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "the body is compressed; send it as it is", code="wrong_content_type")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        # A body that came with its headers needs no task that waits for it.
        raw = request.content.read_nowait() if request.content.is_eof() else await asyncio.wait_for(_read(request, limit), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body was not there after {BODY_SECONDS:g} s; send it at once", code="slow_body") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="broken_body") from error
    document = _parsed(raw)
    check(document, schema)
    return document


async def _read(request: web.Request, limit: int) -> bytes:
    raw = bytearray()
    async for chunk in request.content.iter_any():
        raw += chunk
        if len(raw) > limit:
            raise _too_large(limit)
    return bytes(raw)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; shorten it", code="body_too_large")
