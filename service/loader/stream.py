"""Reading tensors from checkpoint files straight into memory that is already there."""

from __future__ import annotations

import logging
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from ..core import CancelCheck, Progress, ProgressReport
from ..errors import Cancelled, FileError
from .files import SourceFile, open_regular, short
from .header import TensorInfo

logger = logging.getLogger(__name__)

# Measured cold on a virtual disk of 1.8 GB/s: chunks of 2 and 4 MiB read 256 MiB in 0.20 s, of 8 MiB in 0.33 s.
# WILLNEED ahead of the readers took 0.60 instead of 0.30 s for 512 MiB: the kernel's own read-ahead, doubled by SEQUENTIAL, is better.
CHUNK_BYTES = 4 << 20
# Into one H200 from the page cache: 1, 2 and 4 readers 5.5, 10.2 and 15.4 GB/s (16 cores); on 2 cores a third reader gains nothing.
READERS_LEAST, READERS_MOST = 2, 4
PIECES_LIMIT = 1024  # IOV_MAX of Linux
PROGRESS_SECONDS = 0.05
DIRECT_DEVICES = ("cpu",)  # whose memory a read can write to; others get their bytes through a bounce buffer
PAGE = os.sysconf("SC_PAGE_SIZE")

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
# An older torch lacks the smallest floats: they are absent here, and read as uint8.
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)}
)

# None where the system has no such advice (macOS).
_SEQUENTIAL: int | None = getattr(os, "POSIX_FADV_SEQUENTIAL", None)
_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Bytes read, seconds it took, and the page faults of the threads that read."""

    bytes: int
    seconds: float
    major_faults: int = 0
    minor_faults: int = 0


@dataclass(slots=True)
class _Chunk:
    """Bytes that lie together in one file: from `offset` on they fill `views` (flat uint8, one device) one after the other."""

    source: SourceFile
    device: torch.device
    offset: int
    nbytes: int = 0
    views: list[torch.Tensor] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)  # whose bytes the views are, by index


def stream_tensors(
    jobs: Sequence[tuple[TensorInfo, torch.Tensor]],
    *,
    stage: Literal["load"] = "load",
    progress: ProgressReport | None = None,
    cancel: CancelCheck | None = None,
    drop_behind: bool = True,
    readers: int | None = None,
    arrived: Callable[[int], None] | None = None,
) -> StreamStats:
    """Fill each destination with the bytes of its tensor and wait until all are there.

    The files are read front to back; with `arrived` they are read in the order of the jobs instead, and it is called with a job's
    index as soon as its bytes are there.

    A destination is contiguous, has the tensor's number of bytes, and its dtype or uint8 for the raw bytes; nothing is converted.
    CPU memory is read into directly; another device gets its bytes through one bounce buffer a reader. With `drop_behind` the
    file's pages leave the page cache as soon as they are copied. `readers` is by default half the cores, 2 to 4.
    `progress`, `cancel` and `arrived` are called on the calling thread.
    Raises Cancelled when `cancel()` turns true (the destinations are then half filled), FileError when a file is gone, has changed
    since its header was read, ends early or cannot be read, ValueError for a destination that does not fit.
    """
    started, own = time.perf_counter(), _thread_faults()
    chunks = _plan(jobs, in_file_order=arrived is None)
    total = sum(chunk.nbytes for chunk in chunks)
    if cancel is not None and cancel():
        raise Cancelled(f"loading was stopped before the first of {total} bytes was read")
    for device in {chunk.device for chunk in chunks if chunk.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()  # the destinations may still be in use by work queued before
    with ExitStack() as opened:
        files = {source: opened.enter_context(_opened(source)) for source in dict.fromkeys(chunk.source for chunk in chunks)}
        run = _Run(chunks, files, drop_behind)
        count = max(1, min(readers or default_readers(), len(chunks)))
        with ThreadPoolExecutor(count, thread_name_prefix="onedesk-read") as pool:
            try:
                futures = [pool.submit(run.read_all) for _ in range(count)]
                arrivals = _Arrivals(jobs, chunks, arrived) if arrived else None
                _watch(run.done, count, Progress(stage, 0, total), progress, cancel, arrivals)
            finally:
                run.stop.set()
        for future in futures:
            future.result()
        for source, fd in files.items():
            check_unchanged(source, fd)
            if drop_behind:
                _drop(fd, *_span(chunks, source))
    if progress is not None:
        progress(Progress(stage, total, total))
    major, minor = (now - before for now, before in zip(_thread_faults(), own, strict=True))
    return StreamStats(total, time.perf_counter() - started, major + run.faults[0], minor + run.faults[1])


def _thread_faults() -> tuple[int, int]:
    """Major and minor faults of the calling thread so far; zeros where the system does not count by thread."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt, usage.ru_minflt


