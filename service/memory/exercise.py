"""A long random walk over the arena: finds broken invariants, and gives the fragmentation figure."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .arena import Arena
from .budget import MIB


@dataclass(frozen=True, slots=True)
class Walk:
    """What a random walk found: bytes, shares of the held bytes, and the seconds of the whole walk, its dice and checks included."""

    operations: int
    allocations: int
    seconds: float
    blocks: int
    used: int
    held: int
    fragmentation: float
    worst_fragmentation: float


class _Walker:
    """Keeps about `goal` bytes given out in blocks of random sizes, and frees a random one whenever there are more."""

    def __init__(self, seed: int, goal: int, slab: int, largest: int) -> None:
        self.arena = Arena()
        self._dice = random.Random(seed)  # noqa: S311 - the walk must be the same for one seed
        self._goal, self._slab, self._largest = goal, slab, largest
        self._live: list[int] = []
        self._used = 0

    def step(self) -> None:
        if self._live and (self._used > self._goal or self._dice.random() < 0.45):
            self._free()
        else:
            self._allocate()

    def _allocate(self) -> None:
        nbytes = int(64 * (self._largest / 64) ** self._dice.random())
        align = 256 if self._dice.random() < 0.1 else 64
        address = self.arena.allocate(nbytes, align)
        while address is None:
            self.arena.add_slab(self._slab)
            address = self.arena.allocate(nbytes, align)
        self._live.append(address)
        self._used += self.arena.size_of(address)

    def _free(self) -> None:
        index = self._dice.randrange(len(self._live))
        address, self._live[index] = self._live[index], self._live[-1]
        self._live.pop()
        base = self.arena.slab_of(address).base
        self._used -= self.arena.free(address)
        if self.arena.is_empty(base):
            self.arena.remove_slab(base)


def random_walk(
    operations: int,
    *,
    seed: int = 0,
    goal: int = 2048 * MIB,
    slab: int = 512 * MIB,
    largest: int = 32 * MIB - 1,
    check_every: int = 100_000,
) -> Walk:
    """Run `operations` random allocations and frees, sizes log-uniform from 64 bytes to `largest` (at most `slab` less 256).

    Every `check_every` operations all invariants are checked and the fragmentation is taken; the first tenth, while the arena still
    grows, does not count for the worst. Raises BrokenInvariantError if a check fails.
    """
    walker = _Walker(seed, goal, slab, largest)
    started, worst = time.perf_counter(), 0.0
    for operation in range(1, operations + 1):
        walker.step()
        if operation % check_every == 0 or operation == operations:
            walker.arena.check()
            if operation > operations // 10:
                worst = max(worst, walker.arena.fragmentation())
    arena = walker.arena
    seconds = time.perf_counter() - started
    return Walk(operations, arena.allocations, seconds, arena.blocks, arena.used, arena.held, arena.fragmentation(), worst)
