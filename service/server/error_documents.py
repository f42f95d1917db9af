"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with a status, and when to retry."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
