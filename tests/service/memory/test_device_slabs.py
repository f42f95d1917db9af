"""Slabs that hold their bytes from the moment they are opened, like device memory; simulated with host memory."""

from __future__ import annotations

import threading

import pytest
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.backends.mapped import MappedBackend
from onedesk.service.memory.budget import GIB, MIB, MemorySettings
from onedesk.service.memory.slabs import SlabStore


class DeviceLike(MappedBackend):
    """The store decides by `commits` alone."""

    commits = True


@pytest.fixture
def store() -> SlabStore:
    return SlabStore(DeviceLike(), MemorySettings(), threading.RLock())


@pytest.mark.parametrize(("asked", "held"), [(14 * MIB, 16 * MIB), (1000, 2 * MIB), (31 * MIB, 32 * MIB)])
def test_small_lease_takes_at_most_one_extra_page(store: SlabStore, asked: int, held: int):
    store.allocate(asked, 256, GIB)
    assert store.held == held


def test_small_leases_share_a_slab_while_it_has_room(store: SlabStore):
    first, second = store.allocate(1000, 256, GIB), store.allocate(MIB, 256, GIB)
    assert first.slab is second.slab
    assert store.held == 2 * MIB


def test_a_large_lease_holds_exactly_its_bytes(store: SlabStore):
    store.allocate(100 * MIB + 512, 256, GIB)
    assert store.held == 100 * MIB + 512


def test_last_bytes_of_limit_can_be_leased(store: SlabStore):
    store.allocate(MIB, 256, MIB + MIB // 2)
    assert store.held == MIB + MIB // 2
    with pytest.raises(MemoryFull, match="512 KiB are left of the limit"):
        store.allocate(MIB, 256, MIB // 2)
