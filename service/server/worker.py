"""The thread of one model: takes calls from its line and works on them, those that write text together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

from ..api import OpenModel
from ..core import Event, Progress
from ..engine.completion import Prepared
from ..errors import Caught
from .error_documents import as_api_error, contained
from .pending import Call, hand_over
from .request_queue import Line
from .statistics import Figures, Times
from .tasks import ended, kept_up

END_SECONDS = 60.0
PREPARERS = 2  # one renders while the other tokenizes
# Seconds for which a model that has nothing to do waits for requests that are just being prepared: what comes together
# is read in one pass, and each pass more takes 13 ms of a GPU and 200 of two CPU cores. One is prepared in 1 to 2 ms.
GATHERING = 0.02


class Coming:
    """How many requests are just being prepared. `one` is for the event loop, `wait` for a model's thread."""

    def __init__(self) -> None:
        self._count = 0
        self._none = threading.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more, until the loop has done what follows the block: by then it is in its line, or refused."""
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(self._one_less)

    def _one_less(self) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    def wait(self, seconds: float) -> None:
        """Wait until there is none, or so long."""
        if not self._none.is_set():
            self._none.wait(seconds)


class Worker:
    """Serves the line of one model. Made and closed on the event loop. `places` says how many rows may write at once
    now.
    """

    def __init__(self, name: str, places: Callable[[OpenModel], int], figures: Figures, coming: Coming) -> None:
        self.name = name
        self.coming = coming
        # Threads that check its requests and render its template. They are its own: one whose template never ends
        # delays no other model.
        self.preparing = 0
        self.preparers = ThreadPoolExecutor(PREPARERS, "onedesk-prepare")
        self.line: Line[Call] = Line(hand_over)
        self.working: list[Call] = []
        self.aborting = False
        self._last_used = time.monotonic()
        self._places = places
        self._figures = figures
        self._thread = ThreadPoolExecutor(1, "onedesk-serve")
        self._called = asyncio.Event()
        self._came: list[Call] = []  # that have something to look at
        self._task = asyncio.get_running_loop().create_task(kept_up(f"the queue of {name}", self._serve))

    @property
    def idle_seconds(self) -> float:
        """Seconds since a call ended; 0 while one is worked on or waits."""
        return 0.0 if self.working or len(self.line) else time.monotonic() - self._last_used

    def ask(self, call: Call) -> None:
        """Put a call into the line."""
        self.line.join(call)
        self._called.set()

    def drop(self, call: Call) -> None:
        """Nobody wants it any more."""
        call.stop()
        if self.line.leave(call):
            call.end()

    def go_on(self) -> None:
        """Take from the line again, after it was held."""
        self.line.go_on()
        self._called.set()

    async def idle(self) -> None:
        """Wait until the thread has ended what it works on now."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def in_turn(self, work: Callable[[], object]) -> None:
        """Do something in the thread when it has ended what it works on now."""
        await asyncio.wrap_future(self._thread.submit(contained, work))

    async def close(self, seconds: float = END_SECONDS) -> bool:
        """Stop what it works on, and end its threads; whether they have within `seconds`."""
        self.line.hold()
        self.aborting = True
        self._task.cancel()
        await asyncio.wait([self._task])
        done = await ended([self.preparers, self._thread], seconds)
        for call in self.working:
            call.end()
        return done

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for call in list(self.working):  # left by a failure of this task
            self._finish(call, as_api_error(RuntimeError("the queue of a model failed")))
        while True:
            await self._called.wait()
            done = loop.run_in_executor(self._thread, contained, self._work)
            self._called.clear()
            await asyncio.wait([done])
            # Whatever the thread failed with belongs to the calls that it was at, and is raised to those who wait for
            # them.
            error = done.exception()
            for call in list(self.working):
                self._finish(call, error)
            if error is not None and len(self.line):
                self._called.set()

    # In the thread

    def _work(self) -> None:
        """Until nobody waits."""
        while (call := self.line.take(lambda _: True)) is not None:
            self.working.append(call)
            if isinstance(call.task, Prepared):
                if self._places(call.model) > call.places:
                    self.coming.wait(GATHERING)
                self._write(call)
            else:
                call.enter()
                call.outcome = None if call.stopping else call.task(call.model, partial(self._unwanted, call))
                self._finish(call)

    def _unwanted(self, call: Call) -> bool:
        return call.stopping or self.aborting

    def _write(self, first: Call) -> None:
        """Write the answers of `first` and of those who come meanwhile, until none is left."""
        model, coming = first.model, [first]
        numbered: dict[int, Call] = {}
        count = 0

        def arrivals() -> Sequence[Prepared]:
            nonlocal count
            self._hand_over()
            came: list[Prepared] = []
            while (call := coming.pop() if coming else self._joining(model)) is not None:
                numbered[count], count = call, count + 1
                if isinstance(call.task, Prepared):
                    came.append(call.task)
            return came

        def unwanted(number: int) -> bool:
            return number not in numbered or numbered[number].stopping

        def report(progress: Progress) -> None:
            if progress.stage == "load":
                first.put(Event(progress=progress), alone=False)
                first.wake()

        with closing(
            model.serve(arrivals, cancel=lambda: self.aborting, cancel_request=unwanted, progress=report)
        ) as events:
            for event in events:
                call = numbered.get(event.request)
                if call is None:
                    continue  # it could not be told before; the model writes on until it looks
                with Caught("telling of an answer") as caught:
                    if event.error is None:
                        self._tell(call, event)
                error = event.error or caught.error
                if error is not None:
                    self._finish(call, error)
                if error is not None or (event.result is not None and self._told(call, event)):
                    del numbered[event.request]

    def _tell(self, call: Call, event: Event) -> None:
        """Hand an event to who waits for it."""
        if call.entered is None:
            call.enter()
        look = call.put(event, alone=len(self.working) == call.places == 1)
        if look:
            self._came.append(call)
        if look == "now":
            self._hand_over()

    def _hand_over(self) -> None:
        """Let all who have got something look. Tokens of one step go together: the engine asks for arrivals before
        the next.
        """
        came, self._came = self._came, []
        hand_over(came)

    def _joining(self, model: OpenModel) -> Call | None:
        """The next in line, if it can be written beside those that are."""
        if not len(self.line) or self.aborting:
            return None
        taken = sum(call.places for call in self.working)
        most = self._places(model)
        call = self.line.take(
            lambda call: isinstance(call.task, Prepared) and call.model is model and taken + call.places <= most
        )
        if call is not None:
            self.working.append(call)
        return call

    def _told(self, call: Call, event: Event) -> bool:
        """Count a result; whether it was the call's last."""
        if event.result is not None:
            self._figures.wrote(self.name, event.choice, event.result)
        call.results += 1
        if call.results < call.choices:
            return False
        self._finish(call)
        return True

    def _finish(self, call: Call, error: BaseException | None = None) -> None:
        self.working.remove(call)
        self._last_used = time.monotonic()
        try:
            self._figures.finished(self.name, Times(call.made, call.entered, call.first_token, time.perf_counter()))
        finally:
            call.end(error)
