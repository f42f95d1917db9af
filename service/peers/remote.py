"""A model in another process, with the methods of api.OpenModel that nodes use: the same requests, the same events."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..core import SEED_LIMIT, CancelCheck, Event, ModelSpec, ProgressReport, Request
from ..errors import Cancelled, OnedeskError, PeerError, RequestError
from ..memory.policy import STAY, Policy
from ..memory.pool import Released
from ..text.language import Language
from .dialect import DialectRequest, Reader, ask_of
from .peer import Described, Peer, PeerAddress
from .wire import Exchange

# Concurrent requests per list, the same number as our own engine's batch.
AT_ONCE = 8
# Seconds between two checks of whether to stop.
_LOOK = 0.05
# Seconds for which a server's report about a model's bytes stays valid.
_FRESH = 1.0


class RemoteModel:
    """A handle of a model that `peer` runs. Opening it starts, loads and requests nothing. May be shared between
    threads.

    Unlike api.OpenModel it has no tensors: no hidden states and no scores. `folder` is the folder of the model's
    tokenizer, if that is on this machine. The server validates requests; its refusals are raised here, in our error
    family.
    """

    def __init__(self, wanted: ModelSpec, peer: Peer, folder: Path | None = None) -> None:
        self.wanted = wanted
        self.peer = peer
        self._policy: Policy = STAY
        # Data that a host attaches for the lifetime of the handle, such as ComfyUI's patcher; not used here.
        self.companion: object = None
        self._language = None if folder is None else Language(folder)
        self._lock = threading.Lock()
        self._uses = 0
        self._last_used = time.monotonic()
        self._described = Described()
        self._described_by: PeerAddress | None = None
        self._held = 0
        self._true_until = 0.0  # a monotonic time

    @property
    def policy(self) -> Policy:
        """When the model gives way without being asked. It is sent to our own service with each request, and set for an
        engine that we started; other servers decide for themselves.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if policy != self._policy:
            self._policy = policy
            self.peer.offer(self.wanted, policy)

    @property
    def name(self) -> str:
        """Its name in that engine, or the engine's name if it has only this model."""
        return self.wanted.name or self.peer.title

    @property
    def title(self) -> str:
        """For people: the model and its engine."""
        return f"{self.wanted.name} ({self.peer.title})" if self.wanted.name else self.peer.title

    @property
    def vocab_size(self) -> None:
        """Unknown here: the server checks token ids."""
        return None

    @property
    def has_memory(self) -> bool:
        """Whether its memory is on this machine and can be released on request."""
        return self.peer.has_memory

    @property
    def need_bytes(self) -> int:
        """Bytes that it takes while loaded, as last reported; 0 if unknown."""
        return max(self._described.nbytes, self._held)

    @property
    def loaded(self) -> bool:
        return self.held_bytes() > 0

    @property
    def busy(self) -> bool:
        """Whether it is in use here, or was in use elsewhere when it was last asked to give way."""
        return self._uses > 0 or self.peer.busy(self.wanted)

    @property
    def idle(self) -> float:
        """Seconds since its last use here."""
        return 0.0 if self._uses else time.monotonic() - self._last_used

    def held_bytes(self) -> int:
        """Bytes that it holds now, as reported, requested at most once per second; 0 if the engine does not respond."""
        began = time.monotonic()
        if began >= self._true_until:
            self._held, now = self.peer.held(self.wanted), time.monotonic()
            self._true_until = now + max(_FRESH, 5 * (now - began))  # limits how often an engine that hangs is asked
        return self._held

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises RequestError if its tokenizer is not on this machine, ModelError."""
        if self._language is None:
            raise RequestError(f"{self.peer.title} does not tell the tokens of {text[:40]!r}; name a token by its id")
        return self._language.tokenizer.encode(text)

    def generate(
        self, request: Request, *, cancel: CancelCheck | None = None, progress: ProgressReport | None = None
    ) -> _Events:
        """As api.OpenModel.generate."""
        return self.generate_batch([request], cancel=cancel, progress=progress)

    def generate_batch(
        self,
        requests: Sequence[Request],
        *,
        cancel: CancelCheck | None = None,
        cancel_request: Callable[[int], bool] | None = None,
        progress: ProgressReport | None = None,
    ) -> _Events:
        """As api.OpenModel.generate_batch: reaches the engine, which may start it, then yields events as they come.

        `n` choices are sent as `n` requests with consecutive seeds. Closing the iterator, or `cancel`, closes the
        connections, which frees the server's slots at once; partial texts are kept, and their results say "cancelled".
        Raises RequestError, ModelError, PeerError, MemoryFull, before the first event or instead of the next; Cancelled
        before the first.
        """
        if not requests:
            raise RequestError("the list of requests is empty; give at least one")
        address = self.peer.reach(cancel)
        if address != self._described_by:
            # Once per start of an engine: it is one more request before the first token.
            self._described, self._described_by = self.peer.describe(self.wanted), address
        lanes: list[_Lane] = []
        for index, request in enumerate(requests):
            try:
                lanes += self._lanes(index, request.validated(), address)
            except OnedeskError as error:
                raise _named(error, index, len(requests)) from None
        return self._events(_Flow(lanes, len(requests), cancel, cancel_request, progress))

    def _events(self, flow: _Flow) -> _Events:
        with self._using(), self.peer.using(self.wanted):
            try:
                yield from flow.events()
            except PeerError as error:
                why = self.peer.why()
                raise PeerError(f"{error}\n{why}" if why else str(error)) from error

    def _lanes(self, index: int, request: Request, address: PeerAddress) -> list[_Lane]:
        seed = request.sampling.seed
        first = secrets.randbelow(SEED_LIMIT) if seed is None else seed
        choices = range(request.n)
        return [
            _Lane(index, i, ask_of(replace(request, n=1), i, first, address, self.wanted, self.policy), address)
            for i in choices
        ]

    @contextmanager
    def _using(self) -> Generator[None, None, None]:
        with self._lock:
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
            self._last_used, self._true_until = time.monotonic(), 0.0

    def give_way(self) -> tuple[Released, ...]:
        """Release its memory, and return when the bytes are back, measured; the next use loads it again. Never
        interrupts a response: while the model generates, for any client, nothing is returned. Raises PeerError.
        """
        if self._uses:
            return ()
        released = self.peer.release(self.wanted)
        self._true_until = 0.0
        return released


_Events = Generator[Event, None, None]
_Inbox: TypeAlias = "queue.SimpleQueue[tuple[_Lane, Mapping[str, Any] | OnedeskError | None]]"


@dataclass(eq=False)
class _Lane:
    """One choice of one request in progress: its HTTP request and the reader of its response."""

    request: int
    choice: int
    ask: DialectRequest
    address: PeerAddress
    exchange: Exchange | None = None
    reader: Reader | None = None
    ended: bool = False

    def begin(self, started: float, inbox: _Inbox) -> None:
        """Send the request, in a thread that puts what comes into `inbox`: documents, then an error, or None at the end
        of the stream.

        For a server on this machine, it is sent before the thread starts, since starting a thread adds half a
        millisecond to the first token.
        """
        self.reader = Reader(self.address, self.ask.seed, started)
        self.exchange = Exchange(self.address, "POST", self.ask.route, self.ask.body)
        if self.exchange.near:
            try:
                self.exchange.send()
            except OnedeskError as error:
                self.exchange.close()
                for came in (error, None):
                    inbox.put((self, came))
                return
        threading.Thread(target=self._read, args=(self.exchange, inbox), name="onedesk-peer", daemon=True).start()

    def _read(self, exchange: Exchange, inbox: _Inbox) -> None:
        try:
            with exchange:
                for document in exchange.documents():
                    inbox.put((self, document))
        except OnedeskError as error:
            inbox.put((self, error))
        finally:
            inbox.put((self, None))

    def events(self, came: Mapping[str, Any] | OnedeskError | None, started: float) -> Iterator[Event]:
        """The events of what came. Raises an error that it is or reports, PeerError if the response broke off."""
        if isinstance(came, OnedeskError):
            raise came
        reader = self._reader(started)
        for event in reader.end() if came is None else reader.events(came):
            yield self.tagged(event)

    def _reader(self, started: float) -> Reader:
        return self.reader or Reader(self.address, self.ask.seed, started)

    def cancelled(self, started: float) -> Event:
        """Its last event, after it was stopped."""
        return self.tagged(Event(result=self._reader(started).result("cancelled")))

    def tagged(self, event: Event) -> Event:
        return replace(event, request=self.request, choice=self.choice)

    def stop(self) -> None:
        """Cancel it."""
        if self.exchange is not None:
            self.exchange.abort()


class _Flow:
    """Several lanes together: at most AT_ONCE are open, the others follow in order."""

    def __init__(
        self,
        lanes: Sequence[_Lane],
        requests: int,
        cancel: CancelCheck | None,
        cancel_request: Callable[[int], bool] | None,
        progress: ProgressReport | None,
    ) -> None:
        self._waiting = deque(lanes)
        self._open: list[_Lane] = []
        self._requests = requests
        self._cancel = cancel
        self._cancel_request = cancel_request
        self._progress = progress
        self._inbox: _Inbox = queue.SimpleQueue()
        self._started = 0.0

    def events(self) -> _Events:
        """All events, until every lane has its result."""
        self._started = time.perf_counter()
        try:
            while self._waiting or self._open:
                self._begin()
                yield from self._next()
                yield from self._drop()
        finally:
            for lane in self._open:
                lane.stop()

    def _begin(self) -> None:
        while self._waiting and len(self._open) < AT_ONCE:
            lane = self._waiting.popleft()
            self._open.append(lane)
            lane.begin(self._started, self._inbox)

    def _next(self) -> _Events:
        try:
            lane, came = self._inbox.get(timeout=_LOOK)
        except queue.Empty:
            return
        if lane.ended:
            return
        try:
            for event in lane.events(came, self._started):
                if event.result is not None:
                    self._end(lane)
                if event.progress is None:
                    yield event
                elif self._progress is not None:
                    self._progress(event.progress)
        except OnedeskError as error:
            raise _named(error, lane.request, self._requests) from None

    def _drop(self) -> _Events:
        """Stop the lanes that are no longer wanted."""
        everything = self._cancel is not None and self._cancel()
        for lane in [*self._open, *self._waiting]:
            if everything or (self._cancel_request is not None and self._cancel_request(lane.request)):
                lane.stop()
                self._end(lane)
                yield lane.cancelled(self._started)

    def _end(self, lane: _Lane) -> None:
        lane.ended = True
        for lanes in (self._open, self._waiting):
            if lane in lanes:
                lanes.remove(lane)


def _named(error: OnedeskError, index: int, count: int) -> OnedeskError:
    """The error, with its index in the list if there are several requests."""
    return error if count == 1 or isinstance(error, Cancelled) else type(error)(f"item {index + 1} of {count}: {error}")
