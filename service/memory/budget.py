"""Budgets: every number of the memory design as a default, and what they make of a truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from ..errors import Field, RequestError
from .truth import Truth

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_LARGEST = 1 << 50  # bytes: no machine has more
# The settings in bytes, with the smallest and the largest value.
_BYTES: Mapping[str, tuple[int, int]] = {
    "floor": (0, _LARGEST),
    "initial_slab": (1, _LARGEST),
    "own_slab": (1, _LARGEST),
    "align": (1, 512),
    "weight_align": (1, 512),
    "guard": (1, MIB),
}
SMALLEST_CONTEXT = 64  # tokens; a shorter one is no choice to offer: it holds no prompt with its answer


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
    lock: bool = False  # keep weights in host memory from being swapped out (mlock)
    managed: bool = False  # CUDA managed memory instead of plain blocks, where there is a GPU; needs cuda-bindings
    oversubscribe: bool = False  # managed memory: set idle pages aside in the host's memory when the card lacks room

    def __post_init__(self) -> None:
        _check_share("limit", self.limit, 0.10, 0.95)
        _check_share("kept_back", self.kept_back, 0.0, 0.50)
        _check_share("headroom", self.headroom, 0.0, 1.0)
        _check_share("shortfall", self.shortfall, 0.0, 1.0)
        for name, (low, high) in _BYTES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                shown = f"{value!r:.40}; use a whole number of bytes from {low} to {high}"
                raise RequestError("memory ", Field(name), f" is {shown}")
        for name in ("align", "weight_align"):
            value = getattr(self, name)
            if value & (value - 1):
                raise RequestError(f"memory {name} is {value} bytes; use a power of two")
        for name in ("poll", "poll_loading"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 60:
                raise RequestError(f"memory {name} is {value!r:.40}; use 0.01 to 60 seconds")
        if self.oversubscribe and not self.managed:
            raise RequestError("memory oversubscribe needs managed = true: plain device blocks cannot be set aside")
        if (most := self.limit_bytes) is not None and (
            isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _LARGEST
        ):
            shown = f"{most!r:.40}; use a whole number of bytes from 1 to {_LARGEST}, or leave it out"
            raise RequestError("memory ", Field("limit_bytes"), f" is {shown}")


def _check_share(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        shown = f"{value:.0%}" if number and abs(value) < 100 else f"{value!r:.40}"
        raise RequestError("memory ", Field(name), f" is {shown}; use {low:.0%} to {high:.0%}")


@dataclass(frozen=True, slots=True)
class Need:
    """What a model states before anything of it is loaded, in bytes.

    `context` is the tokens that `kv` is for, and `weights_of` what the weights would be in other forms ("int8",
    "int4"): with them a refusal can name the choice that fits. KV is taken to grow evenly with the context.
    """

    weights: int
    kv: int = 0
    scratch: int = 0
    context: int = 0
    weights_of: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def total(self) -> int:
        """The parts together, without headroom."""
        return self.weights + self.kv + self.scratch

    def with_headroom(self, share: float) -> int:
        """The parts together plus `share` on top, rounded up."""
        return self.total + math.ceil(self.total * share)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that all leases may hold. `limit` already respects the floor; `spendable` is the limit without what is
    kept back.

    `promised`: what other processes of this user were promised and had not taken when it was made; the limit already
    respects it.
    """

    limit: int
    kept_back: int
    floor: int
    promised: int = 0

    @property
    def spendable(self) -> int:
        """Bytes that can be leased in all."""
        return self.limit - self.kept_back


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """What could be leased now, in bytes: within the `budget`, of what the `machine` has left above the floor, and what
    `yielding` leases and `neighbours` would add by giving way. `used` and `available` are the figures behind it.
    """

    budget: int
    machine: int
    yielding: int
    neighbours: int
    used: int
    available: int

    @property
    def now(self) -> int:
        """Bytes that fit without anybody giving way."""
        return min(self.budget, self.machine)

    @property
    def most(self) -> int:
        """Bytes that fit after everybody gave way who can."""
        return min(self.budget + self.yielding, self.machine + self.yielding + self.neighbours)


