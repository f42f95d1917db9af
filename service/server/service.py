"""The service itself: its models and their queues, admission, and shutdown."""

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
from ..core import CancelCheck, Event, ModelSpec
from ..errors import Cancelled, OnedeskError
from ..registry import Registry
from .concurrency import BatchSizes
from .error_documents import SOON, ApiError, contained
from .models import Models, Uses
from .pending import HESITATION, Call, Sink, Work
from .statistics import Figures
from .tasks import ended, kept_up
from .tenants import Tenants
from .worker import Coming, Worker

log = logging.getLogger(__name__)

T = TypeVar("T")
Waking: TypeAlias = Literal["request", "manual"]

# Threads that read files and collect metrics, and threads that release memory, which may wait for other processes:
# release, sleep, leases.
READERS, RELEASERS = 4, 4
# Limit for checking a request and tokenizing its prompt, including earlier requests for the same model. The first one
# also starts the template's process.
PREPARE_SECONDS = 120.0
PARSERS = 1  # the interpreter lock allows one at a time anyway
# Seconds after the grace period in which stopped requests end and send their partial responses; then for the threads.
_STOP_SECONDS, _END_SECONDS = 2.0, 1.0
# Open requests in addition to queued and running ones: those being read, refused, or asking for memory or metrics.
BESIDE = 64
# A stream without events sends a comment this often, in seconds, so that proxies keep the connection open.
TICK = 10.0


