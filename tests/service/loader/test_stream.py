"""Streaming: the bytes are the library's, in any layout; a file that changes, ends or fails is refused; nothing outlives a stop."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.core import Progress
from onedesk.service.errors import Cancelled, FileError
from onedesk.service.loader import stream
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.header import DTYPE_BITS, TensorInfo, read_header
from onedesk.service.loader.stream import stream_tensors, torch_dtype
from raw_safetensors import write_tensors
from safetensors.torch import load_file, save_file

CHUNK = 4096
LONG_AGO = (1_000_000_000, 1_000_000_000)  # a change in the same tick as the file's making would not show in its time


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks from a small file."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def weights(tmp_path: Path, small_chunks: None) -> Path:
    """25 chunks in one file of three tensors, last changed long ago."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(5000), "b": torch.randn(100, 100).bfloat16(), "c": torch.arange(15000)}, path)
    os.utime(path, LONG_AGO)
    return path


def empty_jobs(path: Path) -> list[tuple[TensorInfo, torch.Tensor]]:
    """A destination of its own for each tensor of a file, filled with what no tensor is meant to keep."""
    return [(info, torch.full((info.nbytes,), 0xA5, dtype=torch.uint8)) for info in read_header(path).tensors.values()]


def assert_same(jobs: Sequence[tuple[TensorInfo, torch.Tensor]], path: Path) -> None:
    content = path.read_bytes()
    for info, target in jobs:
        assert target.reshape(-1).view(torch.uint8).numpy().tobytes() == content[info.start : info.start + info.nbytes], info.name


def assert_no_reader_left() -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("onedesk-read")] == []


def intercept(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], Any]) -> list[int]:
    """Call `act` before the read number `at` (from 0); the offsets of all reads come back."""
    offsets: list[int] = []
    real, count = os.preadv, itertools.count()

    def preadv(fd: int, views: Any, offset: int) -> int:
        offsets.append(offset)
        if next(count) == at:
            act()
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets


