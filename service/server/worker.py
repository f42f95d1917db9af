"""The thread of one model: takes calls from its queue and runs them, generations as one batch."""

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
# An idle model waits this many seconds for requests that are being prepared. Requests that arrive together are
# prefilled in one pass; each extra pass takes 13 ms of a GPU and 200 ms of two CPU cores. Preparing one takes 1 to 2
# ms.
GATHERING = 0.02


class Coming:
    """Counts the requests being prepared. `one` is for the event loop, `wait` for a model's thread."""

    def __init__(self) -> None:
        self._count = 0
        self._none = threading.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more until the loop has run the code after the block: by then the request is queued or refused."""
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
        """Wait until there is none, for at most this long."""
        if not self._none.is_set():
            self._none.wait(seconds)


class Worker:
    """Serves the queue of one model. Created and closed on the event loop. `batch_size` returns how many sequences may
    decode together now.
    """

    def __init__(self, name: str, batch_size: Callable[[OpenModel], int], figures: Figures, coming: Coming) -> None:
        self.name = name
        self.coming = coming
        # Threads that check its requests and render its template. Each model has its own, so a template that never ends
        # delays no other model.
        self.preparing = 0
        self.preparers = ThreadPoolExecutor(PREPARERS, "onedesk-prepare")
        self.line: Line[Call] = Line(hand_over)
        self.working: list[Call] = []
        self.aborting = False
        self._last_used = time.monotonic()
        self._batch_size = batch_size
        self._figures = figures
        self._thread = ThreadPoolExecutor(1, "onedesk-serve")
        self._called = asyncio.Event()
        self._came: list[Call] = []  # calls with something new for their readers
        self._task = asyncio.get_running_loop().create_task(kept_up(f"the queue of {name}", self._serve))

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last call ended; 0 while a call runs or is queued."""
        return 0.0 if self.working or len(self.line) else time.monotonic() - self._last_used

    def ask(self, call: Call) -> None:
        """Queue a call."""
        self.line.join(call)
        self._called.set()

    def drop(self, call: Call) -> None:
        """Drop a call that is no longer wanted."""
        call.stop()
        if self.line.leave(call):
            call.end()

    def go_on(self) -> None:
        """Take calls from the queue again, after it was held."""
        self.line.go_on()
        self._called.set()

    async def idle(self) -> None:
        """Wait until the thread has finished its current work."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def in_turn(self, work: Callable[[], object]) -> None:
        """Run `work` in the thread after its current work."""
        await asyncio.wrap_future(self._thread.submit(contained, work))

    async def close(self, seconds: float = END_SECONDS) -> bool:
        """Stop its current work and end its threads; returns whether they ended within `seconds`."""
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
        for call in list(self.working):  # left over from a failure of this task
            self._finish(call, as_api_error(RuntimeError("the queue of a model failed")))
        while True:
            await self._called.wait()
            done = loop.run_in_executor(self._thread, contained, self._work)
            self._called.clear()
            await asyncio.wait([done])
            # A failure of the thread belongs to the calls that it was running. It is raised to their readers.
            error = done.exception()
            for call in list(self.working):
                self._finish(call, error)
            if error is not None and len(self.line):
                self._called.set()

    # In the thread

    def _work(self) -> None:
        """Run calls until the queue is empty."""
        while (call := self.line.take(lambda _: True)) is not None:
            self.working.append(call)
            if isinstance(call.task, Prepared):
                if self._batch_size(call.model) > call.sequences:
                    self.coming.wait(GATHERING)
                self._write(call)
            else:
                call.enter()
                call.outcome = None if call.stopping else call.task(call.model, partial(self._unwanted, call))
                self._finish(call)

    def _unwanted(self, call: Call) -> bool:
        return call.stopping or self.aborting

    def _write(self, first: Call) -> None:
        """Generate for `first` and for calls that join meanwhile, until none is left."""
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
                    continue  # its stop could not be passed on earlier; the model generates until its next check
                if self._pass_on(call, event):
                    del numbered[event.request]

    def _pass_on(self, call: Call, event: Event) -> bool:
        """Pass an event to its call and count it; returns whether the call has ended. An error here ends this call
        alone."""
        with Caught("passing on an answer") as caught:
            if event.error is None:
                self._tell(call, event)
            if event.result is not None:
                self._figures.wrote(self.name, event.choice, event.result)
        error = event.error or caught.error
        if error is not None:
            self._finish(call, error)
            return True
        return event.result is not None and self._is_last(call)

    def _tell(self, call: Call, event: Event) -> None:
        """Pass an event to the call's reader."""
        if call.entered is None:
            call.enter()
        look = call.put(event, alone=len(self.working) == call.sequences == 1)
        if look:
            self._came.append(call)
        if look == "now":
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake the readers of all calls with new events. Tokens of one step go together: the engine asks for arrivals
        before the next.
        """
        came, self._came = self._came, []
        hand_over(came)

    def _joining(self, model: OpenModel) -> Call | None:
        """The next call in the queue, if it can join the current batch."""
        if not len(self.line) or self.aborting:
            return None
        taken = sum(call.sequences for call in self.working)
        most = self._batch_size(model)
        call = self.line.take(
            lambda call: isinstance(call.task, Prepared) and call.model is model and taken + call.sequences <= most
        )
        if call is not None:
            self.working.append(call)
        return call

    def _is_last(self, call: Call) -> bool:
        """Count a result; returns whether it was the call's last, which is then finished."""
        call.results += 1
        if call.results < call.choices:
            return False
        self._finish(call)
        return True

    def _finish(self, call: Call, error: BaseException | None = None) -> None:
        self.working.remove(call)
        self._last_used = time.monotonic()
        with Caught("counting a call"):  # its failure is of no other call
            self._figures.finished(self.name, Times(call.made, call.entered, call.first_token, time.perf_counter()))
        call.end(error)
