"""Streams whose events have types of their own, as the Responses and the Messages API have them."""

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
    """What writers of such APIs share: one choice, no progress, and no event that could be written without looking
    at it.
    """

    def __init__(self) -> None:
        self._result: Result | None = None

    def collect(self, index: int, event: Event) -> None:
        """Take an event for the whole document."""
        self._result = event.result or self._result

    @abstractmethod
    def whole(self, total: Document) -> Document:
        """The document of the whole answer; `total` is its usage as a chat tells it."""

    @abstractmethod
    def chunks(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """The stream's events for what came together."""

    @abstractmethod
    def failure(self, error: ApiError) -> Document:
        """The event of an error in place of the rest."""

    def progress(self, events: Iterable[tuple[int, Event]]) -> list[Document]:
        """Nothing: these APIs have no event for it."""
        return []

    def only_adds(self, index: int) -> bool:
        """Whether an event changes nothing else; never known here."""
        return False

    def usage_chunk(self, total: Document) -> Document:
        """Usage stands in the last event of an answer."""
        return {}

    def result(self) -> Result:
        """What was collected."""
        if self._result is None:
            raise ValueError("an answer without a result has no document")
        return self._result


class TypedEventStream(EventStream):
    """Names each event by the type of its document, and ends without a mark of its own."""

    def __init__(self, request: web.Request, writer: TypedEventsWriter) -> None:
        super().__init__(request)
        self._writer = writer

    async def send(self, documents: Iterable[Any]) -> None:
        """Send each document as an event."""
        data = b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), to_json(one)) for one in documents)
        if data:
            await self._write(data)

    async def fail(self, error: ApiError) -> None:
        """Send an error in place of the rest."""
        await self.send([self._writer.failure(error)])

    async def done(self) -> web.StreamResponse:
        """End the stream; returns the response."""
        response = self.response or await self._write(b": nothing came\n\n")
        await response.write_eof()
        return response