def make_budget(truth: Truth, settings: MemorySettings, *, own: int = 0, promised: int = 0) -> Budget:
    """Make the budget of a pool from what is available now; `own` bytes that the pool itself has in memory count as
    available.

    `promised` bytes, which others may still take, do not.

    limit = min(share of what is available, available - floor). On a machine with less than the floor available the
    limit is 0: every lease is refused, with figures, and the truth can still be shown.
    Raises RequestError, with the figures, if the settings can never be met by this machine or not while others hold
    what they hold.
    """
    available = max(0, min(truth.total, truth.available + own) - promised)
    if settings.floor >= truth.total:
        raise RequestError(
            *("memory ", Field("floor")),
            f" is {show(settings.floor)}, but the machine has {show(truth.total)} in all; use a floor below that",
        )
    limit = int(available * settings.limit)
    if settings.limit_bytes is not None:
        limit = settings.limit_bytes
        _check_limit(limit, truth.total, available, settings.floor, promised)
    limit = max(0, min(limit, available - settings.floor))
    return Budget(limit, int(limit * settings.kept_back), settings.floor, promised)


def _check_limit(limit: int, total: int, available: int, floor: int, promised: int) -> None:
    if limit > total:
        raise RequestError(
            f"memory limit_bytes is {show(limit)}, more than the machine's {show(total)}; use less than that"
        )
    if limit > available - floor:
        raise RequestError(
            f"memory limit_bytes is {show(limit)}, but of {show(total)} the system and other programs hold "
            f"{show(total - available - promised)}{_promised(promised)} "
            f"and the floor keeps {show(floor)}; use at most {show(max(0, available - floor))}"
        )


def _promised(nbytes: int) -> str:
    """What a message adds where other processes were promised memory."""
    return f", other processes of this user were promised {show(nbytes)} more (onedesk memory)" if nbytes else ""


def explain_refusal(owner: str, need: Need, settings: MemorySettings, budget: Budget, room: PoolRoom) -> str:
    """Say why `need` does not fit, with every figure, and which choice would."""
    wanted = need.with_headroom(settings.headroom)
    return (
        f"{owner} needs {show(wanted)} (weights {show(need.weights)}, KV {show(need.kv)}, scratch {show(need.scratch)},"
        f" and {settings.headroom:.0%} headroom {show(wanted - need.total)}), but {show(max(0, room.most))} can be had:"
        f" limit {show(budget.limit)}{_promised(budget.promised)}, kept back {show(budget.kept_back)}, used"
        f" {show(room.used)}, of which {show(room.yielding)} would give way, floor {show(budget.floor)}, available"
        f" {show(room.available)}, neighbours would free {show(room.neighbours)}. It lacks"
        f" {show(wanted - max(0, room.most))}. " + _choices(need, settings, room.most)
    )


def explain_lease_refusal(owner: str, kind: str, nbytes: int, budget: Budget, room: PoolRoom) -> str:
    """Say why one lease does not fit, with every figure."""
    return (
        f"{owner} asks for {show(nbytes)} of {kind}, but {show(max(0, room.now))} can be leased: limit"
        f" {show(budget.limit)}{_promised(budget.promised)}, kept back {show(budget.kept_back)}, used"
        f" {show(room.used)}, floor {show(budget.floor)}, available {show(room.available)}; release a model, choose a"
        " smaller context, or raise the limit in [memory]"
    )


def fitting_context(need: Need, headroom: float, most: int) -> int:
    """The largest context in tokens at which `need` with its headroom is at most `most`: a multiple of 256, a
    shorter one of 32.
    """
    if need.context < 1 or need.kv < 1:
        return 0
    spare = math.floor(most / (1 + headroom)) - need.weights - need.scratch
    tokens = max(0, min(need.context, spare * need.context // need.kv))
    # Keys and values lie in blocks of 32 tokens.
    return tokens // 256 * 256 if tokens >= 256 else tokens // 32 * 32


def _choices(need: Need, settings: MemorySettings, most: int) -> str:
    """Name what would fit: a smaller context, other weights at the same context, or what another model may weigh."""
    found = []
    context = fitting_context(need, settings.headroom, most)
    if context >= SMALLEST_CONTEXT:
        found.append(f"a context of {context} (asked: {need.context})")
    for form, weights in need.weights_of.items():
        other = replace(need, weights=weights)
        if other.with_headroom(settings.headroom) <= most:
            found.append(f"{form} ({show(weights)} of weights)")
    if found:
        return "What fits: " + ", or ".join(found) + "."
    weights = math.floor(max(0, most) / (1 + settings.headroom)) - need.scratch
    if weights > 0:
        return (
            f"No form of this model fits; choose another model of at most {show(weights)} with its KV, or release what"
            " is open."
        )
    return "Nothing fits now; close other programs or release what is open, then try again."


def show(nbytes: int) -> str:
    """Write bytes for people: 5 B, 1.5 KiB, 512 MiB, 121.7 GiB."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}".replace(".0 ", " ")
    return f"{nbytes} B"


# The keys of the [memory] table in onedesk.toml.
SETTING_NAMES = tuple(setting.name for setting in fields(MemorySettings))
