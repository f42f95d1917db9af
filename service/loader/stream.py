"""Reads tensors from checkpoint files straight into existing memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

import torch

from ..core import CancelCheck, Progress, ProgressReport
from ..errors import Cancelled
from .bounce import StagingBuffer
from .chunks import Chunk, Job, plan_chunks
from .files import SourceFile
from .readers import (
    DropBehind,
    ReadRun,
    check_unchanged,
    default_readers,
    drop,
    opened,
    thread_faults,
)

PROGRESS_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Bytes read, seconds taken, and the page faults of the reader threads."""

    bytes: int
    seconds: float
    major_faults: int = 0
    minor_faults: int = 0


def stream_tensors(
    jobs: Sequence[Job],
    *,
    stage: Literal["load"] = "load",
    progress: ProgressReport | None = None,
    cancel: CancelCheck | None = None,
    drop_behind: DropBehind = True,
    readers: int | None = None,
    arrived: Callable[[int], None] | None = None,
    staging: Sequence[StagingBuffer] = (),
) -> StreamStats:
    """Fill each destination with its tensor's bytes, or pass it its rows, and wait until all have arrived.

    The files are read front to back. With `arrived` they are read in the order of the jobs instead, and it is called
    with a job's index as soon as the job's bytes have arrived or were taken.

    A destination is contiguous, has the tensor's number of bytes, and has its dtype, or uint8 for the raw bytes;
    nothing is converted. Or it is a ChunkIntake: then each reader uses one of `staging`, whose raw buffers hold the
    largest chunk (chunks.intake_bytes). CPU memory is read into directly; another device gets its bytes through two
    bounce buffers per reader, one of which is filled while the other is copied. With `drop_behind` the file's pages
    leave the page cache once they are copied; if it is a function, it is asked with the bytes still to be read, at the
    start and while reading, until it says true. The default of `readers` is default_readers, or one per staging buffer
    if there are any.

    `progress`, `cancel` and `arrived` are called on the calling thread.

    Raises Cancelled when `cancel()` returns true (the destinations are then partly filled), FileError when a file is
    gone, has changed since its header was read, ends early or is unreadable, ValueError for a destination that does not
    fit, and the errors of an intake.
    """
    started, own = time.perf_counter(), thread_faults()
    chunks = plan_chunks(jobs, in_file_order=arrived is None)
    total = sum(chunk.nbytes for chunk in chunks)
    if cancel is not None and cancel():
        raise Cancelled(f"loading was stopped before the first of {total} bytes was read")
    devices = {chunk.device for chunk in chunks}
    for device in (device for device in devices if device.type == "cuda"):
        torch.cuda.current_stream(device).synchronize()  # queued work may still use the destinations
    with ExitStack() as closing:
        files = {
            source: closing.enter_context(opened(source)) for source in dict.fromkeys(chunk.source for chunk in chunks)
        }
        run = ReadRun(chunks, files, drop_behind)
        count = max(1, min(len(staging) or readers or default_readers(devices), len(chunks)))
        with ThreadPoolExecutor(count, thread_name_prefix="onedesk-read") as pool:
            try:
                futures = [pool.submit(run.read_all, staging[i] if staging else None) for i in range(count)]
                arrivals = _Arrivals(jobs, chunks, arrived) if arrived else None
                _watch(run.done, count, Progress(stage, 0, total), progress, cancel, arrivals)
            finally:
                run.stop.set()
        for future in futures:
            future.result()
        for source, fd in files.items():
            check_unchanged(source, fd)
            if run.drops:
                drop(fd, *_span(chunks, source))
    if progress is not None:
        progress(Progress(stage, total, total))
    major, minor = (now - before for now, before in zip(thread_faults(), own, strict=True))
    return StreamStats(total, time.perf_counter() - started, major + run.faults[0], minor + run.faults[1])


def _span(chunks: Sequence[Chunk], source: SourceFile) -> tuple[int, int]:
    """Offset and length of the part of a file that was read."""
    mine = [chunk for chunk in chunks if chunk.source == source]
    start, end = min(chunk.offset for chunk in mine), max(chunk.offset + chunk.nbytes for chunk in mine)
    return start, end - start


class _Arrivals:
    """Reports which jobs are complete while chunks arrive in any order."""

    def __init__(self, jobs: Sequence[Job], chunks: Sequence[Chunk], arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._missing = [0] * len(jobs)
        for chunk in chunks:
            for job in chunk.jobs:
                self._missing[job] += 1
        for job, parts in enumerate(self._missing):
            if parts == 0:  # a tensor of no bytes
                arrived(job)

    def take(self, chunk: Chunk) -> None:
        for job in chunk.jobs:
            self._missing[job] -= 1
            if self._missing[job] == 0:
                self._arrived(job)


def _watch(
    done: queue.SimpleQueue[Chunk | None],
    readers: int,
    start: Progress,
    progress: ProgressReport | None,
    cancel: CancelCheck | None,
    arrivals: _Arrivals | None,
) -> None:
    """Follow the readers until all have ended: report at most every PROGRESS_SECONDS, check for cancellation at every
    chunk.
    """
    got, reported = 0, time.monotonic()
    while readers:
        with suppress(queue.Empty):
            chunk = done.get(timeout=PROGRESS_SECONDS)
            if chunk is None:
                readers -= 1
            else:
                got += chunk.nbytes
                if arrivals is not None:
                    arrivals.take(chunk)
        if cancel is not None and cancel():
            raise Cancelled(f"loading was stopped after {got} of {start.total} bytes")
        if progress is not None and got < start.total and time.monotonic() - reported >= PROGRESS_SECONDS:
            progress(Progress(start.stage, got, start.total))
            reported = time.monotonic()
