"""The connections of the service: how many, how long one may stay without a token, and the response to a malformed
request.

aiohttp quotes the lines of a request that it cannot parse in its response and its log, and they may contain the token.
Here neither does.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from .error_documents import ApiError, as_api_error, error_body, of_aiohttp, to_json

log = logging.getLogger(__name__)

# Seconds in which a connection must send complete request headers with the token. Only /health needs no token.
STRANGER_SECONDS = 10.0
CONNECTIONS_LIMIT = 1024
# File descriptors reserved for models, pipes and logs. Each connection may take two: a stream sends on a duplicate.
_OTHER_DESCRIPTORS = 128
_MALFORMED = "the request is not valid HTTP/1.1; send the request line and the headers as RFC 9112 has them"
_FULL = ApiError(
    503,
    "the service has as many connections as it takes; close some, or try again",
    code="too_many_connections",
    retry_after=5,
)


def raise_descriptor_limit() -> int:
    """Raise the process's limit of open files to the hard limit; returns the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:  # some systems have a hard limit that cannot be reached
            log.debug("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_LIMIT
    return max(16, min(CONNECTIONS_LIMIT, (soft - _OTHER_DESCRIPTORS) // 2))


class Connection(RequestHandler):
    """One connection. Until `trust` is called, it is closed after STRANGER_SECONDS, or earlier if there are too many
    connections.
    """

    __slots__ = ("_limit", "_server", "_stranger_timer", "trusted")

    def __init__(self, server: Server, limit: int, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._limit = limit
        self._stranger_timer: asyncio.TimerHandle | None = None
        self.trusted = False

    def trust(self) -> None:
        """Its request has shown the token: it may stay as long as it is used."""
        self.trusted = True
        self._end_timer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept it. If there are too many, close the oldest one without a token, or refuse the new one."""
        others = self._server.connections
        super().connection_made(transport)
        if len(others) >= self._limit:
            strangers = (
                one for one in others if isinstance(one, Connection) and not one.trusted and one.transport is not None
            )
            oldest = next(strangers, None)
            if oldest is None:
                self._refuse()
                return
            oldest.force_close()
        self._stranger_timer = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._expire)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is closed."""
        self._end_timer()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The response where no handler has answered: OpenAI's shape, without any of the client's bytes.

        Raises ConnectionError if a response has begun: a second one must not follow.
        """
        if request.writer.output_size > 0:
            raise ConnectionResetError("an answer broke off")
        if status == 400:
            log.debug("a request was malformed: %s", type(exc).__name__)
            failed = ApiError(400, _MALFORMED, code="malformed_request")
        else:
            failed = as_api_error(exc or RuntimeError(f"status {status}"))
        return _closing(failed, request.path)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. What aiohttp raised before the handlers (a header Expect that it does not know) would quote
        the client, and is replaced."""
        if isinstance(resp, web.HTTPException):
            resp = _closing(of_aiohttp(resp), request.path)
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an internal error of aiohttp, without the client's lines."""
        error = kw.get("exc_info")
        log.error("a connection failed: %s", type(error).__name__ if isinstance(error, BaseException) else args[0])

    def _expire(self) -> None:
        self._stranger_timer = None
        if not self.trusted:
            self.force_close()

    def _end_timer(self) -> None:
        if self._stranger_timer is not None:
            self._stranger_timer.cancel()
            self._stranger_timer = None

    def _refuse(self) -> None:
        body = to_json(_FULL.document())
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.transport is not None:
            self.transport.write(f"{head}Retry-After: {_FULL.retry_after}\r\nConnection: close\r\n\r\n".encode() + body)
        self.force_close()


def _closing(failed: ApiError, path: str) -> web.Response:
    """An error response after which the connection is closed."""
    body = error_body(failed, path)
    response = web.Response(body=body, status=failed.status, headers=failed.headers(), content_type="application/json")
    response.force_close()
    return response


class Server(web.Server):
    """Creates the connections."""

    def __init__(self, made: web.Server, limit: int, options: dict[str, Any]) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **options,
        )
        self._options = options
        self._limit = limit

    def __call__(self) -> Connection:
        """A new connection, for the event loop."""
        return Connection(self, self._limit, loop=asyncio.get_running_loop(), **self._options)


class ConnectionRunner(web.AppRunner):
    """aiohttp's runner, with at most `limit` of our connections."""

    def __init__(self, app: web.Application, limit: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._limit = limit

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        own = ("keepalive_timeout", "access_log", "auto_decompress")
        return Server(made, self._limit, {name: value for name, value in self._kwargs.items() if name in own})


def trust(request: web.Request) -> None:
    """The request has shown the token: its connection may stay."""
    protocol = request.protocol
    if isinstance(protocol, Connection):
        protocol.trust()


def is_gone(request: web.Request) -> bool:
    """Whether the client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def is_cancelled(request: web.Request, error: BaseException) -> bool:
    """Whether `error` is the cancellation of this request's task. If not, it was raised by mistake, and the client
    still waits for a response.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    cancelling = getattr(asyncio.current_task(), "cancelling", None)  # since Python 3.11
    return is_gone(request) or cancelling is None or cancelling() > 0
