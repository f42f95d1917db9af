"""The reader threads: from open files into memory, or through a staging buffer to a device or an intake."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import FileError
from ..memory.backends.mapped import resident_bytes
from .chunks import CHUNK_BYTES, Chunk, Rows
from .files import SourceFile, open_regular

logger = logging.getLogger(__name__)

# Into one H200 from the page cache: 1, 2 and 4 readers 5.5, 10.2 and 15.4 GB/s (16 cores); on 2 cores a third reader
# gains nothing.
READERS_LEAST, READERS_MOST = 2, 4
DIRECT_DEVICES = ("cpu",)  # a read can write to their memory; others get their bytes through a bounce buffer
PAGE = os.sysconf("SC_PAGE_SIZE")
# Whole chunks of a file (256 MiB) between two checks that dropping works. A check maps a page and waits 1.1 ms for the
# faults of the other readers: one per 64 MiB took 6 to 10 % of reading 1.19 GB from the page cache.
LOOK_EVERY = 64
# Consecutive checks that must find a dropped page cached. A process that counts cached pages (mincore) briefly pins
# each one; that happened once in 17,000 checks.
LOOKS_TO_BELIEVE = 3

# None where the system lacks this advice (macOS).
_SEQUENTIAL: int | None = getattr(os, "POSIX_FADV_SEQUENTIAL", None)
_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)
_RANDOM: int | None = getattr(os, "POSIX_FADV_RANDOM", None)
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # fails where a read would wait for the disk


@dataclass(frozen=True, slots=True)
class Bench:
    """A reader's staging buffers: `raw` uint8 for a chunk as stored, `work` flat fp32; both on the rows' device."""

    raw: torch.Tensor
    work: torch.Tensor


def default_readers() -> int:
    """The number of reader threads for this machine's cores."""
    return max(READERS_LEAST, min(READERS_MOST, (os.cpu_count() or 1) // 2))


def thread_faults() -> tuple[int, int]:
    """Major and minor faults of the calling thread so far; zeros where the system has no counts per thread."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt, usage.ru_minflt


class ReadRun:
    """State shared by the readers of one stream: the next chunk, the stop flag, and the queue of finished chunks (None:
    a reader has ended).
    """

    def __init__(self, chunks: list[Chunk], files: Mapping[SourceFile, int], drop_behind: bool) -> None:
        self.chunks, self.files, self.drop_behind = chunks, files, drop_behind
        self.stop = threading.Event()
        self.done: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self.faults = (0, 0)
        self._dropped: dict[SourceFile, int] = {}
        self._stayed: dict[SourceFile, int] = {}  # consecutive checks that found a dropped page cached
        self._next = 0
        self._lock = threading.Lock()

    def read_all(self, bench: Bench | None) -> None:
        """Read chunks until none is left or the run is stopped; an error here stops the other readers too."""
        bounces: dict[torch.device, _Bounce] = {}
        complete, before = False, thread_faults()
        try:
            while (index := self._take()) is not None:
                self._read(self.chunks[index], bounces, bench)
                self.done.put(self.chunks[index])
            complete = True
        finally:
            with self._lock:
                self.faults = tuple(
                    had + now - then for had, now, then in zip(self.faults, thread_faults(), before, strict=True)
                )
            if not complete:
                self.stop.set()
            self.done.put(None)

    def _take(self) -> int | None:
        with self._lock:
            if self.stop.is_set() or self._next >= len(self.chunks):
                return None
            self._next += 1
            return self._next - 1

    def _read(self, chunk: Chunk, bounces: dict[torch.device, _Bounce], bench: Bench | None) -> None:
        fd = self.files[chunk.source]
        views = chunk.views
        if chunk.rows is not None:
            if bench is None:
                raise ValueError("rows are to be taken and this reader has no bench")
            views = [bench.raw[: chunk.nbytes]]
        if chunk.device.type in DIRECT_DEVICES:
            fill(fd, [view.numpy().data for view in views], chunk)
            _take_rows(chunk.rows, views, bench)
        else:
            bounce = bounces.get(chunk.device) or bounces.setdefault(chunk.device, _Bounce(chunk.device))
            fill(fd, [bounce.window(chunk.nbytes)], chunk)
            bounce.hand_over(views, chunk.rows, bench)
        if self.drop_behind:
            self._drop_behind(fd, chunk)

    def _drop_behind(self, fd: int, chunk: Chunk) -> None:
        """Drop the chunk's pages. Stop doing so for a file whose pages stay cached: another process maps them, or they
        are dirty.

        Dropping mapped pages interrupts every core and then fails: it took 0.5 to 6 ms per chunk instead of 0.2.
        """
        if self._stayed.get(chunk.source, 0) >= LOOKS_TO_BELIEVE:
            return
        drop(fd, chunk.offset, chunk.nbytes)
        if chunk.nbytes < CHUNK_BYTES:  # the page cache uses folios of up to 2 MiB, dropped only whole
            return
        with self._lock:
            before = self._dropped.get(chunk.source, 0)
            self._dropped[chunk.source] = before + 1
            doubted = self._stayed.get(chunk.source, 0)
        if not doubted and before % LOOK_EVERY:
            return
        stays = cached(chunk.source, chunk.offset + chunk.nbytes // 2)
        with self._lock:
            self._stayed[chunk.source] = self._stayed.get(chunk.source, 0) + 1 if stays else 0
            if self._stayed[chunk.source] == LOOKS_TO_BELIEVE:
                logger.debug("%s stays in the page cache: somebody else uses it", chunk.source.shown)


@torch.inference_mode()
def _take_rows(rows: Rows | None, views: Sequence[torch.Tensor], bench: Bench | None) -> None:
    if rows is not None and bench is not None:
        rows.intake.take(views[0].view(rows.dtype).view(rows.shape), rows.first, bench.work)


class _Bounce:
    """One host buffer, pinned for CUDA, through which a reader feeds a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._cuda)
        self.stream = torch.cuda.Stream(device) if self._cuda else None

    def window(self, nbytes: int) -> memoryview:
        if nbytes > self.buffer.numel():  # one step of rows that are wider than a chunk
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        return self.buffer.numpy().data[:nbytes]

    @torch.inference_mode()
    def hand_over(self, views: Sequence[torch.Tensor], rows: Rows | None, bench: Bench | None) -> None:
        """Copy the start of the buffer into `views`, in order, let the intake take its rows there, and wait for it."""
        parts = torch.split(self.buffer[: sum(view.numel() for view in views)], [view.numel() for view in views])
        with torch.cuda.stream(self.stream):
            for view, part in zip(views, parts, strict=True):
                view.copy_(part, non_blocking=True)
            _take_rows(rows, views, bench)
        if self.stream is not None:
            self.stream.synchronize()


def fill(fd: int, views: list[memoryview], chunk: Chunk) -> None:
    """Read the chunk's bytes into `views`, in order. Raises FileError."""
    at, end = chunk.offset, chunk.offset + chunk.nbytes
    while at < end:
        try:
            got = os.preadv(fd, views, at)
        except OSError as error:
            raise FileError(
                f"{chunk.source.shown} cannot be read at byte {at} of {chunk.source.size}: {error.strerror}"
            ) from None
        if got <= 0:
            raise FileError(
                f"{chunk.source.shown} ends at byte {at} while bytes up to {end} were read; it had {chunk.source.size}"
                " bytes when it was opened: it was changed meanwhile, get it again"
            )
        at += got
        views = _rest(views, got)


def _rest(views: list[memoryview], got: int) -> list[memoryview]:
    """The rest of `views` after `got` bytes."""
    for index, view in enumerate(views):
        if got < len(view):
            return [view[got:], *views[index + 1 :]]
        got -= len(view)
    return []


@contextmanager
def opened(source: SourceFile) -> Iterator[int]:
    """The file, reopened, if it is still the one whose header was read."""
    with open_regular(source.path, source.shown) as (fd, _):
        check_unchanged(source, fd)
        advise_file(fd, 0, 0, _SEQUENTIAL)
        yield fd


def check_unchanged(source: SourceFile, fd: int) -> None:
    """Raise FileError if the file is not the one whose header was read."""
    now = os.fstat(fd)
    if not source.same_as(now):
        raise FileError(
            f"{source.shown} was changed or replaced since its header was read ({source.change(now)}); open the model"
            " again"
        )


def drop(fd: int, offset: int, nbytes: int) -> None:
    """Drop the pages of this part of the file from the page cache."""
    advise_file(fd, offset - offset % PAGE, nbytes + offset % PAGE, _DONTNEED)


def cached(source: SourceFile, offset: int) -> bool:
    """Whether the page at `offset` is in the page cache; False where the system or the file system cannot tell.

    mincore reports every page of another user's file as cached. For such a file a non-blocking read decides. It also
    starts to fetch its page, so it is wrong only when the disk is faster than the check.
    """
    if _NOWAIT is None:
        return False
    at = offset // PAGE * PAGE
    with open_regular(source.path, source.shown) as (fd, _):
        with mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=at) as page:
            if not resident_bytes(np.frombuffer(page, dtype=np.uint8).ctypes.data, PAGE):
                return False
        advise_file(fd, 0, 0, _RANDOM)
        try:
            return os.preadv(fd, [bytearray(1)], at, _NOWAIT) == 1
        except OSError:  # EAGAIN: not cached; EOPNOTSUPP: unsupported file system
            return False


def advise_file(fd: int, offset: int, nbytes: int, advice: int | None) -> None:
    """Apply one of posix_fadvise's advices; do nothing for None (the system lacks it) or where the file system refuses
    it.
    """
    if advice is None:
        return
    try:
        os.posix_fadvise(fd, offset, nbytes, advice)
    except OSError as error:  # a file system without a page cache
        logger.debug("fadvise %d is not supported here: %s", advice, error.strerror)
