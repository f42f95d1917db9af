"""A long random walk over the arena that cuts leases out of slabs: broken invariants, wasted bytes, and the cost of a
steady loop.

    python -m onedesk.lab.fragmentation [--operations 10000000] [--seed 0] [--json]

Exit 1 if the fragmentation is above its limit; a broken invariant is an error. One thread; ten million operations take
a minute or two.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..service.console import write_json
from ..service.memory.arena import Arena
from ..service.memory.budget import KIB, MIB, show

OPERATIONS = 10_000_000
LIMIT = 0.05
# Buffers of a decoder layer's step, in bytes: a steady loop allocates and frees them repeatedly.
STEP = (8 * KIB, 8 * KIB, 16 * KIB, 16 * KIB, 48 * KIB, 24 * KIB, 600 * KIB)
ROUNDS, REPEATS = 2_000, 9


@dataclass(frozen=True, slots=True)
class Walk:
    """Results of a random walk: bytes, shares of the held bytes, and the seconds of the whole walk, including its
    random draws and checks.
    """

    operations: int
    allocations: int
    seconds: float
    blocks: int
    used: int
    held: int
    fragmentation: float
    worst_fragmentation: float


class _Walker:
    """Keeps about `goal` bytes allocated in blocks of random sizes, and frees a random one when there are more."""

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


def steady_loop() -> float:
    """Seconds of the thread's own time to allocate and free one block in a steady loop; median of REPEATS runs.

    The blocks of STEP are allocated and freed repeatedly, in an arena that also holds a model's leases.
    """
    arena = Arena()
    arena.add_slab(64 * MIB)
    for nbytes in (20 * MIB, 3 * MIB, 700 * KIB):
        arena.allocate(nbytes, 256)
    found = []
    for _ in range(REPEATS):
        started = time.thread_time()
        for _ in range(ROUNDS):
            blocks = [arena.allocate(nbytes, 256) for nbytes in STEP]
            for address in blocks:
                arena.free(address or 0)
        found.append((time.thread_time() - started) / ROUNDS / len(STEP))
    return statistics.median(found)


def random_walk(
    operations: int,
    *,
    seed: int = 0,
    goal: int = 2048 * MIB,
    slab: int = 512 * MIB,
    largest: int = 32 * MIB - 1,
    check_every: int = 100_000,
) -> Walk:
    """Run `operations` random allocations and frees, sizes log-uniform from 64 bytes to `largest` (at most `slab` less
    256).

    Every `check_every` operations, all invariants are checked and the fragmentation is measured. The first tenth, while
    the arena still grows, does not count for the worst. Raises BrokenInvariantError if a check fails.
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
    return Walk(
        operations, arena.allocations, seconds, arena.blocks, arena.used, arena.held, arena.fragmentation(), worst
    )


def measure(operations: int, seed: int) -> dict[str, Any]:
    """The document. Raises BrokenInvariantError."""
    walk = random_walk(operations, seed=seed)
    return {"kind": "fragmentation", "limit": LIMIT, "walk": asdict(walk), "steady_seconds": steady_loop()}


def summary(document: dict[str, Any]) -> str:
    """The document for people."""
    walk = document["walk"]
    return (
        f"{walk['operations']:,} operations in {walk['seconds']:.0f} s, invariants kept; {show(walk['used'])} in"
        f" {walk['blocks']} blocks, {show(walk['held'])} held\nfragmentation {walk['fragmentation']:.2%}, at worst"
        f" {walk['worst_fragmentation']:.2%} (at most {document['limit']:.0%})\nsteady loop:"
        f" {document['steady_seconds'] * 1e6:.2f} us to take a block and give it back\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fragmentation", description="walk at random over the memory pool's arena")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one document on stdout, the summary on stderr")
    args = parser.parse_args(argv)
    if args.operations < 1:
        parser.error(f"--operations is {args.operations}; use a whole number from 1")
    document = measure(args.operations, args.seed)
    (sys.stderr if args.json else sys.stdout).write(summary(document))
    if args.json:
        write_json(document)
    return 1 if document["walk"]["worst_fragmentation"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
