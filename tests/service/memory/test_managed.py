"""Managed memory over a simulated CUDA runtime: where pages are, which advice is set and unset, and what a card must
never be asked.
"""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.errors import MemoryFull, RequestError
from onedesk.service.memory.backends import choose_backend
from onedesk.service.memory.backends.managed import (
    ATTRIBUTES,
    LASTING,
    PIECE,
    Allocation,
    ManagedBackend,
    ManagedSlab,
)
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import Truth, read_truth

CARD = 64 * MIB


class PlayedRuntime:
    """A card of CARD bytes whose pages are host memory. It knows the location and the advice of each piece."""

    def __init__(self, **attributes: int) -> None:
        self.attributes = dict.fromkeys(ATTRIBUTES, 1) | {"Integrated": 0} | attributes
        self.buffers: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.on_card: dict[int, int] = {}
        self.advice: dict[tuple[int, str], bool] = {}
        self.most_on_card = 0

    def attribute(self, name: str) -> int:
        return self.attributes[name]

    def free_bytes(self) -> int:
        return CARD - sum(self.on_card.values())

    def allocate(self, nbytes: int) -> int:
        assert nbytes <= self.free_bytes(), "more managed memory than the card has free: a real card can hang"
        kind = type("Buffer", (ctypes.c_uint8 * nbytes,), {})
        buffer = kind()
        address = ctypes.addressof(buffer)
        self.buffers[address] = buffer
        return address

    def release(self, address: int) -> None:
        buffer = self.buffers.pop(address)
        for piece in range(0, len(buffer), PIECE):
            self.on_card.pop(address + piece, None)

    def tensor(self, owner: Allocation) -> torch.Tensor:
        kind = type("View", (ctypes.c_uint8 * owner.nbytes,), {})
        view = kind.from_address(owner.address)
        view.owner = owner
        return torch.frombuffer(view, dtype=torch.uint8)

    def advise(self, address: int, nbytes: int, advice: str, *, on: bool) -> None:
        for at in range(address, address + nbytes, PIECE):
            self.advice[at, advice] = on

    def move(self, address: int, nbytes: int, *, to_host: bool) -> None:
        for at in range(address, address + nbytes, PIECE):
            if to_host and not self.advice.get((at, "read_mostly")):
                self.on_card.pop(at, None)
            else:
                self.on_card[at] = min(PIECE, address + nbytes - at)
        self.most_on_card = max(self.most_on_card, sum(self.on_card.values()))

    def given(self) -> set[str]:
        """Every advice in effect anywhere."""
        return {name for (_, name), on in self.advice.items() if on}


@pytest.fixture
def runtime() -> PlayedRuntime:
    return PlayedRuntime()


@pytest.fixture
def backend(runtime: PlayedRuntime) -> ManagedBackend:
    return ManagedBackend("cuda", runtime=runtime)


