"""Eviction as data: the policies, what is due now, and the order under pressure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

from ..errors import RequestError

Kind = Literal["weights", "kv", "state", "scratch", "table"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PolicyName = Literal["stay", "phase", "ttl", "pinned"]


@dataclass(frozen=True, slots=True)
class Policy:
    """When a lease may be evicted. `stay`: when its bytes are needed. `phase`: after the last text node of the prompt.
    `ttl`: after `seconds` idle. `pinned`: never, until its owner returns it.

    Raises RequestError if the name is unknown, or the seconds do not match it.
    """

    name: PolicyName
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            raise RequestError(f"memory policy is {self.name!r}; use stay, phase, ttl N or pinned")
        if self.name != "ttl":
            if self.seconds is not None:
                raise RequestError(
                    f"memory policy {self.name} takes no seconds, {self.seconds!r} were given; use ttl N for a time"
                )
            return
        number = (
            isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool) and math.isfinite(self.seconds)
        )
        if not number or self.seconds is None or self.seconds < 0:
            had = "no seconds" if self.seconds is None else f"{self.seconds!r} seconds"
            raise RequestError(f"memory policy ttl has {had}; use a number from 0, for example ttl 300")

    def __str__(self) -> str:
        return self.name if self.seconds is None else f"{self.name} {self.seconds:g}"


STAY = Policy("stay")
PHASE = Policy("phase")
PINNED = Policy("pinned")


class Holder(Protocol):
    """What the order depends on; LeaseInfo and Lease both have it. `idle`: seconds since the last use."""

    @property
    def kind(self) -> Kind: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def idle(self) -> float: ...
    @property
    def in_use(self) -> bool: ...
    @property
    def cold(self) -> bool: ...


H = TypeVar("H", bound=Holder)

# Cheapest to rebuild first: scratch is empty, a cold prefix may never be used again, KV is recomputed from its prompt,
# weights are read from their file. The pages of a table come back one by one, but all its readers wait for them.
_RANKS: dict[Kind, int] = {"scratch": 0, "kv": 2, "state": 2, "table": 3, "weights": 3}
_COLD_RANK = 1


def evictable(holder: Holder) -> bool:
    """Whether it may be evicted: not in use, not pinned. A running generation is never cut."""
    return not holder.in_use and holder.policy.name != "pinned"


def eviction_order(holders: Iterable[H]) -> list[H]:
    """The evictable ones in order: scratch, cold prefixes, idle KV and state, idle weights.

    Within a rank the least recently used goes first. Leases that are missing here must not be evicted.
    """
    return sorted((holder for holder in holders if evictable(holder)), key=lambda holder: (_rank(holder), -holder.idle))


def due(holders: Iterable[H], *, phase_over: bool) -> list[H]:
    """Those whose policy says to evict now, without pressure: ttl has run out, or phase and the phase is over."""
    return [holder for holder in eviction_order(holders) if _is_due(holder, phase_over)]


def _rank(holder: Holder) -> int:
    return _COLD_RANK if holder.cold and holder.kind in ("kv", "state") else _RANKS[holder.kind]


def _is_due(holder: Holder, phase_over: bool) -> bool:
    if holder.policy.name == "ttl":
        return holder.idle >= (holder.policy.seconds or 0.0)
    return holder.policy.name == "phase" and phase_over