def default_readers() -> int:
    """How many threads read, by the cores of this machine."""
    return max(READERS_LEAST, min(READERS_MOST, (os.cpu_count() or 1) // 2))


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype; uint8 for the raw bytes of those that torch lacks (6-bit floats)."""
    return TORCH_DTYPES.get(dtype, torch.uint8)


def _plan(jobs: Sequence[tuple[TensorInfo, torch.Tensor]], *, in_file_order: bool) -> list[_Chunk]:
    """Cut the jobs into chunks that end at multiples of CHUNK_BYTES in their file."""
    chunks: list[_Chunk] = []
    order = sorted(range(len(jobs)), key=lambda i: (str(jobs[i][0].file), jobs[i][0].start)) if in_file_order else range(len(jobs))
    for index in order:
        info, target = jobs[index]
        view = _flat(info, target)
        done = 0
        while done < info.nbytes:
            at = info.start + done
            last = chunks[-1] if chunks else None
            if last is None or not _continues(last, info.source, view.device, at):
                last = _Chunk(info.source, view.device, at)
                chunks.append(last)
            take = min(info.nbytes - done, CHUNK_BYTES - at % CHUNK_BYTES)
            last.views.append(view[done : done + take])
            last.jobs.append(index)
            last.nbytes += take
            done += take
    return chunks


def _continues(chunk: _Chunk, source: SourceFile, device: torch.device, at: int) -> bool:
    follows = chunk.source == source and chunk.device == device and chunk.offset + chunk.nbytes == at
    return follows and at % CHUNK_BYTES != 0 and len(chunk.views) < PIECES_LIMIT


def _flat(info: TensorInfo, target: torch.Tensor) -> torch.Tensor:
    """The destination as flat uint8 over the same memory, [info.nbytes]."""
    where = f"the destination of {short(info.name)}"
    if target.dtype not in (torch_dtype(info.dtype), torch.uint8):
        raise ValueError(f"{where} is {target.dtype}, the file has {info.dtype}; nothing is converted while reading")
    if target.nbytes != info.nbytes:
        raise ValueError(f"{where} has {target.nbytes} bytes, the file has {info.nbytes}")
    if not target.is_contiguous():
        raise ValueError(f"{where} is not contiguous (shape {tuple(target.shape)}, strides {target.stride()})")
    return target.detach().reshape(-1).view(torch.uint8)


class _Run:
    """What the readers of one stream share: the next chunk, the stop flag, and the queue of chunks done (None: a reader has ended)."""

    def __init__(self, chunks: list[_Chunk], files: Mapping[SourceFile, int], drop_behind: bool) -> None:
        self.chunks, self.files, self.drop_behind = chunks, files, drop_behind
        self.stop = threading.Event()
        self.done: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self.faults = (0, 0)
        self._next = 0
        self._lock = threading.Lock()

    def read_all(self) -> None:
        """Read chunks until none is left or the run is stopped; an error here stops the other readers too."""
        bounces: dict[torch.device, _Bounce] = {}
        complete, before = False, _thread_faults()
        try:
            while (index := self._take()) is not None:
                self._read(index, bounces)
                self.done.put(self.chunks[index])
            complete = True
        finally:
            with self._lock:
                self.faults = tuple(had + now - then for had, now, then in zip(self.faults, _thread_faults(), before, strict=True))
            if not complete:
                self.stop.set()
            self.done.put(None)

    def _take(self) -> int | None:
        with self._lock:
            if self.stop.is_set() or self._next >= len(self.chunks):
                return None
            self._next += 1
            return self._next - 1

    def _read(self, index: int, bounces: dict[torch.device, _Bounce]) -> None:
        chunk = self.chunks[index]
        fd = self.files[chunk.source]
        if chunk.device.type in DIRECT_DEVICES:
            _fill(fd, [view.numpy().data for view in chunk.views], chunk)
        else:
            bounce = bounces.get(chunk.device) or bounces.setdefault(chunk.device, _Bounce(chunk.device))
            _fill(fd, [bounce.window(chunk.nbytes)], chunk)
            bounce.hand_over(chunk.views)
        if self.drop_behind:
            _drop(fd, chunk.offset, chunk.nbytes)


class _Bounce:
    """One host buffer, pinned for CUDA, through which a reader feeds a device."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=cuda)
        self.stream = torch.cuda.Stream(device) if cuda else None

    def window(self, nbytes: int) -> memoryview:
        return self.buffer.numpy().data[:nbytes]

    @torch.inference_mode()
    def hand_over(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the buffer's beginning into `views`, one after the other, and wait for it."""
        parts = torch.split(self.buffer[: sum(view.numel() for view in views)], [view.numel() for view in views])
        with torch.cuda.stream(self.stream):
            for view, part in zip(views, parts, strict=True):
                view.copy_(part, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()


class _Arrivals:
    """Tells which jobs are complete while chunks come in, in any order."""

    def __init__(self, jobs: Sequence[tuple[TensorInfo, torch.Tensor]], chunks: Sequence[_Chunk], arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._missing = [0] * len(jobs)
        for chunk in chunks:
            for job in chunk.jobs:
                self._missing[job] += 1
        for job, parts in enumerate(self._missing):
            if parts == 0:  # a tensor of no bytes
                arrived(job)

    def take(self, chunk: _Chunk) -> None:
        for job in chunk.jobs:
            self._missing[job] -= 1
            if self._missing[job] == 0:
                self._arrived(job)


def _watch(
    done: queue.SimpleQueue[_Chunk | None],
    readers: int,
    start: Progress,
    progress: ProgressReport | None,
    cancel: CancelCheck | None,
    arrivals: _Arrivals | None,
) -> None:
    """Follow the readers until all have ended: report at most every PROGRESS_SECONDS, ask for cancel at every chunk."""
    got, told = 0, time.monotonic()
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
        if progress is not None and got < start.total and time.monotonic() - told >= PROGRESS_SECONDS:
            progress(Progress(start.stage, got, start.total))
            told = time.monotonic()


def _fill(fd: int, views: list[memoryview], chunk: _Chunk) -> None:
    at, end = chunk.offset, chunk.offset + chunk.nbytes
    while at < end:
        try:
            got = os.preadv(fd, views, at)
        except OSError as error:
            raise FileError(f"{chunk.source.shown} cannot be read at byte {at} of {chunk.source.size}: {error.strerror}") from None
        if got <= 0:
            raise FileError(
                f"{chunk.source.shown} ends at byte {at} while bytes up to {end} were read; it had {chunk.source.size} bytes "
                "when it was opened: it was changed meanwhile, get it again"
            )
        at += got
        views = _rest(views, got)


def _rest(views: list[memoryview], got: int) -> list[memoryview]:
    """What is left of `views` after `got` bytes were written."""
    for index, view in enumerate(views):
        if got < len(view):
            return [view[got:], *views[index + 1 :]]
        got -= len(view)
    return []


@contextmanager
def _opened(source: SourceFile) -> Iterator[int]:
    """The file opened again, if it still is the one whose header was read."""
    with open_regular(source.path, source.shown) as (fd, _):
        check_unchanged(source, fd)
        advise_file(fd, 0, 0, _SEQUENTIAL)
        yield fd


def check_unchanged(source: SourceFile, fd: int) -> None:
    """Raise FileError if the file is not the one whose header was read."""
    now = os.fstat(fd)
    if not source.same_as(now):
        raise FileError(
            f"{source.shown} was changed or replaced since its header was read "
            f"(it had {source.size} bytes, now {now.st_size}); open the model again"
        )


def _span(chunks: Sequence[_Chunk], source: SourceFile) -> tuple[int, int]:
    """Offset and length of the part of a file that was read."""
    mine = [chunk for chunk in chunks if chunk.source == source]
    start, end = min(chunk.offset for chunk in mine), max(chunk.offset + chunk.nbytes for chunk in mine)
    return start, end - start


def _drop(fd: int, offset: int, nbytes: int) -> None:
    """Let the page cache forget the pages that lie in this part of the file."""
    advise_file(fd, offset - offset % PAGE, nbytes + offset % PAGE, _DONTNEED)


def advise_file(fd: int, offset: int, nbytes: int, advice: int | None) -> None:
    """Give one of posix_fadvise's advices; None, which this system lacks, and a file system that takes none are let be."""
    if advice is None:
        return
    try:
        os.posix_fadvise(fd, offset, nbytes, advice)
    except OSError as error:  # a file system without a page cache
        logger.debug("fadvise %d is not supported here: %s", advice, error.strerror)
