"""The HTTP side: one middleware around every route, and the sockets."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..errors import FileError, RequestError
from .error_documents import SOON, ApiError, as_api_error, to_json
from .guard import Guard
from .openapi import document
from .routes import ROUTES
from .service import BESIDE, Service

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 75.0  # also how long half-sent headers are waited for
CLOSE_SECONDS = 5.0
BACKLOG = 256
GONE = 499  # what is counted for a client that went away


@dataclass(frozen=True, slots=True)
class Address:
    """Where the service listens: a unix socket, or a host and port (0: any free one)."""

    host: str
    port: int
    uds: Path | None = None


def make_app(service: Service, guard: Guard) -> web.Application:
    """The application; every answer to a wrong request has OpenAI's shape."""
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
            if service.requests > limit and request.path != "/health":
                raise ApiError(429, f"more than {limit} requests at once; try again", code="too_many_requests", retry_after=SOON)
            response = await handler(request)
            status = response.status
            return response
        except ConnectionError:
            return web.Response(status=GONE)  # to nobody; what is raised here, aiohttp logs as an error with its traceback
        except Exception as error:
            # The edge of the service: whatever it is, the client gets a status and OpenAI's shape, and the log what is not ours.
            failed = _from_aiohttp(error) if isinstance(error, web.HTTPException) else as_api_error(error)
            log.debug("%s %s: %s", request.method, _route(request), failed, exc_info=True)
            status = failed.status
            body = to_json(failed.document())
            return web.Response(body=body, status=status, headers=failed.headers(), content_type="application/json")
        finally:
            service.requests -= 1
            service.figures.answered(_route(request), status)

    return around


def _route(request: web.Request) -> str:
    """The route's own path, never the client's: labels must not grow with what is asked for."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical


def _from_aiohttp(error: web.HTTPException) -> ApiError:
    """What aiohttp itself answers: no such route, no such method."""
    if error.status == 404:
        return ApiError(404, "there is no such route; /openapi.json lists them", code="unknown_route")
    if error.status == 405:
        return ApiError(405, "this route takes another method; /openapi.json lists them", code="wrong_method")
    return ApiError(error.status, error.reason, code="http_error")


async def listen(app: web.Application, address: Address) -> tuple[web.AppRunner, Address]:
    """Serve `app`; returns the runner, to be cleaned up, and the address with the port that it got.

    Raises RequestError for an address that cannot be had, FileError for a unix socket that cannot be made.
    """
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=CLOSE_SECONDS,
    )
    await runner.setup()
    if address.uds is not None:
        await web.SockSite(runner, _unix_socket(address.uds), backlog=BACKLOG).start()
        return runner, address
    try:
        await web.TCPSite(runner, address.host, address.port, backlog=BACKLOG).start()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        bound = f"cannot be bound: {error.strerror}; name an address of this machine with --host, and a port that you may take with --port"
        what = "is taken by another program; choose one with --port" if taken else bound
        raise RequestError(f"port {address.port} of {address.host} {what}") from error
    host, port = runner.addresses[0][:2]
    return runner, Address(str(host), int(port))


def _unix_socket(path: Path) -> socket.socket:
    """A socket that only this user can reach. One that a dead service left is replaced, one that answers is not."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        made.bind(str(path))
    except OSError as error:
        made.close()
        raise FileError(f"the socket {path.name} cannot be made: {error.strerror or error}; name another with --uds") from error
    finally:
        os.umask(before)
    return made


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