def test_every_dtype_has_the_librarys_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw = torch.randint(0, 256, (3, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    tensors = {name: raw.clone().view(dtype) for name, dtype in stream.TORCH_DTYPES.items() if name != "BOOL"}
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
        assert torch.equal(target.reshape(-1).view(torch.uint8), wanted[info.name].reshape(-1).view(torch.uint8)), info.name


def test_dtypes_that_torch_lacks_are_read_as_bytes(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": ("F6_E3M2", [4], b"abc")})
    target = torch.empty(3, dtype=torch_dtype("F6_E3M2"))
    stream_tensors([(read_header(path).tensors["w"], target)])
    assert target.numpy().tobytes() == b"abc"


@pytest.mark.usefixtures("small_chunks")
def test_shards_are_read_into_slices_of_merged_tensors(tmp_path: Path) -> None:
    """q, k and v lie in different shards, and together in one tensor of the model."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    parts = {"q": torch.randn(64, 40).bfloat16(), "k": torch.randn(16, 40).bfloat16(), "v": torch.randn(16, 40).bfloat16()}
    shards = {"q": "model-00002-of-00002.safetensors", "k": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
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
    sizes=st.lists(st.sampled_from([0, 1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]) | st.integers(0, 3 * CHUNK), min_size=1, max_size=8),
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
    """Also with some tensors left out or read twice, in the jobs' own order, and through the bounce buffer that other devices get."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(stream, "PIECES_LIMIT", pieces)
    monkeypatch.setattr(stream, "DIRECT_DEVICES", ("cpu",) if direct else ())
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
def test_readers_follow_the_cores(weights: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, readers: int) -> None:
    """Counted: each waits for the others before its first read."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    meet, met, real = threading.Barrier(readers, timeout=10), threading.local(), os.preadv
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
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][: max(1, len(views[0]) // 3)]], offset))
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


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_cancel_ends_the_readers(weights: Path, monkeypatch: pytest.MonkeyPatch, readers: int) -> None:
    """Asked at every chunk: once it says yes, each reader ends with the chunk that it has in hand."""
    jobs = empty_jobs(weights)
    asked: list[int] = []
    allowed = threading.Semaphore(3)
    real = os.preadv
    offsets: list[int] = []

    def gated(fd: int, views: Any, offset: int) -> int:
        allowed.acquire(timeout=1)
        offsets.append(offset)
        return real(fd, views, offset)

    def cancel() -> bool:
        asked.append(len(offsets))
        if len(offsets) < 3:
            return False
        for _ in range(readers):
            allowed.release()
        return True

    monkeypatch.setattr(os, "preadv", gated)
    with pytest.raises(Cancelled, match=r"loading was stopped after \d+ of 160000 bytes"):
        stream_tensors(jobs, cancel=cancel, readers=readers)
    assert len(offsets) <= 3 + readers
    assert_no_reader_left()


def test_cancel_before_the_start_reads_nothing(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = intercept(monkeypatch, -1, lambda: None)
    with pytest.raises(Cancelled, match="before the first of 160000 bytes"):
        stream_tensors(empty_jobs(weights), cancel=lambda: True)
    assert offsets == []


def test_an_error_in_the_callers_report_ends_the_readers(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PROGRESS_SECONDS", 0)

    def interrupted(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_tensors(empty_jobs(weights), progress=interrupted)
    assert_no_reader_left()


def test_a_file_that_is_truncated_while_it_is_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = empty_jobs(weights)
    size = weights.stat().st_size
    intercept(monkeypatch, 4, lambda: os.truncate(weights, CHUNK + 100))
    with pytest.raises(FileError) as caught:
        stream_tensors(jobs, readers=1)
    message = str(caught.value)
    assert f"model.safetensors ends at byte {4 * CHUNK} while bytes up to {5 * CHUNK} were read; it had {size} bytes" in message
    assert str(weights.parent) not in message
    assert_no_reader_left()


def test_a_file_that_is_written_to_while_it_is_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same file, same size, other bytes: what was read belongs to neither."""
    jobs = empty_jobs(weights)

    def overwrite() -> None:
        with weights.open("r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(b"otherbytes")

    intercept(monkeypatch, 4, overwrite)
    with pytest.raises(FileError, match=r"model\.safetensors was changed or replaced since its header was read"):
        stream_tensors(jobs)


def test_a_file_that_is_replaced_between_header_and_stream(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is valid, but the old header's offsets would lie about it: not a byte of it is read."""
    jobs = empty_jobs(weights)
    size = weights.stat().st_size
    other = write_tensors(weights.with_name("other"), {"z": ("U8", [size], bytes(size))})
    os.utime(other, LONG_AGO)
    other.replace(weights)
    offsets = intercept(monkeypatch, -1, lambda: None)
    with pytest.raises(FileError, match="was changed or replaced since its header was read"):
        stream_tensors(jobs)
    assert offsets == []
    weights.unlink()
    with pytest.raises(FileError, match=r"model\.safetensors cannot be opened: No such file"):
        stream_tensors(jobs)
    os.mkfifo(weights)
    with pytest.raises(FileError, match=r"model\.safetensors is not a regular file"):
        stream_tensors(jobs)


def test_a_file_that_is_replaced_while_it_is_read_stays_whole(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename over it leaves the open file as it was."""
    content = weights.read_bytes()
    jobs = empty_jobs(weights)
    (weights.parent / "other").write_bytes(b"x" * len(content))
    intercept(monkeypatch, 4, lambda: (weights.parent / "other").replace(weights))
    stream_tensors(jobs)
    (weights.parent / "kept").write_bytes(content)
    assert_same(jobs, weights.parent / "kept")


def test_a_read_error_names_file_and_offset(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_disk() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    intercept(monkeypatch, 3, broken_disk)
    with pytest.raises(FileError, match=rf"model\.safetensors cannot be read at byte {3 * CHUNK} of \d+: Input/output error"):
        stream_tensors(empty_jobs(weights), readers=1)
    assert_no_reader_left()


def test_one_readers_error_stops_the_others(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def broken_disk() -> None:
        failed.set()
        raise OSError(errno.EIO, "broken")

    offsets = intercept(monkeypatch, 2, broken_disk)
    slow = os.preadv

    def wait_for_failure(fd: int, views: Any, offset: int) -> int:
        if offset >= 2 * CHUNK:
            failed.wait(0.2)
        return slow(fd, views, offset)

    monkeypatch.setattr(os, "preadv", wait_for_failure)
    with pytest.raises(FileError, match="broken"):
        stream_tensors(empty_jobs(weights), readers=2)
    assert len(offsets) < 10
    assert_no_reader_left()


def test_pages_are_dropped_behind(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the advice given: what is resident afterwards is the file system's own affair."""
    dropped: list[tuple[int, int]] = []
    real = os.posix_fadvise

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, offset + length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    stream_tensors(empty_jobs(weights), drop_behind=False)
    assert dropped == []
    jobs = empty_jobs(weights)
    stream_tensors(jobs, readers=1)
    assert_same(jobs, weights)
    assert all(begin % stream.PAGE == 0 for begin, _ in dropped)
    chunks = dropped[:-1]
    assert [begin for begin, _ in chunks] == list(range(0, weights.stat().st_size, CHUNK))
    assert dropped[-1] == (0, weights.stat().st_size)  # once more as a whole: a page may have been in use or not yet written to the disk


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
        save_file({f"w{i}": torch.ones(256, 512).bfloat16() for i in range(4 * rows)}, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    size, peak = map(int, done.stdout.split())
    assert size == 96 << 20
    assert size * 0.9 < peak <= size * 1.1
