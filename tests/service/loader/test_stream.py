"""Streaming: the bytes are the library's in any layout, reported and dropped behind as they come, at the price of
the checkpoint.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.core import Progress
from onedesk.service.loader import chunks, stream
from onedesk.service.loader import readers as readers_module
from onedesk.service.loader.bounce import host_buffer
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.dtypes import TORCH_DTYPES, torch_dtype
from onedesk.service.loader.header import DTYPE_BITS, read_header
from onedesk.service.loader.stream import stream_tensors
from raw_safetensors import write_tensors
from safetensors.torch import load_file, save_file
from streaming import CHUNK, assert_same, empty_jobs, intercept


def test_every_dtype_has_the_librarys_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw = torch.randint(0, 256, (3, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    tensors = {name: raw.clone().view(dtype) for name, dtype in TORCH_DTYPES.items() if name != "BOOL"}
    tensors |= {"BOOL": raw > 127, "scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    assert set(DTYPE_BITS) - set(tensors) == {"F6_E2M3", "F6_E3M2"}  # torch has no 6-bit floats
    save_file(tensors, path)
    wanted = load_file(path)
    jobs = [(info, torch.empty_like(wanted[name])) for name, info in read_header(path).tensors.items()]
    assert all(target.dtype == torch_dtype(info.dtype) for info, target in jobs)
    stats = stream_tensors(jobs)
    assert stats.bytes == sum(info.nbytes for info, _ in jobs)
    for info, target in jobs:
        assert target.shape == wanted[info.name].shape
        assert torch.equal(target.reshape(-1).view(torch.uint8), wanted[info.name].reshape(-1).view(torch.uint8)), (
            info.name
        )


def test_dtypes_that_torch_lacks_are_read_as_bytes(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("F6_E3M2", [4], b"abc")})
    target = torch.empty(3, dtype=torch_dtype("F6_E3M2"))
    stream_tensors([(read_header(path).tensors["w"], target)])
    assert target.numpy().tobytes() == b"abc"


@pytest.mark.usefixtures("small_chunks")
def test_shards_are_read_into_slices_of_merged_tensors(tmp_path: Path) -> None:
    """q, k and v lie in different shards, and together in one tensor of the model."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    parts = {
        "q": torch.randn(64, 40).bfloat16(),
        "k": torch.randn(16, 40).bfloat16(),
        "v": torch.randn(16, 40).bfloat16(),
    }
    shards = {
        "q": "model-00002-of-00002.safetensors",
        "k": "model-00001-of-00002.safetensors",
        "v": "model-00002-of-00002.safetensors",
    }
    for file in set(shards.values()):
        save_file({name: part for name, part in parts.items() if shards[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    found = open_checkpoint(tmp_path).tensors
    merged = torch.zeros(96, 40, dtype=torch.bfloat16)
    stream_tensors([(found["q"], merged[:64]), (found["k"], merged[64:80]), (found["v"], merged[80:])])
    assert torch.equal(merged, torch.cat(list(parts.values())))


FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FOLDER
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]) | st.integers(0, 3 * CHUNK),
        min_size=1,
        max_size=8,
    ),
    chosen=st.data(),
    chunk=st.sampled_from([CHUNK, 5000]),
    pieces=st.sampled_from([1, 2, 1024]),
    readers=st.integers(1, 4),
    direct=st.booleans(),
    drop=st.booleans(),
    told=st.booleans(),
)
def test_any_layout_and_order_has_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    chosen: st.DataObject,
    chunk: int,
    pieces: int,
    readers: int,
    direct: bool,
    drop: bool,
    told: bool,
) -> None:
    """Also with some tensors left out or read twice, in the jobs' own order, and through the bounce buffer that
    other devices get.
    """
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(chunks, "PIECES_LIMIT", pieces)
    monkeypatch.setattr(readers_module, "DIRECT_DEVICES", ("cpu",) if direct else ())
    path = write_tensors(tmp_path / "m.safetensors", {f"t{i}": ("U8", [n], os.urandom(n)) for i, n in enumerate(sizes)})
    jobs = empty_jobs(path) + empty_jobs(path)
    jobs = chosen.draw(st.permutations(jobs))[: chosen.draw(st.integers(0, len(jobs)))]
    arrived: list[int] = []
    stats = stream_tensors(jobs, readers=readers, drop_behind=drop, arrived=arrived.append if told else None)
    assert stats.bytes == sum(info.nbytes for info, _ in jobs)
    assert sorted(arrived) == (list(range(len(jobs))) if told else [])
    assert_same(jobs, path)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (torch.empty(5, 4), "has 80 bytes, the file has 48"),
        (torch.empty(3, 4, dtype=torch.int32), "is torch.int32, the file has F32; nothing is converted"),
        (torch.empty(6, 4, dtype=torch.bfloat16), "is torch.bfloat16, the file has F32"),
        (torch.empty(4, 3).t(), r"is not contiguous \(shape \(3, 4\), strides \(1, 3\)\)"),
        (torch.empty(3, 8)[:, :4], "is not contiguous"),
    ],
)
def test_a_destination_that_does_not_fit_is_refused(tmp_path: Path, target: torch.Tensor, wanted: str) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.randn(3, 4)}, path)
    with pytest.raises(ValueError, match=f"the destination of 'w' {wanted}"):
        stream_tensors([(read_header(path).tensors["w"], target)])


