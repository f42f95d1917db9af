"""When an owner gives way, as data: the policies, what is due now, and the order under pressure."""

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
    """`stay`: until somebody needs the room. `phase`: when the last text node of the prompt has run. `ttl`: after `seconds` idle.
    `pinned`: never, until its owner returns it.

    Raises RequestError if the name is unknown, or the seconds do not go with it.
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
    """What the order looks at: LeaseInfo and Lease both have it. `idle` is seconds since the last use."""

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

# Cheapest to make again first: scratch is empty, a cold prefix may never be asked for, KV is read again from its prompt,
# weights from their file. A table's pages come back one by one, but all its readers wait for them.
_RANKS: dict[Kind, int] = {"scratch": 0, "kv": 2, "state": 2, "table": 3, "weights": 3}
_COLD_RANK = 1


def evictable(holder: Holder) -> bool:
    """Whether it may be asked at all: not in use, not pinned. A running generation is never cut."""
    return not holder.in_use and holder.policy.name != "pinned"


def eviction_order(holders: Iterable[H]) -> list[H]:
    """Return those that may give way, first to go first: scratch, cold prefixes, idle KV and state, idle weights.

    Within a rank the least recently used goes first. What is missing from the answer is what must be refused.
    """
    return sorted((holder for holder in holders if evictable(holder)), key=lambda holder: (_rank(holder), -holder.idle))


def due(holders: Iterable[H], *, phase_over: bool) -> list[H]:
    """Return those whose policy says to go now, without any pressure: ttl run out, or phase and the phase is over."""
    return [holder for holder in eviction_order(holders) if _is_due(holder, phase_over)]


def _rank(holder: Holder) -> int:
    return _COLD_RANK if holder.cold and holder.kind in ("kv", "state") else _RANKS[holder.kind]


def _is_due(holder: Holder, phase_over: bool) -> bool:
    if holder.policy.name == "ttl":
        return holder.idle >= (holder.policy.seconds or 0.0)
    return holder.policy.name == "phase" and phase_over
