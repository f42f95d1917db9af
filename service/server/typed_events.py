"""Streams with named event types, as in the Responses and the Messages API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from ..core import Event, Result
from .error_documents import ApiError, to_json
from .responses import Document
from .sse import EventStream


class TypedEventsWriter(ABC):
    """The common base of such writers: one choice, no progress events, and no event that can skip the writer."""

    def __init__(self) -> None:
        self._result: Result | None = None

    def collect(self, index: int, event: Event) -> None:
        """Collect an event for the whole document."""
        self._result = event.result or self._result

    @abstractmethod
    def whole(self, total: Document) -> Document:
        """The document of the whole response; `total` is its usage in chat form."""

    @abstractmethod
    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """The stream's events for engine events that came together."""

    @abstractmethod
    def failure(self, error: ApiError) -> Document:
        """The error event that ends the stream."""

    def progress(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """None: these APIs have no progress events."""
        return []

    def only_adds(self, index: int) -> bool:
        """Whether an event only extends the text; always False here."""
        return False

    def usage_chunk(self, total: Document) -> Document:
        """None: the last event of a response contains the usage."""
        return {}

    def result(self) -> Result:
        """The collected result."""
        if self._result is None:
            raise ValueError("an answer without a result has no document")
        return self._result


class TypedEventStream(EventStream):
    """Names each event by the type of its document. The stream has no end marker."""

    def __init__(self, request: web.Request, writer: TypedEventsWriter) -> None:
        super().__init__(request)
        self._writer = writer

    async def send(self, documents: Iterable[Any]) -> None:
        """Send each document as an event."""
        data = b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), to_json(one)) for one in documents)
        if data:
            await self._write(data)

    async def fail(self, error: ApiError) -> None:
        """Send an error that ends the stream."""
        await self.send([self._writer.failure(error)])

    async def done(self) -> web.StreamResponse:
        """End the stream; returns the response."""
        response = self.response or await self._write(b": nothing came\n\n")
        await response.write_eof()
        return response
