"""One run of a node that uses a model: memory, load, work in a thread, updates of the page, Stop, and eviction
afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from comfy_api.latest import Caching, ComfyAPI
from comfy_execution.cache_provider import unregister_cache_provider
from server import PromptServer

import nodes as comfy_nodes

from ..service.api import Model
from ..service.core import CancelCheck
from ..service.errors import Cancelled, MemoryFull
from ..service.memory.pool import Released
from . import bridge
from .phase import Graph
from .show import View, displayable, evicted, returned
from .values import GIVE_WAY, ModelChoice

log = logging.getLogger(__name__)

# Seconds between two updates of the page.
TICK = 0.1

T = TypeVar("T")
R = TypeVar("R")


class Hidden(Protocol):
    """ComfyUI's information for a node about its position in the workflow."""

    unique_id: str
    dynprompt: Graph


class Task(Protocol[T]):
    """The work of a node. Both methods run in a separate thread; `prepare` makes every check that is possible before
    loading.
    """

    def prepare(self, model: Model, cancel: CancelCheck) -> None: ...

    def run(self, model: Model, cancel: CancelCheck) -> T: ...

    def kept(self, value: T, /) -> object:
        """The part of the value that only ComfyUI's cache keeps alive."""
        ...


class PageView(View):
    """A view that ComfyUI's page follows."""

    async def send(self) -> None:
        """Send the page the changes since the last call. Called by the thread that runs workflows."""
        text, progress = self.changes()
        if progress is not None:
            await ComfyAPI().execution.set_progress(progress.done, max(1, progress.total), node_id=self.node_id)
        if text is not None:
            server = PromptServer.instance
            server.send_progress_text(displayable(text), self.node_id, server.client_id)


class Job(Generic[T]):
    """A task on one model for one run of a node."""

    def __init__(self, choice: ModelChoice, hidden: Hidden, view: PageView, task: Task[T]) -> None:
        self.choice = choice
        self.view = view
        self.released: tuple[Released, ...] = ()
        # The model's display name, once its engine is known.
        self.title = choice.name
        # How often ComfyUI has evicted this model, in words.
        self.evictions = ""
        self._node_id = hidden.unique_id
        self._graph = hidden.dynprompt
        self._task = task
        self._given_up = threading.Event()

    def _cancelled(self) -> bool:
        """The task's cancel check: true on Stop, and when the workflow ends for another reason."""
        return self._given_up.is_set() or bridge.cancelled()

    async def run(self) -> T:
        """Do the task. Raises OnedeskError, or ComfyUI's interruption on Stop; in both cases the model gives way if its
        policy says so.
        """
        model = bridge.open_model(self.choice)
        self.title = bridge.title(model)
        model.policy = self.choice.terms
        tracker = bridge.listed(model).tracker
        tracker.begin(self._graph)
        kept: object | None = None
        try:
            value = await self._attempt(model)
            kept = self._task.kept(value)
        except Cancelled:
            raise bridge.interrupted() from None
        finally:
            tracker.finish(self._graph, self._node_id, kept)
            bridge.keep_listed(model)
            self.evictions = evicted(bridge.listed(model).evictions, bridge.listed(model).given)
            if self.choice.policy == GIVE_WAY:
                await self._give_way(model)
        return value

    async def _attempt(self, model: Model) -> T:
        """Check, free memory, work; retry once if the pool is full and ComfyUI can unload its models."""
        await self._in_thread(lambda: self._task.prepare(model, self._cancelled))
        if not model.loaded:
            bridge.make_room(model)
        try:
            return await self._in_thread(lambda: self._task.run(model, self._cancelled))
        except MemoryFull as full:
            if not bridge.make_more_room(model, full):
                raise
        await self._in_thread(lambda: self._task.prepare(model, self._cancelled))
        return await self._in_thread(lambda: self._task.run(model, self._cancelled))

    async def _in_thread(self, work: Callable[[], R]) -> R:
        """Run `work` in a thread while the page follows. Returns its result or raises its error, never before the
        thread has finished.
        """
        context = contextvars.copy_context()
        future = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(work))
        try:
            while not future.done():
                await self.view.send()
                await asyncio.wait({future}, timeout=TICK)
        except asyncio.CancelledError:
            self._given_up.set()
            await asyncio.wait({future})
            raise
        finally:
            await self.view.send()
        return future.result()

    async def _give_way(self, model: Model) -> None:
        if not bridge.listed(model).tracker.needed(self._graph, self.choice.name, _is_output):
            self.released = await asyncio.to_thread(bridge.give_way, model)
        elif not bridge.listed(model).tracker.running:
            await ComfyAPI().caching.register_provider(AtTheEnd(model))


class AtTheEnd(Caching.CacheProvider):
    """Evicts a model when the running workflow ends, in case the text node that it waits for never runs.

    ComfyUI reports the end only to cache providers. This one caches nothing and unregisters itself at the first end.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    async def on_lookup(self, context: Caching.CacheContext) -> None:
        return None

    async def on_store(self, context: Caching.CacheContext, value: Caching.CacheValue) -> None:
        """Stores nothing."""

    def should_cache(self, context: Caching.CacheContext, value: Caching.CacheValue | None = None) -> bool:
        return False

    def on_prompt_end(self, prompt_id: str) -> None:
        unregister_cache_provider(self)
        # A node that still runs is being cancelled, and evicts the model itself.
        if not bridge.listed(self._model).tracker.running:
            log.info(
                "%s",
                returned(bridge.give_way(self._model))
                or f"{self._model.name} had given way before the end of the workflow",
            )


def _is_output(class_type: str) -> bool:
    known = comfy_nodes.NODE_CLASS_MAPPINGS  # pyright: ignore[reportAttributeAccessIssue] - ComfyUI's nodes.py, not our folder
    return bool(getattr(known.get(class_type), "OUTPUT_NODE", False))
