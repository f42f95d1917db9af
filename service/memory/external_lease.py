"""Memory of a child process, such as another engine, counted in the budget under its owner's name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from .backends.protocol import Returned
from .budget import MemorySettings
from .lease import BaseLease, LeaseBusyError, LeaseReturnedError, Released
from .truth import Truth

# Kernel and driver take back the memory of a process within milliseconds of its end, but not at once.
_SETTLE_SECONDS = 2.0
_POLL_SECONDS = 0.02


class ExternalLeasePool(Protocol):
    """What an external lease needs of its pool."""

    @property
    def lock(self) -> threading.RLock: ...  # type: ignore[valid-type]

    @property
    def settings(self) -> MemorySettings: ...

    @property
    def read_truth(self) -> Callable[[], Truth]: ...

    def forget(self, lease: ExternalLease) -> None: ...

    def report(self, lease: ExternalLease, returned: Returned, delta: int | None, seconds: float) -> Released: ...


class ExternalLease(BaseLease):
    """Bytes that a child process may hold. Only Pool.lease_external makes one.

    `nbytes` count in the budget until `release`. `held` returns how many of them the process has taken. If `exact`,
    `held` counts the pages of the process at any time. Otherwise it is a figure of its start, and only the machine's
    available memory shows a return.
    """

    def __init__(
        self, pool: ExternalLeasePool, owner: str, nbytes: int, held: Callable[[], int], *, exact: bool
    ) -> None:
        super().__init__(pool.lock, owner, "weights", nbytes)
        self._pool = pool
        self._held = held
        self._exact = exact
        self._released = False

    @property
    def title(self) -> str:
        return f"{self.owner}'s process"

    @property
    def residency(self) -> str:
        return "process"

    @property
    def released(self) -> bool:
        return self._released

    def held(self) -> int:
        """Bytes of `nbytes` that the process has taken."""
        return 0 if self._released else max(0, min(self.nbytes, self._held()))

    def release(self, end: Callable[[], None]) -> Released:
        """Call `end`, which makes the process return the bytes, and measure what came back.

        `asked` is what the process held before. If that figure is not exact, the measure is the machine's available
        memory, polled for up to 2 s until it agrees. Other processes move that figure too. Raises LeaseBusyError while
        it is in use, LeaseReturnedError the second time, and what `end` raises. Then nothing is released.
        """
        with self._lock:
            self._check_held()
            if self._users:
                raise LeaseBusyError(f"{self.title} is at work; let the generation finish or stop it first")
        began, asked, before = time.perf_counter(), self.held(), self._pool.read_truth().available
        end()
        left = self.held()
        expected = (1 - self._pool.settings.shortfall) * asked
        until = time.monotonic() + (0.0 if self._exact else _SETTLE_SECONDS)
        while (delta := self._pool.read_truth().available - before) < expected and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        measured = asked - left if self._exact else delta
        self.process_ended()
        returned = Returned(asked, max(0, min(asked, measured)))
        return self._pool.report(self, returned, delta, time.perf_counter() - began)

    def process_ended(self) -> None:
        """Stop counting the bytes: the process has ended by itself. A second call does nothing."""
        with self._lock:
            if not self._released:
                self._released = True
                self._pool.forget(self)

    def _check_held(self) -> None:
        if self._released:
            raise LeaseReturnedError(f"{self.title} gave its bytes back before; start it again to use it")
