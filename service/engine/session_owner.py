"""One model's session: opened at its first use, used by one run at a time, released when the model is evicted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ..core import CancelCheck, ProgressReport
from ..errors import Cancelled, Named, RequestError
from ..memory.policy import STAY, Policy
from ..memory.pool import Pool, Released
from .leaks import BETWEEN, LeakReport, LeakWatch
from .picture_reader import PictureReader
from .runner import Stopped
from .session import Blueprint, Opening, Session, open_session
from .stages import Stage, StageMeter

log = logging.getLogger(__name__)

# Seconds between two cancel checks of a call that waits for the model.
_POLL_SECONDS = 0.1


class SessionOwner:
    """Opens the session of `blueprint` when it is first used and again after an eviction. Thread-safe: one use at a
    time, others wait."""

    def __init__(self, name: str, blueprint: Blueprint, pool: Pool, kernel_cache: Path, reader: PictureReader) -> None:
        """`reader` holds the model's vision memory, which is released together with the session."""
        self.session: Session | None = None  # while the model is loaded
        self._name = name
        self._blueprint = blueprint
        self._pool = pool
        self._kernel_cache = kernel_cache
        self._reader = reader
        self._lock = threading.Lock()
        self._closed = False
        self._policy: Policy = STAY
        self._leaks = LeakWatch(name, pool)
        self._last_release = Stage()

    @property
    def policy(self) -> Policy:
        """When the model is evicted without a request."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._reader.offer(policy)
        if (session := self.session) is not None:
            session.offer(policy, self.give_way)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        """Whether a run or a load is in progress."""
        return self._lock.locked()

    def leak_report(self) -> LeakReport:
        """Memory that each stage of the last uses left in the process, and the stage that grows, if one does."""
        return self._leaks.report()

    def load(self, progress: ProgressReport | None, cancel: CancelCheck | None) -> None:
        """Open the session and wait until all weights are in memory. Raises Cancelled, MemoryFull, FileError."""
        with Named(f"loading {self._name}"), self.exclusive(cancel):
            self._leaks.mark(BETWEEN)
            with self.opened(progress, cancel) as session:
                session.settle()
            self._leaks.mark("load")

    @contextmanager
    def use(self, stage: str, cancel: CancelCheck | None, progress: ProgressReport | None = None) -> Iterator[Session]:
        """The session for one use whose memory counts towards `stage` as a whole. Raises as `exclusive`, `opened`."""
        with Named(f"the use of {self._name}"), self.exclusive(cancel):
            self._leaks.begin()
            with self.opened(progress, cancel) as session:
                yield session
            self._leaks.mark(stage)

    @contextmanager
    def run(
        self, meter: StageMeter, cancel: CancelCheck | None, progress: ProgressReport | None
    ) -> Generator[tuple[Session, LeakWatch], None, None]:
        """The session for one run of the batch loop, whose stages are counted in `meter` and in the leak watch."""
        with Named(f"a pass of {self._name}"), self.exclusive(cancel):
            self._leaks.begin()
            if self._last_release != Stage():
                meter.add("release", self._last_release)
                self._last_release = Stage()
            with self.opened(progress, cancel, meter) as session:
                yield session, self._leaks

    @contextmanager
    def exclusive(self, cancel: CancelCheck | None) -> Iterator[None]:
        """Wait until no other use is in progress. Raises Cancelled, and RequestError if the model was closed."""
        while not self._lock.acquire(timeout=_POLL_SECONDS):
            if cancel and cancel():
                raise Cancelled(f"stopped while waiting for {self._name}, which is busy")
        try:
            if self._closed:
                raise RequestError(f"{self._name} was closed; open it again")
            yield
        finally:
            self._lock.release()

    @contextmanager
    def opened(
        self, progress: ProgressReport | None, cancel: CancelCheck | None, meter: StageMeter | None = None
    ) -> Iterator[Session]:
        """The session, opened if needed; one whose weights did not all arrive is released. Raises Cancelled."""
        if self.session is None:
            opening = Opening(self._pool, self._kernel_cache, progress, cancel)
            with meter.measure("load") if meter else nullcontext():
                self.session = open_session(self._name, self._blueprint, opening)
            self.session.offer(self._policy, self.give_way)
        session = self.session
        try:
            with session.using():
                yield session
                if not session.settled:
                    session.settle()
        except Stopped:
            raise Cancelled("stopped while reading the prompt") from None
        finally:
            if not session.arrived:
                self._release()

    def give_way(self) -> tuple[Released, ...]:
        """Release the session and return the bytes, measured. While a use is in progress nothing is returned."""
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            return self._release()
        finally:
            self._lock.release()

    def close(self, then: Callable[[], None]) -> tuple[Released, ...]:
        """Return the bytes for good, after a use in progress has ended; `then` is called before they are returned."""
        with self._lock:
            self._closed = True
            then()
            return self._release()

    def _release(self) -> tuple[Released, ...]:
        session, self.session = self.session, None
        if session is None:
            return self._reader.release()
        meter = StageMeter(self._pool)
        self._leaks.mark(BETWEEN)
        with meter.measure("release"):
            released = (*session.release(), *self._reader.release())
        del session  # frees its buffers outside the leases
        self._leaks.mark("release")
        measured = sum(r.measured for r in released)
        meter.add_bytes("release", measured)
        self._last_release = meter.stages["release"]
        log.info("%s gave back %d of %d bytes", self._name, measured, sum(r.asked for r in released))
        return released
