"""Budgets: every number of the memory design as a default, and what they make of a truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import RequestError
from .truth import Truth

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The pool's numbers; sizes in bytes, shares as fractions of 1.

    Raises RequestError if a value is out of its range, naming the value and the range.
    """

    limit: float = 0.70  # share of what is available at start
    limit_bytes: int | None = None  # an absolute limit instead of the share
    kept_back: float = 0.05  # share of the limit that is never leased
    floor: int = 512 * MIB  # always left to the host
    headroom: float = 0.20  # on top of a model's stated need
    initial_slab: int = 512 * MIB
    own_slab: int = 32 * MIB  # a lease from this size on has a slab of its own, so that giving way returns it whole
    align: int = 64
    weight_align: int = 256
    guard: int = 16  # bytes before and after each lease, in debug mode
    shortfall: float = 0.02  # a release that returns less than 1 - shortfall of what it should is a warning
    poll_loading: float = 0.25  # seconds between two looks of the watch while a model loads
    poll: float = 1.0
    debug: bool = False

    def __post_init__(self) -> None:
        _check_share("limit", self.limit, 0.10, 0.95)
        _check_share("kept_back", self.kept_back, 0.0, 0.50)
        _check_share("headroom", self.headroom, 0.0, 1.0)
        _check_share("shortfall", self.shortfall, 0.0, 1.0)
        for name in ("floor", "initial_slab", "own_slab", "align", "weight_align", "guard"):
            value = getattr(self, name)
            low = 0 if name == "floor" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise RequestError(f"memory {name} is {value!r}; use a whole number of bytes from {low}")
        for name in ("align", "weight_align"):
            value = getattr(self, name)
            if value & (value - 1):
                raise RequestError(f"memory {name} is {value} bytes; use a power of two")
        for name in ("poll", "poll_loading"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 60:
                raise RequestError(f"memory {name} is {value!r}; use 0.01 to 60 seconds")
        if self.limit_bytes is not None and (
            isinstance(self.limit_bytes, bool) or not isinstance(self.limit_bytes, int) or self.limit_bytes < 1
        ):
            raise RequestError(f"memory limit_bytes is {self.limit_bytes!r}; use a whole number of bytes from 1, or leave it out")


def _check_share(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        shown = f"{value:.0%}" if number else repr(value)
        raise RequestError(f"memory {name} is {shown}; use {low:.0%} to {high:.0%}")


@dataclass(frozen=True, slots=True)
class Need:
    """What a model states before anything of it is loaded, in bytes."""

    weights: int
    kv: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        """The parts together, without headroom."""
        return self.weights + self.kv + self.scratch

    def with_headroom(self, share: float) -> int:
        """The parts together plus `share` on top."""
        return self.total + math.ceil(self.total * share)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that all leases may hold. `limit` already respects the floor; `spendable` is the limit without what is kept back."""

    limit: int
    kept_back: int
    floor: int

    @property
    def spendable(self) -> int:
        """Bytes that can be leased in all."""
        return self.limit - self.kept_back


def make_budget(truth: Truth, settings: MemorySettings) -> Budget:
    """Make the budget of a pool from what is available now.

    Raises RequestError, with the figures, if the settings cannot be met by this machine.
    """
    if settings.floor >= truth.total:
        raise RequestError(
            f"memory floor is {show(settings.floor)}, but the machine has {show(truth.total)} in all; use a floor below that"
        )
    room = max(0, truth.available - settings.floor)
    limit = int(truth.available * settings.limit)
    if settings.limit_bytes is not None:
        held = truth.total - truth.available
        if settings.limit_bytes > truth.total:
            raise RequestError(f"memory limit_bytes is {show(settings.limit_bytes)}, more than the machine's {show(truth.total)}")
        if settings.limit_bytes > truth.available:
            raise RequestError(
                f"memory limit_bytes is {show(settings.limit_bytes)}, but the system and other programs hold {show(held)} of "
                f"{show(truth.total)}: {show(truth.available)} are available; use at most that"
            )
        limit = settings.limit_bytes
    limit = min(limit, room)
    return Budget(limit, int(limit * settings.kept_back), settings.floor)


def show(nbytes: int) -> str:
    """Write bytes for people: 5 B, 1.5 KiB, 512 MiB, 121.7 GiB."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}".replace(".0 ", " ")
    return f"{nbytes} B"


SETTING_NAMES = tuple(field.name for field in fields(MemorySettings))
