"""What a pool counts over its life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the pool was made. `seconds`: time spent in lease()."""

    allocations: int
    releases: int
    shortfalls: int
    give_ways: int
    refusals: int
    damaged: int
    seconds: float
