"""The arena against its stated invariants: with hypothesis, with a long random walk, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from onedesk.service.memory.arena import Arena, BrokenInvariantError
from onedesk.service.memory.budget import KIB, MIB


class ArenaMachine(RuleBasedStateMachine):
    """Allocates, frees, adds and removes slabs; a plain list of intervals is the reference."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(64)
        self.taken: dict[int, int] = {}
        self.slabs: dict[int, int] = {}

    @rule(granules=st.integers(1, 256), align=st.sampled_from([64, 4096]))
    def add_slab(self, granules: int, align: int) -> None:
        stretch = self.arena.add_slab(granules * 64, align=align)
        assert stretch.base % align == 0
        self.slabs[stretch.base] = stretch.nbytes

    @rule(target=blocks, nbytes=st.integers(1, 6000), align=st.sampled_from([1, 64, 256, 1024, 4096]))
    def allocate(self, nbytes: int, align: int) -> int | None:
        address = self.arena.allocate(nbytes, align)
        size = -(-nbytes // 64) * 64
        if address is None:
            assert not self._fits(size, align)
            return None
        assert address % max(align, 64) == 0
        assert any(base <= address and address + size <= base + length for base, length in self.slabs.items())
        assert all(address + size <= other or other + length <= address for other, length in self.taken.items())
        assert self.arena.size_of(address) == size
        self.taken[address] = size
        return address

    @rule(address=consumes(blocks))
    def free(self, address: int | None) -> None:
        if address is not None:
            assert self.arena.free(address) == self.taken.pop(address)

    @precondition(lambda self: self.slabs)
    @rule(data=st.data())
    def remove_slab(self, data: st.DataObject) -> None:
        base = data.draw(st.sampled_from(sorted(self.slabs)))
        inside = [address for address in self.taken if base <= address < base + self.slabs[base]]
        assert self.arena.is_empty(base) == (not inside)
        if inside:
            with pytest.raises(ValueError, match="not empty"):
                self.arena.remove_slab(base)
        else:
            self.arena.remove_slab(base)
            del self.slabs[base]

    @invariant()
    def holds(self) -> None:
        self.arena.check()
        assert self.arena.used == sum(self.taken.values())
        assert self.arena.held == sum(self.slabs.values())
        assert self.arena.blocks == len(self.taken)
        assert self.arena.largest_free == max((length for _, length in self._gaps()), default=0)
        assert 0 <= self.arena.fragmentation() <= 1

    def _gaps(self) -> list[tuple[int, int]]:
        gaps = []
        for base, length in self.slabs.items():
            position = base
            for address in sorted(a for a in self.taken if base <= a < base + length):
                gaps.append((position, address - position))
                position = address + self.taken[address]
            gaps.append((position, base + length - position))
        return [gap for gap in gaps if gap[1]]

    def _fits(self, size: int, align: int) -> bool:
        return any(-(-start // align) * align + size <= start + length for start, length in self._gaps())


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_best_fit_takes_the_smallest_hole_that_fits():
    arena = Arena(64)
    arena.add_slab(MIB)
    taken = [arena.allocate(nbytes) for nbytes in (4096, 64, 1024, 64, 2048, 64)]
    for index in (0, 2, 4):
        arena.free(taken[index])
    assert arena.allocate(1000) == taken[2]
    assert arena.allocate(1100) == taken[4]
    assert arena.allocate(2100) == taken[0]


def test_neighbours_are_joined_on_both_sides():
    arena = Arena(64)
    arena.add_slab(3 * 64)
    first, second, third = (arena.allocate(64) for _ in range(3))
    assert arena.allocate(1) is None
    arena.free(first)
    arena.free(third)
    assert arena.largest_free == 64
    arena.free(second)
    assert arena.largest_free == 192
    arena.check()


def test_slabs_are_never_joined():
    arena = Arena(64)
    arena.add_slab(128, align=64)
    arena.add_slab(128, align=64)
    assert arena.allocate(192) is None
    arena.check()


def test_fragmentation_counts_small_holes():
    arena = Arena(64)
    assert arena.fragmentation() == 0
    arena.add_slab(20 * 64)
    taken = [arena.allocate(nbytes) for nbytes in (64, 128, 64, 256, 64, 64, 640)]
    assert arena.fragmentation() == 0
    arena.free(taken[0])
    arena.free(taken[3])
    assert arena.used // arena.blocks == 192
    assert arena.fragmentation() == pytest.approx(64 / (20 * 64))
    assert arena.fragmentation(64) == 0
    assert arena.fragmentation(257) == pytest.approx((64 + 256) / (20 * 64))


def test_a_block_is_freed_once():
    arena = Arena(64)
    arena.add_slab(MIB)
    address = arena.allocate(100)
    arena.free(address)
    with pytest.raises(KeyError):
        arena.free(address)
    arena.check()


@pytest.mark.parametrize("granule", [0, 48, -64])
def test_a_granule_must_be_a_power_of_two(granule: int):
    with pytest.raises(ValueError, match="power of two"):
        Arena(granule)


@pytest.mark.parametrize("nbytes", [0, 63, 100])
def test_a_slab_is_whole_granules(nbytes: int):
    with pytest.raises(ValueError, match="multiple of the granule"):
        Arena(64).add_slab(nbytes)


def test_check_sees_each_kind_of_damage():
    def broken(damage: str) -> str:
        arena = Arena(64)
        base = arena.add_slab(KIB).base
        arena.allocate(128)
        block = arena.allocate(128)
        arena.allocate(128)
        arena.free(block)
        exec(damage, {"arena": arena, "base": base})
        with pytest.raises(BrokenInvariantError) as caught:
            arena.check()
        return str(caught.value)

    assert "index by size" in broken("arena._by_size.pop()")
    assert "index by end" in broken("arena._ends.clear()")
    assert "expected one at" in broken("arena._used[base] = 64")
    assert "lies in no slab" in broken("arena._used[base + 4096] = 64")
    assert "tiled to" in broken("arena._slabs[base] += 64")
    assert "free blocks touch" in broken("del arena._used[base]; arena._put(base, 128)")
