"""A stream of server-sent events to one client, even a slow one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web

from .error_documents import ApiError, to_json

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Seconds without progress after which the client counts as disconnected. The data buffered meanwhile is bounded by the
# length of the response.
WRITE_SECONDS = 60.0


class ClientGoneError(ConnectionError):
    """The client has disconnected or stopped reading."""


def as_events(documents: Iterable[Any]) -> bytes:
    """Each document as a server-sent event."""
    return b"".join(b"data: " + to_json(document) + b"\n\n" for document in documents)


class _Response(web.StreamResponse):
    """Sends its headers in one packet with the first part. aiohttp's own response sends them separately."""

    _send_headers_immediately = False


class EventStream:
    """A response in parts. The first part sends the headers; after that, an error can only be another part. A context
    manager that ends the response.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self.response: web.StreamResponse | None = None
        self.sent = 0  # parts sent so far
        self._chunked = False
        # A duplicate of the connection's descriptor, for `send_now`. The transport's own number may belong to another
        # client after this one disconnects.
        self._socket: socket.socket | None = None
        self._clear = False  # whether everything sent before is in the system's buffer

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    async def comment(self, text: str) -> None:
        """Send a comment, which clients skip."""
        await self._write(f": {text}\n\n".encode())

    async def send(self, documents: Iterable[Any]) -> None:
        """Send each document as an event."""
        data = as_events(documents)
        if data:
            await self._write(data)

    def send_now(self, frames: bytes) -> bool:
        """Send encoded events without waiting, in any thread while no other thread sends. False if earlier data is
        still buffered.

        It bypasses the response's own writer, which would need four coroutines, and, in the model's thread, the loop: a
        wake-up and a hand-over of Python's lock took 0.1 to 0.3 ms per token.
        """
        made, transport = self._socket, self._request.transport
        if not self._clear or made is None or transport is None or transport.is_closing():
            return False
        if not frames:
            return True
        data = b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames
        try:
            taken = made.send(data)
        except OSError:  # full, or disconnected, which the loop finds out itself
            return False
        self.sent += 1
        if taken < len(data):
            self._clear = False
            self._loop.call_soon_threadsafe(transport.write, data[taken:])
        return True

    async def fail(self, error: ApiError) -> None:
        """Send an error that ends the stream."""
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
            with suppress(OSError):  # too many open files: everything goes through the writer
                self._socket = own.dup()  # after the first part, which is awaited
        self._clear = transport.get_write_buffer_size() == 0
        return response
