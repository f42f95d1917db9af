"""The service itself: its models with their lines, what it lets in, how it stops."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias, TypeVar

from ..api import OpenModel
from ..config import ServiceSettings
from ..core import CancelCheck, Event
from ..errors import Cancelled, OnedeskError
from ..registry import Registry
from .concurrency import Places
from .error_documents import SOON, ApiError, contained
from .models import Models, Uses
from .pending import HESITATION, Call, Sink, Work
from .requests import ModelForm
from .statistics import Figures
from .tasks import ended, kept_up
from .tenants import Tenants
from .worker import Coming, Worker

log = logging.getLogger(__name__)

T = TypeVar("T")
Waking: TypeAlias = Literal["request", "manual"]

# Threads that read files and gather figures, and those that give memory back, which may wait for other processes:
# release, sleep, leases.
READERS, RELEASERS = 4, 4
# For a request to be checked and its prompt to be tokenized, behind others of its model; the first also starts the
# template's process.
PREPARE_SECONDS = 120.0
PARSERS = 1  # the interpreter lock lets one at a time work anyway
# Seconds after the grace until what is stopped has ended and its partial answer has gone out, and for the threads after
# that.
_STOP_SECONDS, _END_SECONDS = 2.0, 1.0
# Requests at once beside those that wait or are worked on: being read, refused, asked for memory or figures.
BESIDE = 64
# Seconds after which a stream in which nothing comes sends a comment, so that nobody on the way takes it for dead.
TICK = 10.0


class Service:
    """One process's service. Made on the event loop; `registry` and what it opened stay the caller's to close."""

    def __init__(self, settings: ServiceSettings, models: Models, registry: Registry, version: str) -> None:
        self.settings = settings
        self.models = models
        self.registry = registry
        self.version = version
        self.figures = Figures()
        self.places = Places(settings.concurrency, registry)
        self.tenants = Tenants(lambda: registry.pool(models.choice.device))
        self.aborting = False  # whether what takes long is to end at once
        self.ready = False
        self.stopping = False
        self.waking: Waking | None = None  # what wakes it while it is asleep
        self.slept: list[OpenModel] = []  # what was loaded when it fell asleep
        self.requests = 0  # HTTP requests that are being answered
        self.last_request = time.monotonic()  # when the latest one came
        self.bodies: dict[int, int] = {}  # bytes of large bodies, by the id of their request, until it is answered
        self._workers: dict[str, Worker] = {}
        self._parsers = ThreadPoolExecutor(PARSERS, "onedesk-parse")
        self._readers = ThreadPoolExecutor(READERS, "onedesk-read-files")
        self._releasers = ThreadPoolExecutor(RELEASERS, "onedesk-release")
        self._tasks: set[asyncio.Task[Any]] = set()

    # Letting in

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn, of all models."""
        return sum(len(worker.line) for worker in self._workers.values())

    @property
    def working(self) -> list[Call]:
        """Calls that are worked on."""
        return [call for worker in self._workers.values() for call in list(worker.working)]

    @property
    def workers(self) -> list[Worker]:
        """Those of the models that were asked for."""
        return list(self._workers.values())

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do what may wait for files off the event loop. Raises OnedeskError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, contained, work, *arguments)

    async def parse(self, work: Callable[..., T], *arguments: Any) -> T:
        """Parse and check a large body off the event loop. Raises OnedeskError."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, contained, work, *arguments)

    async def giving_back(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do what may wait until other owners gave memory back, in threads that nothing else needs. Raises
        OnedeskError.
        """
        return await asyncio.get_running_loop().run_in_executor(self._releasers, contained, work, *arguments)

    async def prepare(self, asked: str | None, work: Callable[[CancelCheck], T]) -> T:
        """Check a request for a model, named as the client did, in threads of that model; `work` is told how to ask
        whether to stop.

        Raises ApiError 404 for an unknown model, 429 where too many requests for it are being prepared, 503 where it
        takes longer than PREPARE_SECONDS, and whatever `work` raises.
        """
        name = asked if asked in self._workers else await self.in_thread(self.models.name_of, asked)
        worker, loop = self._worker(name), asyncio.get_running_loop()
        most = self.settings.queue + self.settings.concurrency
        if worker.preparing >= most:
            message = f"{most} requests for this model are being prepared already; try again"
            raise ApiError(429, message, code="queue_full", retry_after=SOON)
        gone = threading.Event()
        worker.preparing += 1
        try:
            with worker.coming.one():
                done = loop.run_in_executor(worker.preparers, contained, work, lambda: gone.is_set() or self.aborting)
                return await asyncio.wait_for(done, PREPARE_SECONDS)
        except asyncio.TimeoutError:
            message = (
                f"the request was not prepared after {PREPARE_SECONDS:g} s: the model's template or tokenizer takes too"
                " long"
            )
            raise ApiError(503, message, code="deadline", retry_after=SOON) from None
        finally:
            worker.preparing -= 1
            gone.set()

    def find(self, asked: str | None, form: ModelForm | None = None, uses: Uses | None = None) -> tuple[str, OpenModel]:
        """The model that a request names, and its handle. Reads files. Raises ApiError 404, OnedeskError for a
        broken one.
        """
        return self.models.find(asked, form, uses)

    @asynccontextmanager
    async def waiting_for(self, name: str, calls: Sequence[Call]) -> AsyncIterator[Sequence[Call]]:
        """Let calls for a model wait for their turns; they are dropped when the block ends before they have.

        Raises ApiError 429 where too many wait, 503 when the service stops.
        """
        worker = self._worker(name)
        if self.waking == "request" and not self.stopping:
            self.wake_up()
        self._check_room(worker, len(calls))
        for call in calls:
            worker.ask(call)
        try:
            yield calls
        finally:
            for call in calls:
                worker.drop(call)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = worker = Worker(name, self.places.now, self.figures, Coming())
            if self.asleep:
                worker.line.hold()
        return self._workers[name]

    @property
    def asleep(self) -> bool:
        """Whether requests wait until it is woken."""
        return self.waking is not None

    def fall_asleep(self, waking: Waking) -> None:
        """Begin no request before it is woken: by the next request, or by `wake_up` alone."""
        self.waking = waking
        for worker in self._workers.values():
            worker.line.hold()

    def wake_up(self) -> None:
        """Begin with requests again; each model loads when its turn comes."""
        self.waking = None
        self.slept.clear()
        for worker in self._workers.values():
            worker.go_on()

    def _check_room(self, worker: Worker, count: int) -> None:
        if self.stopping:
            raise ApiError(503, "the service is stopping", code="stopping", retry_after=SOON)
        # Whoever finds nobody before it need not wait, so a queue of 0 still works.
        free = not worker.working and not len(worker.line) and not worker.line.held
        if self.waiting + count - free > self.settings.queue:
            after = self._wait_seconds(worker)
            message = (
                f"{self.waiting} requests wait already, and {self.settings.queue} may; try again in about {after} s"
            )
            raise ApiError(429, message, code="queue_full", retry_after=after)

    def place(self, name: str, call: Call) -> int | None:
        """How many turns until a call's own; None if it does not wait."""
        return self._workers[name].line.place(call)

    async def follow(self, name: str, call: Call, sink: Sink | None = None) -> AsyncIterator[Sequence[Event]]:
        """What comes of a call, in parts; empty ones where its place has changed, after HESITATION, and every TICK
        seconds. What `sink` takes does not come here.

        Raises ApiError 503 where it waits for its turn longer than it may, and whatever its model fails with.
        """
        patience = HESITATION
        while (events := await call.take(self._patience(call, patience), sink)) is not None:
            self._check_deadline(name, call)
            yield events
            patience = TICK

    async def work_out(self, name: str, model: OpenModel, work: Work) -> Any:
        """What other work than writing finds, in its turn. Raises as `waiting_for` and `follow`, and ApiError 503
        where it was stopped.
        """
        call = Call(model, work)
        async with self.waiting_for(name, [call]):
            try:
                async for _ in self.follow(name, call):
                    continue
            except Cancelled:
                call.outcome = None
        if call.outcome is None:
            raise ApiError(503, "the service stopped before it was worked out", code="stopped")
        return call.outcome

    def _patience(self, call: Call, most: float) -> float:
        limit = self.settings.deadline
        if not limit or call.entered is not None:
            return most
        return min(most, max(0.001, call.made + limit - time.perf_counter()))

    def _check_deadline(self, name: str, call: Call) -> None:
        limit = self.settings.deadline
        if limit and call.entered is None and not call.ended and time.perf_counter() - call.made >= limit:
            after = self._wait_seconds(self._workers[name])
            raise ApiError(
                503, f"the request waited for {limit:g} s without its turn coming", code="deadline", retry_after=after
            )

    def _wait_seconds(self, worker: Worker) -> int:
        return self.figures.wait_seconds(worker.name, len(worker.line) + 1, self.settings.concurrency)

    # Background work, and the end

    def start(self, title: str, work: Callable[[], Awaitable[object]]) -> None:
        """Run something besides the requests, until it or the service ends; one that fails begins again."""
        task = asyncio.get_running_loop().create_task(kept_up(title, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def warm_up(self, names: Sequence[str]) -> None:
        """Load the models of these names and measure how many rows at once pay; then the service is ready."""
        for name in names:
            try:
                await self._prepare_model(name)
            except OnedeskError as error:  # the threads raise nothing else
                log.error("%s cannot be loaded: %s", name, error)
        self.ready = not self.stopping

    async def _prepare_model(self, name: str) -> None:
        _, model = await self.in_thread(self.find, name)
        worker = self._worker(name)

        def prepare() -> None:
            model.load(cancel=lambda: worker.aborting)
            self.places.measure(model, lambda: worker.aborting or len(worker.line) > 0)

        await worker.in_turn(prepare)

    async def stop(self, seconds: float) -> None:
        """Send everybody away who waits, let what is worked on end within `seconds`, then stop it; its partial
        answers still go out.
        """
        self.ready, self.stopping = False, True
        self.tenants.stop()
        error = ApiError(503, "the service is stopping", code="stopping", retry_after=SOON)
        for worker in self._workers.values():
            for call in worker.line.clear():
                call.end(error)
        until = time.perf_counter() + seconds
        while self.working and time.perf_counter() < until:
            await asyncio.sleep(0.02)
        self.stop_now()
        until = time.perf_counter() + _STOP_SECONDS
        while self.working and time.perf_counter() < until:
            await asyncio.sleep(0.02)

    def stop_now(self) -> None:
        """End at once what is worked on, loaded or prepared."""
        self.aborting = True
        for call in self.working:
            call.stop()

    async def close(self) -> bool:
        """End every thread and task; whether they have within a second. Nothing can be asked afterwards."""
        self.tenants.stop()
        self.stop_now()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)
        ends = [
            ended([self._parsers, self._readers, self._releasers], _END_SECONDS),
            *(worker.close(_END_SECONDS) for worker in self._workers.values()),
        ]
        return all(await asyncio.gather(*ends))
