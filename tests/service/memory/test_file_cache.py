"""Checkpoint pages in the page cache: kept while memory has room, dropped before a model gives way, never a fault."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from onedesk.service.api import open_model
from onedesk.service.bench.page_cache import read_whole
from onedesk.service.core import Request, Sampling
from onedesk.service.errors import FileError, OnedeskError
from onedesk.service.memory import file_cache as file_cache_module
from onedesk.service.memory import pool as pool_module
from onedesk.service.memory.backends.mapped import MappedBackend
from onedesk.service.memory.budget import GIB, MIB, MemorySettings
from onedesk.service.memory.file_cache import FileCache, cached_bytes
from onedesk.service.memory.lease import Released
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import Truth
from tiny_qwen3 import write_tiny_qwen3

HOST = Truth(64 * GIB, 20 * GIB, None, False, 0, 20 * GIB, None, 20 * GIB, 0, None, "MemAvailable")
DISCRETE = replace(HOST, available=3 * GIB, device_free=3 * GIB, host_available=20 * GIB, rule="device")
INTEGRATED = replace(HOST, device_free=GIB, integrated=True)
SETTINGS = MemorySettings(floor=GIB, initial_slab=4 * MIB)


def pool_of(device: str, truth: Truth, **settings: object) -> Pool:
    """A pool on a machine of these figures."""
    return Pool(device, replace(SETTINGS, **settings), lambda: truth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "truth", "room"),
    [("cpu", HOST, 19 * GIB), ("cuda", DISCRETE, 19 * GIB), ("cuda", INTEGRATED, 19 * GIB)],
)
def test_pages_stay_while_host_memory_above_the_floor_can_hold_them(device, truth, room):
    """A discrete GPU with 3 GiB free keeps a file of 19 GiB in host memory."""
    files = pool_of(device, truth).files
    assert not files.lacks_room(room)
    assert files.lacks_room(room + 1)


def test_leased_and_untouched_memory_has_no_room_for_pages():
    pool = pool_of("cpu", HOST)
    lease = pool.lease("a", "weights", 5 * GIB)
    assert not pool.files.lacks_room(14 * GIB)
    assert pool.files.lacks_room(14 * GIB + 1)
    lease.release()
    assert not pool.files.lacks_room(19 * GIB)


def test_pages_are_dropped_if_memory_cannot_be_read():
    def broken() -> int:
        raise FileError("meminfo is not there")

    assert FileCache(broken).lacks_room(1)


@pytest.fixture
def cached_files(tmp_path: Path) -> list[Path]:
    """Three files of 4 MiB, written to the disk and cached."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(os.urandom(4 * MIB))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    read_whole(paths)
    return paths


def read(files: FileCache, *paths: Path) -> None:
    with files.reading(paths):
        pass


def test_the_least_recently_read_file_is_dropped_first(cached_files):
    files = FileCache(lambda: 0)
    a, b, c = cached_files
    read(files, a, b, c)
    read(files, a)
    assert files.cached() == 12 * MIB
    assert files.drop(1) == 4 * MIB
    assert [cached_bytes(path) for path in (a, b, c)] == [4 * MIB, 0, 4 * MIB]
    assert files.drop(5 * MIB) == 8 * MIB
    assert files.drop(1) == files.cached() == 0


def test_a_file_that_is_being_read_stays(cached_files):
    files = FileCache(lambda: 0)
    a, b, _ = cached_files
    read(files, b)
    with files.reading([a]), files.reading([a]):
        assert files.drop(GIB) == 4 * MIB
        assert (cached_bytes(a), cached_bytes(b)) == (4 * MIB, 0)
    assert files.drop(GIB) == 4 * MIB


def test_files_that_vanish_or_shrink_are_no_fault(cached_files, monkeypatch):
    """Truncated while its pages are mapped for counting: no page is touched, so no signal ends the process."""
    files = FileCache(lambda: 0)
    a, b, c = cached_files
    read(files, a, b, c)
    a.unlink()
    b.write_bytes(b"")
    real = file_cache_module.resident_bytes

    def truncate_first(address: int, nbytes: int) -> int:
        os.truncate(c, 0)
        return real(address, nbytes)

    monkeypatch.setattr(file_cache_module, "resident_bytes", truncate_first)
    assert files.cached() == 0
    assert files.drop(GIB) == 0


