"""The thread of a model: what comes together is read together, and a step wakes the loop once, however many it wrote
for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from onedesk.service.core import Event, Result, Sampling, Usage
from onedesk.service.engine.completion import Limits, Prepared
from onedesk.service.engine.sampler import Adjustments
from onedesk.service.server import worker as worker_module
from onedesk.service.server.pending import Call
from onedesk.service.server.statistics import Figures
from onedesk.service.server.worker import Coming, Worker
from onedesk.service.text.stops import StopStrings

_LIMITS, _ADJUSTMENTS = Limits(8, 8, 8, frozenset()), Adjustments(Sampling(), (), 10)
PREPARED = Prepared((1,), Sampling(), 7, _LIMITS, 8, StopStrings(), False, False, None, 10, _ADJUSTMENTS)
LONG = 60.0  # seconds; no test waits for them


class Model:
    """Writes so many tokens for each request, in steps for all of them, and remembers with how many each of its
    passes began.
    """

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self.passes: list[int] = []

    def serve(self, arrivals: Callable[[], Sequence[Prepared]], **_: Any) -> Iterator[Event]:
        number = 0
        while came := arrivals():
            self.passes.append(len(came))
            writing = range(number, number := number + len(came))
            for step in range(self.tokens):
                if step:
                    assert not arrivals()
                yield from (Event("a", token=1, request=one) for one in writing)
            for one in writing:
                yield Event(result=Result("a", "", (1,), "stop", 7, Usage(1, 1, 0), {}, {}), request=one)


class Desk:
    """A worker, and those who ask it."""

    def __init__(self, batch_size: int = 8, tokens: int = 1) -> None:
        self.model, self.coming = Model(tokens), Coming()
        self.worker = Worker("m", lambda _: batch_size, Figures(), self.coming)

    async def ask(self, preparing: Awaitable[object]) -> None:
        """Prepare a request, then read its answer to the end."""
        with self.coming.one():
            await preparing
        call = Call(self.model, PREPARED)  # type: ignore[arg-type]
        self.worker.ask(call)
        while await call.take(LONG) is not None:
            continue


@pytest.mark.parametrize(("batch_size", "passes"), [(8, [8]), (3, [3, 3, 2])])
def test_requests_that_come_together_are_read_together(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, passes: list[int]
) -> None:
    monkeypatch.setattr(worker_module, "GATHERING", LONG)

    async def run() -> list[int]:
        desk = Desk(batch_size)
        await asyncio.gather(*(desk.ask(asyncio.sleep(0.002 * which)) for which in range(8)))
        await desk.worker.close()
        return desk.model.passes

    assert asyncio.run(run()) == passes


def test_who_takes_long_is_waited_for_only_a_moment() -> None:
    """Its template may render for seconds."""

    async def run() -> list[int]:
        desk, ready = Desk(), asyncio.Event()
        late = asyncio.create_task(desk.ask(ready.wait()))
        await asyncio.sleep(0)
        await asyncio.wait_for(desk.ask(asyncio.sleep(0)), LONG)
        ready.set()
        await late
        await desk.worker.close()
        return desk.model.passes

    assert asyncio.run(run()) == [1, 1]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_who_is_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """Nor does who has no place beside it, nor anybody for a request that was refused."""
    monkeypatch.setattr(worker_module, "GATHERING", LONG)

    async def run() -> list[int]:
        desk, never = Desk(batch_size), asyncio.Event()
        with pytest.raises(ValueError, match="refused"), desk.coming.one():
            raise ValueError("refused")
        await asyncio.sleep(0)
        late = asyncio.create_task(desk.ask(never.wait())) if batch_size == 1 else None
        await asyncio.sleep(0)
        await asyncio.wait_for(desk.ask(asyncio.sleep(0)), LONG / 2)
        if late is not None:
            late.cancel()
        await desk.worker.close()
        return desk.model.passes

    assert asyncio.run(run()) == [1]


def test_a_step_wakes_the_loop_once_however_many_it_writes_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "GATHERING", LONG)
    count, tokens = 8, 40

    async def run() -> int:
        loop, wakes = asyncio.get_running_loop(), 0
        real = loop.call_soon_threadsafe

        def wake(*arguments: Any, **options: Any) -> asyncio.Handle:
            nonlocal wakes
            wakes += 1
            return real(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
        desk = Desk(count, tokens)
        await asyncio.gather(*(desk.ask(asyncio.sleep(0)) for _ in range(count)))
        assert desk.model.passes == [count]
        found = wakes
        await desk.worker.close()
        return found

    # Each first token and each end at once, the tokens of every other step together, and the thread's own end.
    assert asyncio.run(run()) <= 2 * count + tokens + 2


@pytest.mark.parametrize("choices", [1, 8])
def test_only_a_single_text_is_sent_by_the_models_thread(choices: int) -> None:
    async def run() -> set[bool]:
        desk, own, found = Desk(), threading.get_ident(), set()
        call = Call(desk.model, replace(PREPARED, n=choices))  # type: ignore[arg-type]

        def sink(event: Event) -> bool:
            found.add(threading.get_ident() == own)
            return event.result is None

        def serve(arrivals: Callable[[], Sequence[Prepared]], **_: Any) -> Iterator[Event]:
            assert arrivals()
            while call._sink is None:  # until the reader waits
                time.sleep(0.001)
            yield from (Event("a", token=1, choice=choice) for choice in range(choices))
            arrivals()
            yield from (
                Event(choice=choice, result=Result("a", "", (1,), "stop", 7, Usage(1, 1, 0), {}, {}))
                for choice in range(choices)
            )

        desk.model.serve = serve  # type: ignore[method-assign]
        desk.worker.ask(call)
        while await call.take(LONG, sink) is not None:
            continue
        await desk.worker.close()
        return found

    assert (False in asyncio.run(run())) == (choices == 1)


@pytest.mark.parametrize("method", ["wrote", "finished"])
def test_counting_that_fails_for_one_call_ends_no_other(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(worker_module, "GATHERING", LONG)
    real, counted = getattr(Figures, method), []

    def first_fails(self: Figures, *arguments: Any) -> None:
        counted.append(arguments)
        if len(counted) == 1:
            raise ZeroDivisionError("a figure")
        real(self, *arguments)

    monkeypatch.setattr(Figures, method, first_fails)

    async def run() -> tuple[list[BaseException | None], list[int]]:
        desk = Desk()
        ended = await asyncio.gather(*(desk.ask(asyncio.sleep(0)) for _ in range(3)), return_exceptions=True)
        await desk.worker.close()
        return ended, desk.model.passes

    ended, passes = asyncio.run(run())
    assert passes == [3]
    assert len(counted) == 3
    assert len([one for one in ended if one is not None]) == (1 if method == "wrote" else 0)