def test_managed_slab_starts_on_card_and_returns_whole(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(10 * MIB + 512, whole=True)
    assert slab.resident(0, slab.nbytes) == slab.nbytes == CARD - runtime.free_bytes()
    slab.write(5, b"abc")
    assert slab.read(4, 5) == b"\0abc\0"
    before = slab.checksum(0, 16)
    slab.write(9, b"d")
    assert slab.checksum(0, 16) != before
    returned = slab.close()
    assert (returned.asked, returned.measured) == (10 * MIB + 512, 10 * MIB + 512)
    assert (runtime.free_bytes(), runtime.buffers) == (CARD, {})
    assert (slab.close().asked, slab.resident(0, 512)) == (0, 0)
    with pytest.raises(MemoryFull, match="given back"):
        slab.view(0, 1)


def test_live_view_is_a_shortfall(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(4 * MIB, whole=True)
    slab.write(0, b"x")
    view = slab.view(0, 4).tensor
    assert slab.close().measured == 0
    assert view[0].item() == ord("x")
    del view
    assert runtime.free_bytes() == CARD


def test_every_advice_is_undone_when_the_slab_goes_back(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(8 * MIB, whole=True)
    for advice in LASTING:
        assert slab.advise(advice, 0, slab.nbytes)
    assert runtime.given() == set(LASTING)
    slab.close()
    assert runtime.given() == set()


def test_the_advice_of_a_part_ends_with_that_part(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(8 * MIB, whole=False)
    slab.advise("read_mostly", 0, 4 * MIB)
    slab.advise("prefer_host", 4 * MIB, 4 * MIB)
    assert (slab.give_back(0, 4 * MIB).asked, runtime.given()) == (0, {"prefer_host"})
    slab.give_back(4 * MIB, 4 * MIB)
    assert runtime.given() == set()


def test_read_mostly_pages_are_moved_not_copied(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(8 * MIB, whole=True)
    slab.advise("read_mostly", 0, 8 * MIB)
    slab.advise("aside", 0, 4 * MIB)
    assert slab.resident(0, 8 * MIB) == CARD - runtime.free_bytes() == 4 * MIB


def test_an_advice_that_does_not_exist_is_not_taken(runtime: PlayedRuntime, backend: ManagedBackend):
    slab = backend.open(4 * MIB, whole=True)
    assert not slab.advise("hugepage", 0, 4 * MIB)
    assert not slab.lock(0, 4 * MIB)
    assert runtime.given() == set()


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["aside", "willneed", "populate"]), st.integers(0, 9 * MIB), st.integers(1, 9 * MIB))
    )
)
def test_what_is_resident_is_what_the_card_holds(parts: list[tuple[str, int, int]]):
    runtime = PlayedRuntime()
    slab = ManagedSlab(9 * MIB, runtime)
    for what, offset, nbytes in parts:
        nbytes = min(nbytes, slab.nbytes - offset)
        if nbytes < 1:
            continue
        if what == "populate":
            slab.populate(offset, nbytes)
            assert slab.resident(offset, nbytes) == nbytes
        else:
            slab.advise(what, offset, nbytes)
        assert slab.resident(0, slab.nbytes) == CARD - runtime.free_bytes()
        assert slab.resident(0, offset) + slab.resident(offset, slab.nbytes - offset) == slab.resident(0, slab.nbytes)
    on_card = slab.resident(0, slab.nbytes)
    returned = slab.close()
    assert (returned.asked, returned.measured) == (on_card, on_card)


def test_request_above_free_memory_is_refused_first(backend: ManagedBackend):
    first = backend.open(CARD - 4 * MIB, whole=True)
    with pytest.raises(MemoryFull, match="4194304 more than the card has free"):
        backend.open(8 * MIB, whole=True)
    assert (backend.movable, first.resident(0, first.nbytes)) == (0, first.nbytes)


def test_oversubscription_moves_oldest_slabs_to_host(runtime: PlayedRuntime):
    backend = ManagedBackend("cuda", oversubscribe=True, runtime=runtime)
    first, second = backend.open(40 * MIB, whole=True), backend.open(20 * MIB, whole=True)
    assert backend.movable == 60 * MIB
    third = backend.open(30 * MIB, whole=True)
    assert [slab.resident(0, slab.nbytes) for slab in (first, second, third)] == [0, 20 * MIB, 30 * MIB]
    assert runtime.most_on_card <= CARD
    with pytest.raises(MemoryFull):
        backend.open(CARD + 512, whole=True)  # not even an empty card has that much
    first.populate(0, 2 * MIB)
    assert first.resident(0, first.nbytes) == 2 * MIB
    first.close()
    assert backend.movable == sum(slab.resident(0, slab.nbytes) for slab in (second, third))


def test_card_without_managed_access_is_refused():
    with pytest.raises(RequestError, match="cannot move managed memory on advice"):
        ManagedBackend("cuda", runtime=PlayedRuntime(ConcurrentManagedAccess=0))


def test_it_says_what_the_machine_can_do():
    found = ManagedBackend("cuda", runtime=PlayedRuntime(PageableMemoryAccess=0)).capabilities()
    assert (found["ConcurrentManagedAccess"], found["PageableMemoryAccess"], found["oversubscribe"]) == (
        True,
        False,
        False,
    )
    assert set(ATTRIBUTES) <= set(found)


def test_missing_cuda_bindings_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RequestError, match='pip install "cuda-bindings>=13" into the environment of Onedesk'):
        ManagedBackend("cuda")


def test_pool_counts_movable_managed_memory(runtime: PlayedRuntime, monkeypatch: pytest.MonkeyPatch):
    def truth() -> Truth:
        host = read_truth("cpu")
        free = runtime.free_bytes()
        return Truth(CARD, free, free, False, 0, 0, None, host.host_available, 0, None, "device")

    monkeypatch.setattr(
        choose_backend,
        "ManagedBackend",
        lambda device, oversubscribe: ManagedBackend(device, oversubscribe=oversubscribe, runtime=runtime),
    )
    settings = MemorySettings(limit=0.95, kept_back=0.0, floor=0, own_slab=MIB, managed=True, oversubscribe=True)
    pool = Pool("cuda", settings, truth)
    weights = pool.lease("writer", "weights", 40 * MIB)
    assert (pool.residency, pool.backend.name) == ("device", "cuda managed")
    foreign = runtime.allocate(20 * MIB)  # another process takes the card
    runtime.move(foreign, 20 * MIB, to_host=False)
    pool.lease("writer", "kv", 12 * MIB)
    assert weights.resident() == 0  # moved to the host, not returned
    assert weights.release().asked == 0
    pool.verify()


def test_setting_aside_needs_managed_memory():
    with pytest.raises(RequestError, match="oversubscribe needs managed = true"):
        MemorySettings(oversubscribe=True)
