"""A long random walk over the arena, for the fragmentation figure and for finding broken invariants."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .arena import Arena
from .budget import MIB


@dataclass(frozen=True, slots=True)
class Walk:
    """What a random walk found. Bytes; shares of the held bytes; `seconds` is the whole walk, checks and dice included.

    `fragmentation` counts the large blocks' own slabs as held, as the pool does; `arena_fragmentation` the shared slabs alone.
    """

    operations: int
    allocations: int
    seconds: float
    blocks: int
    used: int
    held: int
    fragmentation: float
    worst_fragmentation: float
    arena_fragmentation: float


class _Walker:
    """Keeps `goal` bytes given out in blocks of random sizes, and frees a random one whenever there are more."""

    def __init__(self, seed: int, goal: int, slab: int, own_slab: int, largest: int) -> None:
        self.arena = Arena()
        self.dice = random.Random(seed)  # noqa: S311 - the walk must be the same for one seed
        self.goal, self.slab, self.own_slab, self.largest = goal, slab, own_slab, largest
        self.live: list[tuple[int | None, int]] = []
        self.used = 0
        self.own = 0

    def step(self) -> None:
        if self.live and (self.used > self.goal or self.dice.random() < 0.45):
            self._free()
        else:
            self._allocate()

    def fragmentation(self) -> float:
        held = self.arena.held + self.own
        return self.arena.fragmentation() * self.arena.held / held if held else 0.0

    def _allocate(self) -> None:
        nbytes = int(64 * (self.largest / 64) ** self.dice.random())
        address = None
        if nbytes >= self.own_slab:
            self.own += nbytes
        else:
            align = 256 if self.dice.random() < 0.1 else 64
            address = self.arena.allocate(nbytes, align)
            if address is None:
                self.arena.add_slab(self.slab)
                address = self.arena.allocate(nbytes, align)
        self.live.append((address, nbytes))
        self.used += nbytes

    def _free(self) -> None:
        index = self.dice.randrange(len(self.live))
        address, nbytes = self.live[index]
        self.live[index] = self.live[-1]
        self.live.pop()
        self.used -= nbytes
        if address is None:
            self.own -= nbytes
            return
        stretch = self.arena.slab_of(address)
        self.arena.free(address)
        if self.arena.is_empty(stretch.base):
            self.arena.remove_slab(stretch.base)


def random_walk(
    operations: int,
    *,
    seed: int = 0,
    goal: int = 4096 * MIB,
    slab: int = 512 * MIB,
    own_slab: int = 32 * MIB,
    largest: int = 1024 * MIB,
    check_every: int = 100_000,
) -> Walk:
    """Run `operations` random allocations and frees, sizes log-uniform from 64 bytes to `largest`, with all invariants checked on the way.

    `goal`, `slab`, `own_slab` and `largest` are in bytes. Raises BrokenInvariantError if a check fails.
    """
    walker = _Walker(seed, goal, slab, own_slab, largest)
    started, worst = time.perf_counter(), 0.0
    for operation in range(1, operations + 1):
        walker.step()
        if operation % check_every == 0 or operation == operations:
            walker.arena.check()
            worst = max(worst, walker.fragmentation())
    return Walk(
        operations=operations,
        allocations=walker.arena.allocations,
        seconds=time.perf_counter() - started,
        blocks=len(walker.live),
        used=walker.used,
        held=walker.arena.held + walker.own,
        fragmentation=walker.fragmentation(),
        worst_fragmentation=worst,
        arena_fragmentation=walker.arena.fragmentation(),
    )
