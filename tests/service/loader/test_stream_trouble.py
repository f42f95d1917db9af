"""Streaming in trouble: a stop, an error or a file that changes ends it with the right words, and no reader outlives
it.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from onedesk.service.core import Progress
from onedesk.service.errors import Cancelled, FileError
from onedesk.service.loader import stream
from onedesk.service.loader.readers import ReadRun
from onedesk.service.loader.stream import stream_tensors
from raw_safetensors import write_tensors
from streaming import CHUNK, LONG_AGO, assert_no_reader_left, assert_same, empty_jobs, intercept


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_cancel_ends_the_readers(weights: Path, monkeypatch: pytest.MonkeyPatch, readers: int) -> None:
    """Asked at every chunk: once it says yes, each reader ends with the chunk that it has in hand."""
    jobs = empty_jobs(weights)
    allowed = threading.Semaphore(3)
    real = os.preadv
    offsets: list[int] = []

    def gated(fd: int, views: Any, offset: int) -> int:
        allowed.acquire(timeout=60)
        offsets.append(offset)
        return real(fd, views, offset)

    class Stop(threading.Event):
        def set(self) -> None:
            super().set()
            allowed.release(readers)

    class Gated(ReadRun):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.stop = Stop()

    monkeypatch.setattr(os, "preadv", gated)
    monkeypatch.setattr(stream, "ReadRun", Gated)
    with pytest.raises(Cancelled, match=r"loading was stopped after \d+ of 160000 bytes"):
        stream_tensors(jobs, cancel=lambda: len(offsets) >= 3, readers=readers)
    assert 3 <= len(offsets) <= 3 + readers
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
    assert (
        f"model.safetensors ends at byte {4 * CHUNK} while bytes up to {5 * CHUNK} were read; it had {size} bytes"
        in message
    )
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
    with pytest.raises(
        FileError, match=rf"model\.safetensors cannot be read at byte {3 * CHUNK} of \d+: Input/output error"
    ):
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