@pytest.mark.parametrize(("cores", "readers"), [(None, 2), (1, 2), (4, 2), (6, 3), (20, 4)])
def test_readers_follow_the_cores(
    weights: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, readers: int
) -> None:
    """Counted: each waits for the others before its first read."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    meet, met, real = threading.Barrier(readers, timeout=60), threading.local(), os.preadv
    names: set[str] = set()

    def preadv(fd: int, views: Any, offset: int) -> int:
        if not getattr(met, "once", False):
            meet.wait()
            met.once = True
        names.add(threading.current_thread().name)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    jobs = empty_jobs(weights)
    stream_tensors(jobs)
    assert len(names) == readers
    assert_same(jobs, weights)


def test_nothing_to_read_is_no_error() -> None:
    told: list[Progress] = []
    assert stream_tensors([], progress=told.append).bytes == 0
    assert told == [Progress("load", 0, 0)]


def test_parameters_and_inference_tensors_are_filled(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    wanted = torch.randn(3, 4)
    save_file({"w": wanted}, path)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    with torch.inference_mode():
        made = torch.zeros(3, 4)
    for target in (parameter, made):
        stream_tensors([(read_header(path).tensors["w"], target)])
        assert torch.equal(target, wanted)


def test_the_file_is_read_once_and_in_order(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = empty_jobs(weights)
    offsets = intercept(monkeypatch, -1, lambda: None)
    stream_tensors(list(reversed(jobs)), readers=1)
    assert offsets == sorted(set(offsets))
    first = min(info.start for info, _ in jobs)
    # Chunks end at multiples of the chunk size in the file, so that dropped pages are whole and never read twice.
    assert offsets == [first, *range(CHUNK, weights.stat().st_size, CHUNK)]


def test_reads_that_come_in_pieces_are_continued(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: real(fd, [views[0][: max(1, len(views[0]) // 3)]], offset)
    )
    jobs = empty_jobs(weights)
    stream_tensors(jobs)
    assert_same(jobs, weights)


@pytest.mark.parametrize("readers", [1, 3])
def test_arrivals_are_told_once_and_complete(weights: Path, readers: int) -> None:
    """In the order of the jobs with one reader; when a job is told, its bytes are there, on the calling thread."""
    tensors = read_header(weights).tensors
    order = ["c", "a", "b", "a"]
    jobs = [(tensors[name], torch.full((tensors[name].nbytes,), 0xA5, dtype=torch.uint8)) for name in order]
    told: list[int] = []

    def arrived(job: int) -> None:
        assert_same([jobs[job]], weights)
        assert not threading.current_thread().name.startswith("onedesk-read")
        told.append(job)

    stream_tensors(jobs, arrived=arrived, readers=readers)
    assert sorted(told) == [0, 1, 2, 3]
    assert readers > 1 or told == [0, 1, 2, 3]


def test_a_tensor_of_no_bytes_arrives_too(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"none": ("F32", [0, 4], b""), "w": ("U8", [1], b"a")})
    told: list[int] = []
    stream_tensors(empty_jobs(path), arrived=told.append)
    assert sorted(told) == [0, 1]
    told.clear()
    stream_tensors(empty_jobs(path)[:1], arrived=told.append)
    assert told == [0]


def test_progress_is_reported_at_the_end_and_not_too_often(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def slow(fd: int, views: Any, offset: int) -> int:
        time.sleep(0.02)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    told: list[tuple[Progress, str]] = []
    jobs = empty_jobs(weights)
    stats = stream_tensors(jobs, progress=lambda p: told.append((p, threading.current_thread().name)))
    done = [progress.done for progress, _ in told]
    assert done == sorted(set(done))
    assert told[-1][0] == Progress("load", stats.bytes, stats.bytes)
    assert {thread for _, thread in told} == {threading.current_thread().name}
    assert 2 <= len(told) <= stats.seconds / stream.PROGRESS_SECONDS + 1


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(begin, end) of each part of a file that is dropped from the page cache from now on."""
    parts: list[tuple[int, int]] = []
    real = os.posix_fadvise

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            parts.append((offset, offset + length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    return parts


def sync(path: Path) -> None:
    """Write the file's pages to the disk: before that they cannot be dropped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def test_pages_are_dropped_behind(weights: Path, dropped: list[tuple[int, int]]) -> None:
    """Counted by the advice given: what is resident afterwards is the file system's own affair."""
    sync(weights)
    stream_tensors(empty_jobs(weights), drop_behind=False)
    assert dropped == []
    jobs = empty_jobs(weights)
    stream_tensors(jobs, readers=1)
    assert_same(jobs, weights)
    assert all(begin % readers_module.PAGE == 0 for begin, _ in dropped)
    assert [begin for begin, _ in dropped[:-1]] == list(range(0, weights.stat().st_size, CHUNK))
    assert dropped[-1] == (0, weights.stat().st_size)  # once more as a whole: a page may have been in use


def test_pages_stay_until_memory_is_short(
    weights: Path, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(weights)
    monkeypatch.setattr(readers_module, "ASK_SECONDS", 0.0)
    size, asked = sum(info.nbytes for info, _ in empty_jobs(weights)), list[int]()

    def short(unread: int) -> bool:
        asked.append(unread)
        return unread < size // 2

    stream_tensors(empty_jobs(weights), drop_behind=lambda unread: bool(asked.append(unread)), readers=1)
    assert dropped == []
    assert asked[0] == size
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] == 0
    asked.clear()
    jobs = empty_jobs(weights)
    stream_tensors(jobs, drop_behind=short, readers=1)
    assert_same(jobs, weights)
    assert asked[-2] >= size // 2 > asked[-1] > 0  # never asked again
    assert dropped[0] == (0, 0)  # to the end of the file: all that was cached until then
    assert [begin for begin, _ in dropped[1:-1]] == list(range(dropped[1][0], weights.stat().st_size, CHUNK))
    assert dropped[-1] == (0, weights.stat().st_size)
    dropped.clear()
    stream_tensors(jobs, drop_behind=lambda _: True, readers=1)
    assert [begin for begin, _ in dropped[:-1]] == list(range(0, weights.stat().st_size, CHUNK))


def test_a_host_without_pinned_memory_reads_through_ordinary_buffers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.empty

    def refuse(*shape: int, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        return real(*shape, **rest)

    monkeypatch.setattr(torch, "empty", refuse)
    assert host_buffer(4096, pinned=True).nbytes == 4096
    assert "copies are slower: CUDA error: out of memory" in caplog.text


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """5 whole chunks and their ends, written to the disk."""
    path = tmp_path / "large.safetensors"
    save_file({"w": torch.arange(5 * chunks.CHUNK_BYTES // 8)}, path)
    sync(path)
    return path


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Every page of the file in this process's own tables, as in those of another one that runs the model from its
    file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as memory:
        assert sum(memory[at] for at in range(0, len(memory), readers_module.PAGE)) > 0
        yield


def pieces(path: Path) -> int:
    """How many chunks a file's one tensor is read in."""
    return -(-path.stat().st_size // chunks.CHUNK_BYTES)


def test_a_file_that_another_process_maps_is_soon_let_be(large: Path, dropped: list[tuple[int, int]]) -> None:
    jobs = empty_jobs(large)
    stream_tensors(jobs, readers=1)
    assert len(dropped) == pieces(large) + 1
    dropped.clear()
    with mapped(large):
        stream_tensors(jobs, readers=1)
    assert_same(jobs, large)
    # The first chunk is cut short by the header, so the second is the first that can tell; the last is the whole file,
    # at the end.
    assert [begin // chunks.CHUNK_BYTES for begin, _ in dropped] == [
        0,
        *range(1, 1 + readers_module.LOOKS_TO_BELIEVE),
        0,
    ]


def test_of_two_files_the_one_that_nobody_maps_is_still_dropped(
    large: Path, tmp_path: Path, dropped: list[tuple[int, int]]
) -> None:
    other = Path(shutil.copy(large, tmp_path / "other.safetensors"))
    sync(other)
    with mapped(large):
        stream_tensors(empty_jobs(large) + empty_jobs(other), readers=1)
    assert len(dropped) == 1 + readers_module.LOOKS_TO_BELIEVE + 1 + pieces(other) + 1


def test_dropping_ends_when_another_process_maps_the_file(
    large: Path, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True, True])
    monkeypatch.setattr(readers_module, "cached", lambda source, offset: next(answers))
    monkeypatch.setattr(readers_module, "LOOK_EVERY", 2)
    monkeypatch.setattr(readers_module, "LOOKS_TO_BELIEVE", 2)
    stream_tensors(empty_jobs(large), readers=1)
    assert (
        len(dropped) == 1 + 2 + 2 + 1
    )  # the cut one, two until the second look, the two that stay, the file at the end


def test_a_briefly_pinned_page_does_not_end_dropping(
    large: Path, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, True, False])
    monkeypatch.setattr(readers_module, "cached", lambda source, offset: next(answers))
    stream_tensors(empty_jobs(large), readers=1)
    assert len(dropped) == pieces(large) + 1


def test_without_cache_information_everything_is_dropped(
    large: Path, dropped: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "_NOWAIT", None)
    with mapped(large):
        stream_tensors(empty_jobs(large), readers=1)
    assert len(dropped) == pieces(large) + 1


MEASURE = """
import re, sys, mmap
from pathlib import Path
import torch
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.stream import stream_tensors

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large = (open_checkpoint(Path(arg)) for arg in sys.argv[1:])
def load(found):
    memory = mmap.mmap(-1, found.weight_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat, at, jobs = torch.frombuffer(memory, dtype=torch.uint8), 0, []
    for info in found.tensors.values():
        jobs.append((info, flat[at : at + info.nbytes]))
        at += info.nbytes
    stream_tensors(jobs)
    return flat
load(small)  # threads and buffers that come with the first use
before = status("VmRSS")
kept = load(large)
print(large.weight_bytes, status("VmHWM") - before)
"""


def test_the_peak_is_the_checkpoint(tmp_path: Path) -> None:
    """Measured in a process of its own: reading adds at most a tenth to the destination."""
    for name, rows in (("small", 1), ("large", 96)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
        save_file(
            {f"w{i}": torch.ones(256, 512).bfloat16() for i in range(4 * rows)}, tmp_path / name / "model.safetensors"
        )
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    size, peak = map(int, done.stdout.split())
    assert size == 96 << 20
    assert size * 0.9 < peak <= size * 1.1
