"""The layout of a block around a lease, and its guard zones in debug mode."""

from __future__ import annotations

from dataclasses import dataclass

from .backends.protocol import Slab

_PATTERN = bytes(range(0xA5, 0xB5))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes in bytes of a block: [front, whose last `guard` bytes are the guard zone][body][guard zone][rest]. `total`:
    all of it.
    """

    front: int
    body: int
    guard: int
    total: int

    def zones(self, block: int) -> dict[str, int]:
        """Offset in the slab of each guard zone of a block that starts at `block`."""
        if not self.guard:
            return {}
        return {"before": block + self.front - self.guard, "after": block + self.front + self.body}


def plan_layout(nbytes: int, align: int, guard: int, whole: int) -> BlockLayout:
    """Lay out a body of `nbytes` whose start keeps the alignment of the block, in a block of a multiple of `whole`
    bytes.

    `guard` 0 means no zones.
    """
    front = -(-guard // align) * align
    return BlockLayout(front, nbytes, guard, -(-(front + nbytes + guard) // whole) * whole)


def write_zones(slab: Slab, block: int, layout: BlockLayout) -> None:
    """Fill the guard zones with their pattern."""
    for offset in layout.zones(block).values():
        slab.write(offset, _pattern(layout.guard))


def broken_zones(slab: Slab, block: int, layout: BlockLayout) -> list[str]:
    """Name the zones ("before", "after") that no longer hold their pattern."""
    return [
        name
        for name, offset in layout.zones(block).items()
        if slab.read(offset, layout.guard) != _pattern(layout.guard)
    ]


def _pattern(nbytes: int) -> bytes:
    return (_PATTERN * (nbytes // len(_PATTERN) + 1))[:nbytes]
