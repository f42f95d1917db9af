"""A request on its way through the service: made and read on the event loop, worked on by its model's thread."""

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

# What a call does that is no generation, such as an embedding: in the model's thread, told how to ask whether to stop.
Work = Callable[[OpenModel, Callable[[], bool]], Any]
# Seconds after which who waits is told its place for the first time. Most never wait so long, and what fails before has
# a status.
HESITATION = 0.25
# A prompt with more tokens to read is told of when that begins, not at the end of somebody's patience.
LONG = 256
# What may take an event the moment it comes, in the thread that made it or on the loop; whether it has. It must not
# wait or fail.
Sink = Callable[[Event], bool]
# When the reader should look: it need not, when the step is over, at once.
Look: TypeAlias = Literal["", "soon", "now"]


class Call:
    """One request that the engine has not refused, or one piece of other work, for one model.

    `put`, `found`, `enter` and `end` are for the model's thread, `take` is for the event loop.
    """

    def __init__(self, model: OpenModel, task: Prepared | Work) -> None:
        self.model = model
        self.task = task
        self.stopping = False
        self.made = time.perf_counter()
        self.entered: float | None = None  # when the model began with it
        self.first_token: float | None = None
        self.outcome: Any = None  # what other work found
        self.results = 0  # that the model's thread has handed over
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # held while the sink takes something, and where it is lent and taken back
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._woken = False  # whether the loop is going to look
        self._news = False  # whether the reader has something to look at
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def choices(self) -> int:
        """How many results it will have."""
        return self.task.n if isinstance(self.task, Prepared) else 0

    @property
    def places(self) -> int:
        """Rows of a decode step that it takes."""
        return self.task.beams or self.task.best_of or self.task.n if isinstance(self.task, Prepared) else 1

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._ended

    # The model's thread

    def enter(self) -> None:
        """The model begins with it. The loop is woken only where it may have told a place: what Python does there, the
        model's thread waits
        for, at the moment at which it is about to begin."""
        self.entered = time.perf_counter()
        if self._waited:
            self.wake()

    def put(self, event: Event, *, alone: bool) -> Look:
        """Take what came; when its reader should look, see `hand_over`. `alone`: the reader's sink may take it here and
        now, while the reader waits, and nobody is woken. Where a step writes for several that would hold it up: 8 sends
        take the thread 1.2 ms, and the loop has time.

        They may look at the end of their patience for the end of reading a prompt, which the first token follows, and
        for the beginning of a short one.
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
        """Nothing comes any more; the first end counts."""
        if not self._ended:
            self._error, self._ended = error, True
            self.wake()

    def stop(self) -> None:
        """It is no longer wanted: the model ends it at the next token or layer."""
        self.stopping = True

    def wake(self) -> None:
        """Let the reader look again. One call on the loop serves all that came until the reader looks."""
        hand_over([self])

    # The event loop

    async def take(self, seconds: float, sink: Sink | None = None) -> Sequence[Event] | None:
        """What came since the last look, perhaps nothing where only a place has changed or `seconds` went by; None at
        the end.

        While this waits, `sink` is lent to who has something: what it takes costs no turn of this task, or no wake-up
        of the loop at all. Raises what the model failed with, once everything before it was taken.
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
        """Something came: offer it to the sink, else let the reader have it."""
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
        """Whether the sink, if one is lent, took the event. One that fails is not asked again: the reader meets the
        event next, and what
        fails there ends its own answer, not those of the calls that are written together with it."""
        if self._sink is None:
            return False
        try:
            return self._sink(event)
        except BaseException as error:  # noqa: BLE001
            log.debug("an event could not be sent at once: %r", error)
            self._sink = None
            return False

    def _release(self) -> None:
        """Take the sink back, then let the reader go on: what it sends comes behind everything that the sink has
        sent.
        """
        with self._lock:
            self._sink = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pending(self) -> bool:
        """Whether its reader has yet to be told; from then on it counts as told."""
        told, self._woken = self._woken, True
        return not told


def hand_over(calls: Sequence[Call]) -> None:
    """Let the readers of `calls`, all on one loop, look: one wake-up of the loop for all of them. From any thread."""
    untold = [call for call in calls if call.pending()]
    if untold:
        untold[0].loop.call_soon_threadsafe(_look, untold)


def _look(calls: Sequence[Call]) -> None:
    for call in calls:
        call.look()
