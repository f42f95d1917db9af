"""The HTTP side: one middleware around every route, and the sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..errors import OnedeskError, RequestError
from .connections import ConnectionRunner, is_cancelled, is_gone, raise_descriptor_limit, trust
from .error_documents import SOON, ApiError, as_api_error, error_body, of_aiohttp, to_json
from .guard import OPEN_ROUTES, Guard
from .openapi import document
from .routes import ROUTES
from .service import BESIDE, Service
from .unix_socket import make_socket

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 75.0  # also the limit for half-sent headers
CLOSE_SECONDS = 0.5  # grace for open responses, applied twice: to finish, then to finish after cancellation
BACKLOG = 256
GONE = 499  # status that is counted for a client that disconnected


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where the service listens: a unix socket, or a host and port (0: any free one)."""

    host: str
    port: int
    uds: Path | None = None


def make_app(service: Service, guard: Guard) -> web.Application:
    """The application. Every error response has OpenAI's shape."""
    app = web.Application(middlewares=[_around(service, guard)])
    for route in ROUTES:
        app.router.add_route(route.method, route.path, partial(route.handler, service), name=route.handler.__name__)
    described = to_json(document(service.version))

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=described, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)
    return app


def _around(service: Service, guard: Guard) -> Middleware:
    limit = service.settings.queue + service.settings.concurrency + BESIDE

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = GONE
        service.requests += 1
        service.last_request = time.monotonic()
        try:
            guard.check(request)
            if guard.token is None or request.path not in OPEN_ROUTES:
                trust(request)
            if service.requests > limit and request.path != "/health":
                raise ApiError(
                    429, f"more than {limit} requests at once; try again", code="too_many_requests", retry_after=SOON
                )
            response = await handler(request)
            status = response.status
            return response
        except BaseException as error:
            # The outermost handler. Whatever was raised (a Rust panic is not an Exception), the client gets
            # one complete response in OpenAI's shape, and the log gets every error that is not ours.
            if is_cancelled(request, error):
                raise
            failed = of_aiohttp(error) if isinstance(error, web.HTTPException) else None
            if is_gone(request):
                if not isinstance(error, ConnectionError | OnedeskError) and failed is None:
                    as_api_error(error)  # which logs it
                return web.Response(status=GONE)  # the client is gone
            if isinstance(error, asyncio.CancelledError) and service.stopping:  # while its body was still being read
                failed = ApiError(503, "the service is stopping", code="stopping", retry_after=SOON)
            failed = failed or as_api_error(error)
            log.debug("%s %s: %s", request.method, _route(request), failed)
            status = failed.status
            if (
                request.writer.output_size > 0
            ):  # the stream has begun and its end failed: a second response must not follow
                raise ConnectionResetError("the stream broke off") from error
            body = error_body(failed, request.path)
            return web.Response(body=body, status=status, headers=failed.headers(), content_type="application/json")
        finally:
            service.requests -= 1
            service.bodies.pop(id(request), None)
            service.figures.answered(_route(request), status)

    return around


def _route(request: web.Request) -> str:
    """The route's pattern, never the client's path: the number of labels must not grow with the paths requested."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical


async def listen(app: web.Application, address: ListenAddress, cache: Path) -> tuple[web.AppRunner, ListenAddress]:
    """Serve `app`. Returns the runner, which the caller cleans up, and the address with the actual port. `cache` is the
    tree's cache folder.

    Raises RequestError for an address that cannot be bound, FileError for a unix socket that cannot be created.
    """
    runner = ConnectionRunner(
        app,
        raise_descriptor_limit(),
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=CLOSE_SECONDS,
    )
    await runner.setup()
    if address.uds is not None:
        await web.SockSite(runner, make_socket(address.uds, cache), backlog=BACKLOG).start()
        return runner, address
    try:
        await web.TCPSite(runner, address.host, address.port, backlog=BACKLOG).start()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        bound = (
            f"cannot be bound: {error.strerror}; name an address of this machine with --host, and a port that you may"
            " take with --port"
        )
        what = "is taken by another program; choose one with --port" if taken else bound
        raise RequestError(f"port {address.port} of {address.host} {what}") from error
    host, port = runner.addresses[0][:2]
    return runner, ListenAddress(str(host), int(port))
