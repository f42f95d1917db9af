"""Events that go to the socket past the loop: whole and in order, however slowly they are read, and nothing stays
open behind them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from onedesk.service.core import Event
from onedesk.service.server.pending import Call
from onedesk.service.server.sse import ClientGoneError, EventStream, as_events

LONG = 60.0
COUNT, LARGE = 1500, "x" * 8192  # more than sockets of loopback take


class Desk:
    """Streams `count` events of `text` that a thread makes, and counts those that the thread sent itself."""

    def __init__(self, count: int, text: str) -> None:
        self.count, self.text = count, text
        self.taken = 0
        self.ends: list[BaseException | None] = []
        self.begun = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        call = Call(None, lambda model, stopping: None)  # type: ignore[arg-type]

        def write() -> None:
            while call._sink is None:  # until the reader waits
                time.sleep(0.001)
            for at in range(self.count):
                if call.put(Event(self.text, token=at), alone=True):
                    call.wake()
            call.end()

        thread = threading.Thread(target=write)
        try:
            with EventStream(request) as out:

                def sink(event: Event) -> bool:
                    taken = out.send_now(as_events([self.told(event)]))
                    self.taken += taken
                    return taken

                await out.send([self.told(Event(token=-1))])
                self.begun.set()
                thread.start()
                while (events := await call.take(LONG, sink)) is not None:
                    await out.send([self.told(event) for event in events])
                response = await out.done()
        except BaseException as error:
            self.ends.append(error)
            raise
        else:
            self.ends.append(None)
            return response
        finally:
            if thread.ident is not None:
                await asyncio.to_thread(thread.join)

    def told(self, event: Event) -> dict[str, object]:
        return {"n": event.token, "text": event.text}


@asynccontextmanager
async def asking(desk: Desk) -> AsyncIterator[aiohttp.ClientResponse]:
    app = web.Application()
    app.router.add_get("/", desk.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as response,
        ):
            yield response
    finally:
        await runner.cleanup()


async def numbers(response: aiohttp.ClientResponse, text: str) -> list[int]:
    """Of the events of an answer that is read to its end."""
    parts = [part.removeprefix(b"data: ") for part in (await response.read()).split(b"\n\n") if part]
    assert parts.pop() == b"[DONE]"
    found = [json.loads(part) for part in parts]
    assert all(one["text"] == text for one in found[1:])
    return [one["n"] for one in found]


def sockets() -> int:
    gc.collect()
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def run(work: Callable[[], Awaitable[None]]) -> None:
    """To its end, after which as many sockets are open as before."""
    before = sockets()
    asyncio.run(asyncio.wait_for(work(), LONG))  # type: ignore[arg-type]
    assert sockets() == before


@pytest.mark.parametrize("text", ["a", LARGE])
def test_a_slow_reader_gets_everything_in_order(text: str) -> None:
    async def work() -> None:
        desk = Desk(COUNT, text)
        async with asking(desk) as response:
            await desk.begun.wait()
            await asyncio.sleep(0.2 if text == LARGE else 0)
            assert await numbers(response, text) == list(range(-1, COUNT))
        assert desk.taken > 0
        if text == LARGE:
            assert desk.taken < COUNT
        assert desk.ends == [None]

    run(work)


def test_a_client_that_vanishes_in_the_middle_ends_it() -> None:
    async def work() -> None:
        desk = Desk(COUNT, LARGE)
        async with asking(desk) as response:
            await response.content.readany()
            response.close()
            while not desk.ends:
                await asyncio.sleep(0.01)
        assert isinstance(desk.ends[0], ClientGoneError | ConnectionError | asyncio.CancelledError)

    run(work)


def test_without_a_socket_of_its_own_a_stream_goes_over_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has so many open files at most."""

    def none_left(self: object) -> None:
        raise OSError(24, "Too many open files")

    async def work() -> None:
        monkeypatch.setattr("asyncio.trsock.TransportSocket.dup", none_left)
        desk = Desk(20, "a")
        async with asking(desk) as response:
            assert await numbers(response, "a") == list(range(-1, 20))
        assert desk.taken == 0

    run(work)
