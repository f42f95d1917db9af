"""The output of OnedeskMemory: memory readings, the budget, leases, and evictions; as text and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..service.catalog.memory_report import memory_table
from ..service.memory.budget import show as show_bytes
from ..service.memory.lease import LeaseInfo
from ..service.memory.pool import Pool, Released
from ..service.memory.truth import Truth
from .picture import (
    COMFYUI,
    KEPT_BACK,
    KINDS,
    ONEDESK,
    OTHERS,
    Bar,
    BarPart,
)
from .show import evicted

# Further leases are only counted in the picture; the text lists all.
SHOWN_LEASES = 12


@dataclass(frozen=True)
class Seat:
    """A model's row on the desk: how often ComfyUI evicted it, and what the last eviction returned."""

    name: str
    policy: str
    held: int
    evictions: int
    given: tuple[Released, ...]


@dataclass(frozen=True)
class DeskMemory:
    """One snapshot of everything. `resident`: the part of the leases in memory; `comfyui`: ComfyUI's own
    models; bytes.
    """

    truth: Truth
    pool: Pool
    leases: Sequence[LeaseInfo]
    resident: int
    comfyui: Sequence[tuple[str, int]]
    seats: Sequence[Seat]
    leaks: Sequence[dict[str, Any]]


def desk_text(desk: DeskMemory) -> str:
    """The table of `onedesk memory`, then models, ComfyUI's models and the counters."""
    budget, counters = desk.pool.budget, desk.pool.counters()
    report = {
        "truth": asdict(desk.truth) | {"checkpoint_pages": desk.pool.files.cached()},
        "budget": asdict(budget) | {"used": desk.pool.used()},
        "leases": [_row(lease) for lease in desk.leases],
        "leaks": desk.leaks,
    }
    models = [_seat(seat) for seat in desk.seats] or ["no language model is open"]
    others = [f"{name} {show_bytes(nbytes)}" for name, nbytes in desk.comfyui] or ["none"]
    settings = desk.pool.settings
    share = (
        f"{settings.limit:.0%} of what was available"
        if settings.limit_bytes is None
        else f"{show_bytes(settings.limit_bytes)} as set"
    )
    lines = [
        f"floor and shares: {share}, {show_bytes(budget.floor)} always left to the system",
        *models,
        f"ComfyUI's models in memory: {', '.join(others)}",
        f"{counters.allocations} leases and tensors, {counters.releases} returns ({counters.shortfalls} short), "
        f"{counters.give_ways} asked to give way, {counters.refusals} refused",
    ]
    return memory_table(report) + "\n\n" + "\n".join(lines)


def desk_bars(desk: DeskMemory) -> list[Bar]:
    """The machine, the budget, and each lease against the budget's limit."""
    truth, budget = desk.truth, desk.pool.budget
    used = max(0, truth.total - truth.available)
    ours = min(desk.resident, used)
    comfyui = min(sum(nbytes for _, nbytes in desk.comfyui), used - ours)
    machine = [
        BarPart("others", used - ours - comfyui, OTHERS),
        BarPart("ComfyUI", comfyui, COMFYUI),
        BarPart("Onedesk", ours, ONEDESK),
    ]
    kinds = [
        BarPart(kind, sum(lease.nbytes for lease in desk.leases if lease.kind == kind), colour)
        for kind, colour in KINDS.items()
    ]
    bars = [
        Bar("Memory", truth.total, machine, "available"),
        Bar("Onedesk's limit", budget.limit, [BarPart("kept back", budget.kept_back, KEPT_BACK), *kinds], "free"),
    ]
    for lease in desk.leases[:SHOWN_LEASES]:
        title = f"{lease.owner} ({lease.residency}, {lease.policy}, idle {lease.idle:.0f} s), of"
        bars.append(Bar(title, budget.limit, [BarPart(lease.kind, lease.nbytes, KINDS[lease.kind])], "rest"))
    if len(desk.leases) > SHOWN_LEASES:
        more = desk.leases[SHOWN_LEASES:]
        bars.append(
            Bar(
                f"{len(more)} more leases, of",
                budget.limit,
                [BarPart("all", sum(x.nbytes for x in more), ONEDESK)],
                "rest",
            )
        )
    return bars


def _row(lease: LeaseInfo) -> dict[str, Any]:
    held = {"owner": lease.owner, "kind": lease.kind, "bytes": lease.nbytes, "residency": lease.residency}
    return held | {"policy": str(lease.policy), "idle": lease.idle}


def _seat(seat: Seat) -> str:
    state = f"holds {show_bytes(seat.held)}" if seat.held else "not in memory"
    taken = evicted(seat.evictions, seat.given) or "ComfyUI never took its room"
    return f"{seat.name}: {state}, policy {seat.policy}; {taken}"
