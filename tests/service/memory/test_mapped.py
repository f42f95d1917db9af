"""Host slabs on this machine's real memory: residency, advice, locking, and views that outlive their slab."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import psutil
import pytest
import torch
from onedesk.service.errors import MemoryFull
from onedesk.service.memory.backends.mapped import (
    ADVICE,
    HUGE_PAGE,
    PAGE,
    MappedBackend,
    MappedSlab,
    resident_bytes,
)
from onedesk.service.memory.budget import MIB
from onedesk.service.memory.meminfo import read_faults


def rss() -> int:
    return psutil.Process().memory_info().rss


def maps_of(address: int) -> str:
    """The line of /proc/self/maps that covers an address; empty if it is not mapped."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        low, _, high = line.split(" ", 1)[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            return line
    return ""


def test_slab_takes_no_pages_until_touched():
    slab = MappedBackend().open(64 * MIB, whole=True)
    tensor = slab.view(0, slab.nbytes).tensor
    line = maps_of(tensor.data_ptr())
    assert line.split()[1] == "rw-p"
    assert line.split()[4] == "0"
    assert slab.resident(0, slab.nbytes) == 0
    slab.populate(0, slab.nbytes)
    assert slab.resident(0, slab.nbytes) == slab.nbytes
    assert tensor.data_ptr() % HUGE_PAGE == 0


def test_residency_is_exact_by_the_page():
    slab = MappedBackend().open(16 * MIB, whole=False)
    tensor = slab.view(0, slab.nbytes).tensor
    for page in (0, 7, 8, 4095):
        tensor[page * PAGE + 5] = 1
    assert slab.resident(0, slab.nbytes) == 4 * PAGE
    assert slab.resident(7 * PAGE, 2 * PAGE) == 2 * PAGE
    assert slab.resident(7 * PAGE + 1, 10) == 10
    assert slab.resident(PAGE, 6 * PAGE) == 0


def test_populate_means_no_fault_later():
    slab = MappedBackend().open(32 * MIB, whole=True)
    tensor = slab.view(0, slab.nbytes).tensor
    slab.populate(0, slab.nbytes)
    tensor[:64].fill_(1)
    before = read_faults()
    tensor.fill_(3)
    faults = read_faults().since(before)
    assert faults.major == 0
    assert faults.minor < 32 * MIB // PAGE // 100


def test_giving_back_returns_the_processs_memory():
    slab = MappedBackend().open(256 * MIB, whole=True)
    slab.populate(0, slab.nbytes)
    full = rss()
    returned = slab.close()
    assert returned.asked == returned.measured == 256 * MIB
    assert full - rss() >= 0.98 * 256 * MIB


def test_a_part_goes_back_and_its_neighbours_stay():
    slab = MappedBackend().open(8 * MIB, whole=False)
    tensor = slab.view(0, slab.nbytes).tensor
    tensor.fill_(9)
    returned = slab.give_back(MIB + 100, 2 * MIB)
    assert returned.asked == returned.measured == 2 * MIB - PAGE
    assert torch.all(tensor[: MIB + 100] == 9)
    assert torch.all(tensor[3 * MIB + 100 :] == 9)
    assert torch.all(tensor[MIB + PAGE : 3 * MIB] == 0)
    assert slab.give_back(100, 50).asked == 0


def test_views_outlive_the_slab_and_read_zeros():
    slab = MappedSlab(4 * MIB, huge=True)
    part = slab.view(MIB, 2 * MIB)
    view = part.tensor[:4000].view(torch.float32).view(10, 100)
    view.fill_(2.5)
    address = view.data_ptr()
    slab.close()
    del part, slab
    gc.collect()
    assert maps_of(address)
    assert view.sum().item() == 0
    view.fill_(1.0)
    assert view.sum().item() == 1000
    row = view[3]
    del view
    assert row.tolist() == [1.0] * 100
    del row
    assert resident_bytes(address, PAGE) == 0


def test_the_life_of_a_part_is_known():
    slab = MappedSlab(MIB, huge=False)
    part = slab.view(0, PAGE)
    view = part.tensor.view(torch.int32)[3:5].detach()
    alive = part.alive
    assert alive is not None
    del part
    assert alive()
    del view
    assert not alive()


def test_a_closed_slab_gives_no_more_parts():
    slab = MappedSlab(MIB, huge=False)
    slab.close()
    assert slab.close().asked == 0
    with pytest.raises(MemoryFull, match="given back"):
        slab.view(0, 10)


def test_capabilities_match_the_kernel():
    found = MappedBackend().capabilities()
    assert set(found) == {*ADVICE, "mincore", "mlock"}
    assert found["normal"]
    assert found["random"]
    assert found["willneed"]
    assert found["dontneed"]
    assert found["mincore"]
    slab = MappedSlab(4 * PAGE, huge=False)
    for advice in ADVICE:
        assert slab.advise(advice, 0, 4 * PAGE) == found[advice]


def test_locked_pages_are_given_back_too():
    slab = MappedSlab(4 * PAGE, huge=False)
    slab.populate(0, 4 * PAGE)
    assert slab.lock(0, 4 * PAGE) == MappedBackend().capabilities()["mlock"]
    returned = slab.close()
    assert returned.asked == returned.measured == 4 * PAGE


def test_foreign_locked_pages_count_as_not_returned():
    slab = MappedSlab(4 * PAGE, huge=False)
    slab.populate(0, 4 * PAGE)
    tensor = slab.view(0, 4 * PAGE).tensor
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4 * PAGE)) == 0
    returned = slab.close()
    assert (returned.asked, returned.measured) == (4 * PAGE, 0)


def test_more_than_the_address_space_is_refused():
    with pytest.raises(MemoryFull, match="refused to map"):
        MappedBackend().open(1 << 60, whole=True)


def test_read_write_and_checksum():
    slab = MappedSlab(MIB, huge=False)
    slab.write(1000, b"guard")
    assert slab.read(998, 9) == b"\0\0guard\0\0"
    before = slab.checksum(0, MIB)
    assert slab.checksum(0, MIB) == before
    slab.write(MIB - 1, b"\1")
    assert slab.checksum(0, MIB) != before
    assert slab.checksum(0, MIB - 1) == slab.checksum(0, MIB - 1)
