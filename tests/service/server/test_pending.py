"""A call between its model's thread and the loop: nothing is lost, doubled or overtaken, whoever takes what comes."""

from __future__ import annotations

import asyncio
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import Event, Progress
from onedesk.service.server.pending import Call

LONG = 60.0


def told(
    call: Call, events: list[Event], refused: frozenset[int], patience: float, alone: list[bool]
) -> tuple[list[int], int]:
    """The tokens in the order in which they came, and how many of them the sink took."""
    came: list[int] = []
    taken = 0

    def sink(event: Event) -> bool:
        nonlocal taken
        if event.token is None or event.token in refused:
            return False
        came.append(event.token)
        taken += 1
        return True

    def write() -> None:
        for at, event in enumerate(events):
            if call.put(event, alone=alone[at % len(alone)]):
                call.wake()
        call.end()

    async def read() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        while (found := await call.take(patience, sink)) is not None:
            came.extend(event.token for event in found if event.token is not None)
            await asyncio.sleep(0)
        thread.join()

    call.loop.run_until_complete(read())
    return came, taken


def made(loop: asyncio.AbstractEventLoop) -> Call:
    async def make() -> Call:
        return Call(None, lambda model, stopping: None)  # type: ignore[arg-type]

    return loop.run_until_complete(make())


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 300),
    st.frozensets(st.integers(0, 300), max_size=40),
    st.sampled_from([0.0, 0.0005, LONG]),
    st.lists(st.booleans(), min_size=1, max_size=20),
)
def test_sink_and_loop_take_events_in_order(
    count: int, refused: frozenset[int], patience: float, alone: list[bool]
) -> None:
    loop = asyncio.new_event_loop()
    try:
        events = [Event(token=at) if at % 7 else Event("x", token=at) for at in range(count)]
        if count:
            events.insert(count // 2, Event(progress=Progress("prefill", 1, 1000)))
        came, taken = told(made(loop), events, refused, patience, alone)
        assert came == list(range(count))
        assert taken <= count
    finally:
        loop.close()


def test_a_token_that_the_sink_takes_wakes_nobody() -> None:
    async def run() -> None:
        call = Call(None, lambda model, stopping: None)  # type: ignore[arg-type]
        came: list[Event] = []
        waiting = asyncio.ensure_future(call.take(LONG, lambda event: event.result is None and not came.append(event)))
        await asyncio.sleep(0)  # it waits, and has lent its sink
        looks = await asyncio.to_thread(lambda: [call.put(Event("a", token=at), alone=True) for at in range(100)])
        assert looks == [""] * 100
        assert [event.token for event in came] == list(range(100))
        assert not waiting.done()
        assert await asyncio.to_thread(call.put, Event("a", token=100), alone=False) == "soon"
        call.look()
        assert (len(came), waiting.done()) == (101, False)  # it was taken on the loop, and the task sleeps on
        call.end()
        assert await waiting is None
        assert call.put(Event("a", token=101), alone=True) == "soon"  # nobody waits any more
        assert len(came) == 101

    asyncio.run(run())
