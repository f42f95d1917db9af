"""Faults of leases, threads, files and disks while a model works: each has its error, nothing leaks, and the handle
works again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from onedesk.service.api import OpenModel, open_model
from onedesk.service.bench.shapes import random_checkpoint
from onedesk.service.core import Request, Result, Sampling
from onedesk.service.errors import FileError
from onedesk.service.kernels.cpu import compile
from onedesk.service.loader.files import open_regular
from onedesk.service.loader.header import TensorInfo
from onedesk.service.loader.stream import stream_tensors
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import LeaseBusyError, LeaseReturnedError, Pool
from onedesk.service.memory.truth import read_truth
from tiny_qwen3 import write_tiny_qwen3

REQUEST = Request(ids=(5, 6, 7), sampling=Sampling(seed=11), max_tokens=8)


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(floor=0, debug=True), lambda: read_truth("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """About 9 MiB: several chunks of a read."""
    return write_tiny_qwen3(tmp_path / "tiny", hidden=128, intermediate=1024, tokenizer=False)


@pytest.fixture
def model(folder: Path, pool: Pool, kernel_cache: Path) -> Iterator[OpenModel]:
    opened = open_model(folder, pool=pool, context=64, device="cpu", load=False, kernel_cache=kernel_cache)
    yield opened
    opened.close()
    assert pool.used() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.fail(
            f"this test needs a small file system and cannot mount one: {made.stderr.strip()}; run it as root",
            pytrace=False,
        )
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def write(model: OpenModel) -> Result:
    return [event.result for event in model.generate(REQUEST) if event.result][-1]


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onedesk-")]


def test_a_lease_is_returned_once(model, pool):
    wanted = write(model).ids
    leases = pool.holders()
    model.give_way()
    for lease in leases:
        with pytest.raises(LeaseReturnedError, match=f"tiny's {lease.kind} lease was returned before"):
            lease.release()
    assert (pool.used(), pool.counters().releases) == (0, len(leases))
    assert write(model).ids == wanted


def test_lease_in_use_cannot_be_returned_by_other_thread(model, pool):
    wanted = write(model).ids
    refused: list[type[Exception]] = []

    def steal() -> None:
        for lease in pool.holders():
            try:
                lease.release()
            except LeaseBusyError as error:
                refused.append(type(error))

    def from_a_thread(work) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    gave: list[object] = []
    result = None
    for event in model.generate(REQUEST):
        if event.token is not None:
            from_a_thread(steal)
            from_a_thread(lambda: gave.append(model.give_way()))
        result = event.result or result
    assert result is not None
    assert result.ids == wanted
    assert refused == [LeaseBusyError] * 3 * len(wanted)
    assert set(gave) == {()}
    pool.verify()


def test_truncated_file_leaks_nothing(model, pool, folder):
    """The reader fails in the middle: the file is truncated after its header was read, with its time restored."""
    file = folder / "model.safetensors"
    whole, before = file.read_bytes(), file.stat()
    wanted = write(model).ids
    model.give_way()
    for cut in (len(whole) // 2, len(whole) - 1):
        os.truncate(file, cut)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(FileError, match=r"model\.safetensors"):
            write(model)
        assert (pool.used(), model.loaded, readers()) == (0, False, [])
    with file.open("r+b") as stream:
        stream.write(whole)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert write(model).ids == wanted
    pool.verify()


def test_reader_failure_in_chunk_is_reported(model, pool, folder):
    """The same size and time, but the bytes are gone when they are read: truncated while the readers run."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    asked: list[int] = []

    def cut() -> bool:
        asked.append(len(asked))
        if len(asked) == 2:  # the first is before the file is opened
            os.truncate(file, 4096)
        return False

    with pytest.raises(FileError, match="was changed"):
        list(model.generate(REQUEST, cancel=cut))
    assert (pool.used(), model.loaded, readers()) == (0, False, [])
    file.write_bytes(whole)


def test_read_error_is_reported_with_offset():
    """The kernel's own EIO: this file has bytes nowhere near its start."""
    path = Path("/proc/self/mem")
    with open_regular(path, "model.safetensors") as (_, source):
        pass
    info = TensorInfo("weight", "U8", (4096,), 0, 4096, source)
    with pytest.raises(FileError, match=r"model\.safetensors cannot be read at byte 0 of 0: Input/output error"):
        stream_tensors([(info, torch.empty(4096, dtype=torch.uint8))])
    assert readers() == []


def test_full_disk_falls_back_to_plain_torch(folder, pool, small_disk, tmp_path, monkeypatch, caplog):
    """One source instead of all, which take ten seconds to fail: the compiler has no disk space for its output."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "large.c").write_text("char room[65536] = {1};\n")
    monkeypatch.setattr(compile, "FOLDER", tmp_path / "sources")
    with caplog.at_level(logging.WARNING):
        opened = open_model(folder, pool=pool, context=64, device="cpu", kernel_cache=small_disk)
    assert opened.kernels.startswith("reference: plain torch")
    assert any("without compiled kernels" in record.getMessage() for record in caplog.records)
    assert write(opened).finish == "length"
    opened.close()
    assert list(small_disk.iterdir()) == []
    assert pool.used() == 0


def test_full_disk_leaves_no_random_checkpoint(small_disk):
    with pytest.raises(FileError, match=r"needs [0-9,]+ bytes and the disk of the cache has [0-9,]+ free"):
        random_checkpoint("qwen3-toy", small_disk)
    assert [path.name for path in (small_disk / "bench").iterdir()] == []


def test_missing_shard_is_refused_until_restored(model, pool, folder):
    wanted = write(model).ids
    model.give_way()
    file = folder / "model.safetensors"
    file.rename(folder / "away")
    with pytest.raises(FileError, match=r"model\.safetensors cannot be opened: No such file"):
        write(model)
    assert (pool.used(), readers()) == (0, [])
    (folder / "away").rename(file)
    assert write(model).ids == wanted