class Service:
    """One process's service. Created on the event loop. The caller closes `registry` and the models that it opened."""

    def __init__(self, settings: ServiceSettings, models: Models, registry: Registry, version: str) -> None:
        self.settings = settings
        self.models = models
        self.registry = registry
        self.version = version
        self.figures = Figures()
        self.batch_sizes = BatchSizes(settings.concurrency, registry)
        self.tenants = Tenants(lambda: registry.pool(models.served.usual.device))
        self.aborting = False  # whether long work should end at once
        self.ready = False
        self.stopping = False
        self.waking: Waking | None = None  # what wakes it while it is asleep
        self.slept: list[OpenModel] = []  # models that were loaded when it fell asleep
        self.requests = 0  # open HTTP requests
        self.last_request = time.monotonic()  # when the latest one came
        self.bodies: dict[int, int] = {}  # bytes of large bodies, by the id of their open request
        self._workers: dict[str, Worker] = {}
        self._parsers = ThreadPoolExecutor(PARSERS, "onedesk-parse")
        self._readers = ThreadPoolExecutor(READERS, "onedesk-read-files")
        self._releasers = ThreadPoolExecutor(RELEASERS, "onedesk-release")
        self._tasks: set[asyncio.Task[Any]] = set()

    # Admission

    @property
    def waiting(self) -> int:
        """Queued calls of all models."""
        return sum(len(worker.line) for worker in self._workers.values())

    @property
    def working(self) -> list[Call]:
        """Running calls of all models."""
        return [call for worker in self._workers.values() for call in list(worker.working)]

    @property
    def workers(self) -> list[Worker]:
        """The workers of all models that were requested."""
        return list(self._workers.values())

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run file access off the event loop. Raises OnedeskError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, contained, work, *arguments)

    async def parse(self, work: Callable[..., T], *arguments: Any) -> T:
        """Parse and check a large body off the event loop. Raises OnedeskError."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, contained, work, *arguments)

    async def giving_back(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that may wait for other owners to give memory back, in its own threads. Raises OnedeskError."""
        return await asyncio.get_running_loop().run_in_executor(self._releasers, contained, work, *arguments)

    async def prepare(self, asked: str | None, work: Callable[[CancelCheck], T]) -> T:
        """Check a request for a model, named as the client did, in threads of that model. `work` gets the check that
        says whether to stop.

        Raises ApiError 404 for an unknown model, 429 if too many requests for it are being prepared, 503 after
        PREPARE_SECONDS, and whatever `work` raises.
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

    def find(self, spec: ModelSpec, uses: Uses | None = None) -> tuple[str, OpenModel]:
        """The served name and the handle of a requested model. Reads files. Raises ApiError 404, OnedeskError for a
        broken model.
        """
        return self.models.find(spec, uses)

    @asynccontextmanager
    async def waiting_for(self, name: str, calls: Sequence[Call]) -> AsyncIterator[Sequence[Call]]:
        """Queue calls for a model. Calls still queued when the block ends are dropped.

        Raises ApiError 429 if the queue is full, 503 if the service is stopping.
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
            self._workers[name] = worker = Worker(name, self.batch_sizes.now, self.figures, Coming())
            if self.asleep:
                worker.line.hold()
        return self._workers[name]

    @property
    def asleep(self) -> bool:
        """Whether requests stay queued until the service is woken."""
        return self.waking is not None

    def fall_asleep(self, waking: Waking) -> None:
        """Start no request until it is woken: by the next request, or by `wake_up` alone."""
        self.waking = waking
        for worker in self._workers.values():
            worker.line.hold()

    def wake_up(self) -> None:
        """Start requests again; each model loads when its first request runs."""
        self.waking = None
        self.slept.clear()
        for worker in self._workers.values():
            worker.go_on()

    def _check_room(self, worker: Worker, count: int) -> None:
        if self.stopping:
            raise ApiError(503, "the service is stopping", code="stopping", retry_after=SOON)
        # A request with an empty queue before it need not wait, so a queue limit of 0 still works.
        free = not worker.working and not len(worker.line) and not worker.line.held
        if self.waiting + count - free > self.settings.queue:
            after = self._wait_seconds(worker)
            message = (
                f"{self.waiting} requests wait already, and {self.settings.queue} may; try again in about {after} s"
            )
            raise ApiError(429, message, code="queue_full", retry_after=after)

    def queue_position(self, name: str, call: Call) -> int | None:
        """A call's queue position; None if it is not queued."""
        return self._workers[name].line.position(call)

    async def follow(self, name: str, call: Call, sink: Sink | None = None) -> AsyncIterator[Sequence[Event]]:
        """The events of a call, in parts. Empty parts come when its queue position has changed, after HESITATION, and
        every TICK seconds. Events that `sink` takes do not come here.

        Raises ApiError 503 if it is queued longer than the limit, and whatever its model fails with.
        """
        patience = HESITATION
        while (events := await call.take(self._patience(call, patience), sink)) is not None:
            self._check_deadline(name, call)
            yield events
            patience = TICK

    async def work_out(self, name: str, model: OpenModel, work: Work) -> Any:
        """The result of work other than generation, queued like a request. Raises as `waiting_for` and `follow`, and
        ApiError 503 if it was stopped.
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

    # Background work and shutdown

    def start(self, title: str, work: Callable[[], Awaitable[object]]) -> None:
        """Run a background task until it or the service ends. A task that fails is started again."""
        task = asyncio.get_running_loop().create_task(kept_up(title, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def warm_up(self, names: Sequence[str]) -> None:
        """Load the named models and measure which batch size pays off; then the service is ready."""
        for name in names:
            try:
                await self._prepare_model(name)
            except OnedeskError as error:  # the threads raise nothing else
                log.error("%s cannot be loaded: %s", name, error)
        self.ready = not self.stopping

    async def _prepare_model(self, name: str) -> None:
        _, model = await self.in_thread(self.find, self.models.spec(name))
        worker = self._worker(name)

        def prepare() -> None:
            model.load(cancel=lambda: worker.aborting)
            self.batch_sizes.measure(model, lambda: worker.aborting or len(worker.line) > 0)

        await worker.in_turn(prepare)

    async def stop(self, seconds: float) -> None:
        """Drop all queued calls, let running ones finish within `seconds`, then stop them. Partial responses are still
        sent.
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
        """Stop all running, loading and preparing work at once."""
        self.aborting = True
        for call in self.working:
            call.stop()

    async def close(self) -> bool:
        """End every thread and task; returns whether they ended within a second. The service accepts nothing
        afterwards.
        """
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
