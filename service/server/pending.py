"""A pending request: created and read on the event loop, run by its model's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from ..api import OpenModel
from ..core import Event
from ..engine.completion import Prepared

log = logging.getLogger(__name__)

# Work other than generation, such as an embedding. It runs in the model's thread and gets the check that says whether
# to stop.
Work = Callable[[OpenModel, Callable[[], bool]], Any]
# Seconds until the first report of the queue position. Most requests never wait that long, and an earlier failure still
# has a status of its own.
HESITATION = 0.25
# A longer prompt is reported when its prefill starts, without this delay.
LONG = 256
# May take an event as soon as it comes, in the thread that made it or on the loop; returns whether it has. It must not
# wait or fail.
Sink = Callable[[Event], bool]
# When the reader should look: not at all, after the current step, or at once.
Look: TypeAlias = Literal["", "soon", "now"]


class Call:
    """One accepted request, or one piece of other work, for one model.

    `put`, `found`, `enter` and `end` are for the model's thread, `take` is for the event loop.
    """

    def __init__(self, model: OpenModel, task: Prepared | Work) -> None:
        self.model = model
        self.task = task
        self.stopping = False
        self.made = time.perf_counter()
        self.entered: float | None = None  # when the model started it
        self.first_token: float | None = None
        self.outcome: Any = None  # the result of other work
        self.results = 0  # handed over by the model's thread
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # held while the sink takes an event, and while the sink is lent or taken back
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._woken = False  # whether the loop is about to look
        self._news = False  # whether there is something new for the reader
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def choices(self) -> int:
        """The number of results that it will have."""
        return self.task.n if isinstance(self.task, Prepared) else 0

    @property
    def sequences(self) -> int:
        """Sequences that it adds to a batch."""
        return self.task.beams or self.task.best_of or self.task.n if isinstance(self.task, Prepared) else 1

    @property
    def ended(self) -> bool:
        """Whether it has ended: nothing more comes."""
        return self._ended

    # The model's thread

    def enter(self) -> None:
        """The model starts it. The loop is woken only if a queue position may have been reported: the model's thread
        would wait for that Python code just when it is about to start.
        """
        self.entered = time.perf_counter()
        if self._waited:
            self.wake()

    def put(self, event: Event, *, alone: bool) -> Look:
        """Add an event. `hand_over` later tells the reader to look. `alone`: the reader's sink may take the event here
        and now, without a wake-up. When a step decodes for several requests, that would delay the step: 8 sends take
        the thread 1.2 ms, and the loop has time.

        Returns when the reader should look. The end of a prefill can wait, since the first token follows it; so can the
        start of a short prefill.
        """
        first = event.token is not None and self.first_token is None
        if first:
            self.first_token = time.perf_counter()
        with self._lock:
            if alone and not self._events and self._sinks(event):
                return ""
            self._events.append(event)
        if event.token is not None or event.progress is None:
            return "now" if first or event.token is None else "soon"
        return "now" if event.progress.total - event.progress.done > (0 if self._waited else LONG) else ""

    @property
    def _waited(self) -> bool:
        return self.entered is not None and self.entered - self.made >= HESITATION

    # Any thread

    def end(self, error: BaseException | None = None) -> None:
        """End it: nothing more comes. Only the first call counts."""
        if not self._ended:
            self._error, self._ended = error, True
            self.wake()

    def stop(self) -> None:
        """Cancel it: the model stops it at the next token or layer."""
        self.stopping = True

    def wake(self) -> None:
        """Let the reader look again. One call on the loop covers everything that comes until the reader looks."""
        hand_over([self])

    # The event loop

    async def take(self, seconds: float, sink: Sink | None = None) -> Sequence[Event] | None:
        """The events since the last call; perhaps none, if only the queue position has changed or `seconds` have
        passed; None at the end.

        While this waits, `sink` is lent to the producer: what it takes costs no turn of this task, or no wake-up of the
        loop at all. Raises the model's failure after everything before it was taken.
        """
        if not self._news and not self._events and not self._ended:
            waiter = self.loop.create_future()
            with self._lock:
                self._waiter, self._sink = waiter, sink
            alarm = self.loop.call_later(seconds, self._release)
            try:
                await waiter
            finally:
                alarm.cancel()
                with self._lock:
                    self._waiter = self._sink = None
        ended, self._news = self._ended, False
        events = [self._events.popleft() for _ in range(len(self._events))]
        if events or not ended:
            return events
        if self._error is not None:
            raise self._error
        return None

    def look(self) -> None:
        """There is something new: offer it to the sink, otherwise wake the reader."""
        self._woken = False
        if not self._offered():
            self._news = True
            self._release()

    def _offered(self) -> bool:
        """Whether there was something and the sink took all of it."""
        with self._lock:
            came = bool(self._events)
            while self._events and self._sinks(self._events[0]):
                self._events.popleft()
        return came and not self._events and not self._ended

    def _sinks(self, event: Event) -> bool:
        """Whether the sink, if one is lent, took the event. A sink that fails is not used again. The reader then gets
        the event, and its failure ends its own response, not those of other calls in the batch.
        """
        if self._sink is None:
            return False
        try:
            return self._sink(event)
        except BaseException as error:  # noqa: BLE001
            log.debug("an event could not be sent at once: %r", error)
            self._sink = None
            return False

    def _release(self) -> None:
        """Take the sink back, then wake the reader: what it sends follows everything that the sink has sent."""
        with self._lock:
            self._sink = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pending(self) -> bool:
        """Whether its reader has yet to be woken; from then on it counts as woken."""
        woken, self._woken = self._woken, True
        return not woken


def hand_over(calls: Sequence[Call]) -> None:
    """Wake the readers of `calls`, all on one loop, with one wake-up of the loop. From any thread."""
    untold = [call for call in calls if call.pending()]
    if untold:
        untold[0].loop.call_soon_threadsafe(_look, untold)


def _look(calls: Sequence[Call]) -> None:
    for call in calls:
        call.look()