def test_cached_files_go_before_models_give_way(cached_files):
    machine, gone = [HOST], []
    pool = Pool("cpu", replace(SETTINGS, limit=0.9), lambda: machine[-1])
    lease = pool.lease("writer", "weights", 40 * MIB)

    def give_way() -> list[Released]:
        gone.append(pool.files.cached())
        return [lease.release()]

    lease.offer(give_way)
    read(pool.files, *cached_files)
    short = HOST.available - SETTINGS.floor - 40 * MIB
    pool.lease("budget", "kv", short // 2).release()
    assert pool.files.cached() == 12 * MIB  # there was memory for it
    machine.append(replace(HOST, available=GIB + 60 * MIB, host_available=GIB + 60 * MIB))
    new = pool.lease("new", "kv", 50 * MIB)
    assert gone == [0]
    new.release()


def test_a_discrete_gpus_files_stay_when_the_device_is_short(cached_files, monkeypatch):
    monkeypatch.setattr(pool_module, "choose_backend", lambda *_, **__: DeviceBackend())
    pool = pool_of("cuda", DISCRETE)
    read(pool.files, *cached_files)
    with pytest.raises(OnedeskError):
        pool.lease("a", "weights", 4 * GIB)
    assert pool.files.cached() == 12 * MIB


class DeviceBackend(MappedBackend):
    """Host memory that is taken at once, as a device's."""

    commits = True
    page = 0


@pytest.mark.parametrize(("free", "left"), [(GIB, 12 * MIB), (9 * MIB, 8 * MIB), (0, 4 * MIB)])
def test_an_integrated_gpu_gets_free_pages_for_its_blocks(cached_files, monkeypatch, free, left):
    monkeypatch.setattr(pool_module, "choose_backend", lambda *_, **__: DeviceBackend())
    pool = pool_of("cuda", replace(INTEGRATED, mem_free=free))
    read(pool.files, *cached_files)
    lease = pool.lease("a", "kv", 10 * MIB if free else 8 * MIB)
    assert pool.files.cached() == left
    lease.release()


def test_a_file_replaced_between_give_way_and_wake_is_named(
    tmp_path: Path, make_pool: Callable[..., Pool], kernel_cache: Path
):
    """Never old and new weights together: the wake is refused, and opened again the model has the new ones."""
    folder = write_tiny_qwen3(tmp_path / "tiny", tokenizer=False)
    other = write_tiny_qwen3(tmp_path / "other", tokenizer=False, seed=9)
    pool = make_pool()
    request = Request(ids=tuple(range(1, 9)), sampling=Sampling(temperature=0.0), max_tokens=12)

    def text(path: Path) -> tuple[int, ...]:
        model = open_model(path, pool=pool, context=64, device="cpu", kernel_cache=kernel_cache)
        ids = [event.result for event in model.generate(request) if event.result][-1].ids
        model.close()
        return ids

    model = open_model(folder, pool=pool, context=64, device="cpu", kernel_cache=kernel_cache)
    list(model.generate(request))
    model.give_way()
    shutil.copyfile(other / "model.safetensors", folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    with pytest.raises(FileError, match=r"model\.safetensors was changed or replaced since its header was read"):
        list(model.generate(request))
    assert pool.used() == 0
    model.close()
    assert text(folder) == text(other)


def test_a_file_truncated_while_its_model_is_away_is_named(
    tmp_path: Path, make_pool: Callable[..., Pool], kernel_cache: Path
):
    """Its pages are cached and recorded by the pool then."""
    folder = write_tiny_qwen3(tmp_path / "tiny", tokenizer=False)
    pool = make_pool()
    model = open_model(folder, pool=pool, context=64, device="cpu", kernel_cache=kernel_cache)
    model.give_way()
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    with pytest.raises(FileError, match=rf"it had {size} bytes, now {size // 2}"):
        list(model.generate(Request(ids=(1, 2), max_tokens=2)))
    assert pool.used() == 0
    assert pool.files.cached() <= size // 2 + 4096
    model.close()
