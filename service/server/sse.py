"""A stream of server-sent events to one client, however slowly it reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web

from .error_documents import ApiError, to_json

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# A client that takes nothing for so long is gone. What waits for it meanwhile is bounded by the length of the answer.
WRITE_SECONDS = 60.0


class ClientGoneError(ConnectionError):
    """The client reads no longer."""


def as_events(documents: Iterable[Any]) -> bytes:
    """Each document as a server-sent event."""
    return b"".join(b"data: " + to_json(document) + b"\n\n" for document in documents)


class _Response(web.StreamResponse):
    """Sends its headers in one packet with the first part; aiohttp's own response sends them before."""

    _send_headers_immediately = False


class EventStream:
    """An answer in parts. The first part sends the headers; after that an error can only be a part too. A context
    manager: to be ended.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self.response: web.StreamResponse | None = None
        self.sent = 0  # parts so far
        self._chunked = False
        # The connection by a number of its own, for `send_now`: the transport's may already be another client's when
        # this one is gone.
        self._socket: socket.socket | None = None
        self._clear = False  # whether all that was sent before is with the system

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    async def comment(self, text: str) -> None:
        """Send what clients skip."""
        await self._write(f": {text}\n\n".encode())

    async def send(self, documents: Iterable[Any]) -> None:
        """Send each document as an event."""
        data = as_events(documents)
        if data:
            await self._write(data)

    def send_now(self, frames: bytes) -> bool:
        """Send events that are written down already, without waiting, in any thread while no other sends; False where
        the client has not taken all that was sent before.

        Past the response's own writer, which would make four coroutines of it, and from the model's thread past the
        loop: a wake-up and a hand-over of Python were 0.1 to 0.3 ms a token.
        """
        made, transport = self._socket, self._request.transport
        if not self._clear or made is None or transport is None or transport.is_closing():
            return False
        if not frames:
            return True
        data = b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames
        try:
            taken = made.send(data)
        except OSError:  # full, or gone, which the loop is told by itself
            return False
        self.sent += 1
        if taken < len(data):
            self._clear = False
            self._loop.call_soon_threadsafe(transport.write, data[taken:])
        return True

    async def fail(self, error: ApiError) -> None:
        """Send an error in place of the rest."""
        await self._write(as_events([error.document()]))

    async def done(self) -> web.StreamResponse:
        """Send the last event; returns the response."""
        response = await self._write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _write(self, data: bytes) -> web.StreamResponse:
        response = self.response
        if response is None:
            response = self.response = _Response(headers=HEADERS)
            await response.prepare(self._request)
            self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self.sent += 1
        transport = self._request.transport
        if transport is None:
            raise ClientGoneError("the client is gone")
        if transport.get_write_buffer_size() == 0:
            await response.write(data)
        else:
            try:
                await asyncio.wait_for(response.write(data), WRITE_SECONDS)
            except asyncio.TimeoutError:
                transport.abort()
                raise ClientGoneError("the client took nothing for too long") from None
        own = self._request.get_extra_info("socket")
        if self._socket is None and own is not None and not transport.is_closing():
            with suppress(OSError):  # too many open files: then all goes this way
                self._socket = own.dup()  # behind the first part, which is waited for
        self._clear = transport.get_write_buffer_size() == 0
        return response
