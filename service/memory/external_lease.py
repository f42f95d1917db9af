"""Bytes that a process which we started holds in an owner's name, such as another engine: part of the budget, and given back by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from .backends.protocol import Returned
from .budget import MemorySettings
from .lease import (
    GiveWay,
    LeaseBusyError,
    LeaseInfo,
    LeaseReturnedError,
    Released,
    Terms,
)
from .policy import STAY, Kind, Policy
from .truth import Truth

# The kernel and the driver take back a process's memory within milliseconds of its end, but not at once.
_SETTLE_SECONDS = 2.0
_LOOK_SECONDS = 0.02


class Lender(Protocol):
    """What it needs of the pool."""

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def settings(self) -> MemorySettings: ...

    @property
    def read_truth(self) -> Callable[[], Truth]: ...

    def forget(self, entrusted: Entrusted) -> None: ...

    def report(self, lease: Entrusted, returned: Returned, delta: int | None, seconds: float) -> Released: ...


class Entrusted:
    """Made by Pool.entrust only. `nbytes` are in the budget until `release`; `held` says what the process has taken of them.

    `exact`: `held` counts the process's own pages at any time. Else it is a figure of its start, and only the machine can tell a return.
    """

    kind: Kind = "weights"
    cold = False

    def __init__(self, lender: Lender, owner: str, nbytes: int, held: Callable[[], int], *, exact: bool) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.terms = Terms()
        self._lender = lender
        self._held = held
        self._exact = exact
        self._users = 0
        self._released = False
        self._last_used = time.monotonic()

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"{self.owner}'s process"

    @property
    def policy(self) -> Policy:
        """When it gives way."""
        return self.terms.policy

    @property
    def in_use(self) -> bool:
        """Whether it works for somebody."""
        return self._users > 0

    @property
    def idle(self) -> float:
        """Seconds since it was last used, 0 while it is in use."""
        return 0.0 if self._users else time.monotonic() - self._last_used

    @property
    def released(self) -> bool:
        """Whether the bytes are back."""
        return self._released

    def held(self) -> int:
        """Bytes of `nbytes` that the process has taken."""
        return 0 if self._released else max(0, min(self.nbytes, self._held()))

    def offer(self, give_way: GiveWay, *, policy: Policy = STAY) -> None:
        """As Lease.offer."""
        with self._lender.lock:
            self.terms = Terms(policy, give_way)

    @contextmanager
    def using(self) -> Iterator[Entrusted]:
        """Hold it in use: until the block ends it cannot be released. Raises LeaseReturnedError after its release."""
        with self._lender.lock:
            self._check_here()
            self._users += 1
        try:
            yield self
        finally:
            with self._lender.lock:
                self._users -= 1
                self._last_used = time.monotonic()

    def release(self, end: Callable[[], None]) -> Released:
        """Let `end` make the process give the bytes back, and measure what came.

        `asked` is what the process held before. Where that is not exact, the measure is the machine's available memory, which other
        processes move too; it is looked at for up to 2 s until it agrees.
        Raises LeaseBusyError while it is in use, LeaseReturnedError the second time, and what `end` raises: then nothing is released.
        """
        with self._lender.lock:
            self._check_here()
            if self._users:
                raise LeaseBusyError(f"{self.title} is at work; let the generation finish or stop it first")
        began, asked, before = time.perf_counter(), self.held(), self._lender.read_truth().available
        end()
        left = self.held()
        wanted = (1 - self._lender.settings.shortfall) * asked
        until = time.monotonic() + (0.0 if self._exact else _SETTLE_SECONDS)
        while (delta := self._lender.read_truth().available - before) < wanted and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        measured = asked - left if self._exact else delta
        self.lost()
        return self._lender.report(self, Returned(asked, max(0, min(asked, measured))), delta, time.perf_counter() - began)

    def lost(self) -> None:
        """The process has ended by itself, whoever it worked for: its bytes are no longer counted. A second time is no error."""
        with self._lender.lock:
            if not self._released:
                self._released = True
                self._lender.forget(self)

    def info(self) -> LeaseInfo:
        """Describe it."""
        return LeaseInfo(self.owner, self.kind, self.nbytes, "process", self.policy, self.idle, self.in_use, self.cold)

    def _check_here(self) -> None:
        if self._released:
            raise LeaseReturnedError(f"{self.title} gave its bytes back before; start it again to use it")
