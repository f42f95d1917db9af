"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with a status, and when to retry."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from ..errors import (
    Cancelled,
    FileError,
    MemoryFull,
    ModelError,
    OnedeskError,
    PeerError,
    RequestError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

# Default for Retry-After.
SOON = 5

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# The same for Anthropic's API, whose clients read them below this path.
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FAMILY: tuple[tuple[type[OnedeskError], int, str], ...] = (
    (RequestError, 400, "invalid_request"),
    (ModelError, 400, "model_unusable"),
    (FileError, 500, "file_error"),
    (MemoryFull, 503, "memory_full"),
    (Cancelled, 503, "stopped"),
    (PeerError, 502, "peer_error"),
)


class ApiError(OnedeskError):
    """An error response. `param` is the wrong field, `retry_after` the seconds after which a retry may succeed."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def document(self) -> dict[str, Any]:
        """The body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: BaseException) -> ApiError:
    """`error` for a client. An OnedeskError keeps its message. Anything else is logged, and the client gets a general
    message.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _FAMILY:
        if isinstance(error, kind):
            param = next(iter(error.fields), None)
            return ApiError(status, str(error), code=code, param=param, retry_after=SOON if status == 503 else None)
    log.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError):
        message = "the machine has no memory left for this request; try again when less is running"
        return ApiError(503, message, code="memory_full", retry_after=SOON)
    return ApiError(500, "the service failed at this request; its log says more", code="internal_error")


def of_aiohttp(error: web.HTTPException) -> ApiError:
    """The error response for what aiohttp itself rejects, such as an unknown route: without any of the client's
    bytes."""
    if error.status == 404:
        return ApiError(404, "there is no such route; /openapi.json lists them", code="unknown_route")
    if error.status == 405:
        return ApiError(405, "this route takes another method; /openapi.json lists them", code="wrong_method")
    if error.status == 417:
        return ApiError(417, "the header Expect may only be 100-continue; leave it out", code="wrong_expectation")
    return ApiError(error.status, HTTPStatus(error.status).phrase, code="http_error")


def contained(work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` within a pool thread; returns its result. Anything raised outside our error family is logged and
    raised as an ApiError.

    A future or a coroutine cannot carry every exception: StopIteration leaves the waiting task without an end,
    CancelledError looks like a disconnected client, SystemExit ends the process, and a panic of a Rust library is no
    Exception.
    """
    try:
        return work(*arguments)
    except OnedeskError:
        raise
    except BaseException as error:
        raise as_api_error(error) from error


def error_body(error: ApiError, path: str) -> bytes:
    """The body of an error response at `path`, in the shape that the clients of its API read."""
    shaped = path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")
    return to_json(anthropic_document(error) if shaped else error.document())


def anthropic_document(error: ApiError) -> dict[str, Any]:
    """An error in the shape of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def to_json(document: Any) -> bytes:
    """ASCII, so that lone surrogates cannot break it. Infinities become null, since JSON has none."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(document), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
