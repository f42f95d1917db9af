"""A request on its way through the service: made and read on the event loop, worked on by its model's thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..api import OpenModel
from ..core import Event
from ..engine.answer import Prepared

# What a call does that is no generation, such as an embedding: in the model's thread, told how to ask whether to stop.
Work = Callable[[OpenModel, Callable[[], bool]], Any]


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
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._woken = False
        self._signal = asyncio.Event()

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
        """The model begins with it."""
        self.entered = time.perf_counter()
        self.wake()

    def put(self, event: Event) -> None:
        """Hand over what came."""
        if event.token is not None and self.first_token is None:
            self.first_token = time.perf_counter()
        self._events.append(event)
        self.wake()

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
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._signal.set)

    # The event loop

    async def take(self, seconds: float) -> Sequence[Event] | None:
        """What came since the last look, perhaps nothing where only a place has changed or `seconds` went by; None at the end.

        Raises what the model failed with, once everything before it was taken.
        """
        if not self._woken and not self._ended:
            # Cheaper than wait_for, which makes a task: this is awaited once a token.
            alarm = self._loop.call_later(seconds, self._signal.set)
            try:
                await self._signal.wait()
            finally:
                alarm.cancel()
        ended = self._ended
        self._woken = False
        self._signal.clear()
        events = [self._events.popleft() for _ in range(len(self._events))]
        if events or not ended:
            return events
        if self._error is not None:
            raise self._error
        return None
