"""The reader threads: from open files into memory, or through a staging buffer to a device or an intake."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from ..errors import FileError
from ..memory.backends.mapped import resident_bytes
from .bounce import Bounce, StagingBuffer, take_rows
from .chunks import CHUNK_BYTES, Chunk
from .files import SourceFile, open_regular

logger = logging.getLogger(__name__)

# Into one H200 from the page cache: 1, 2 and 4 readers 5.5, 10.2 and 15.4 GB/s (16 cores), which a pinned copy at 55
# GB/s outruns; on 2 cores a third reader gains nothing.
READERS_LEAST, READERS_MOST, READERS_MOST_DEVICE = 2, 4, 8
DIRECT_DEVICES = ("cpu",)  # a read can write to their memory; others get their bytes through a bounce buffer
PAGE = os.sysconf("SC_PAGE_SIZE")
# Whole chunks of a file (256 MiB) between two checks that dropping works. A check maps a page and waits 1.1 ms for the
# faults of the other readers: one per 64 MiB took 6 to 10 % of reading 1.19 GB from the page cache.
LOOK_EVERY = 64
# Seconds between two questions whether file pages may stay cached: as often as the watch polls during loads.
ASK_SECONDS = 0.25
# Consecutive checks that must find a dropped page cached. A process that counts cached pages (mincore) briefly pins
# each one; that happened once in 17,000 checks.
LOOKS_TO_BELIEVE = 3

# None where the system lacks this advice (macOS).
_SEQUENTIAL: int | None = getattr(os, "POSIX_FADV_SEQUENTIAL", None)
_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)
_RANDOM: int | None = getattr(os, "POSIX_FADV_RANDOM", None)
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # fails where a read would wait for the disk


# Whether pages leave the page cache once they are copied, or a function that decides it for the bytes still to be read.
DropBehind: TypeAlias = bool | Callable[[int], bool]


def default_readers(devices: Iterable[torch.device] = ()) -> int:
    """The number of reader threads for this machine's cores: more where one of `devices` needs a second copy."""
    bounced = any(device.type not in DIRECT_DEVICES for device in devices)
    return max(READERS_LEAST, min(READERS_MOST_DEVICE if bounced else READERS_MOST, (os.cpu_count() or 1) // 2))


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

    def __init__(self, chunks: list[Chunk], files: Mapping[SourceFile, int], drop_behind: DropBehind) -> None:
        self.chunks, self.files = chunks, files
        self._unread = sum(chunk.nbytes for chunk in chunks)
        self._lacks_room = drop_behind if callable(drop_behind) else None
        self.drops = drop_behind(self._unread) if callable(drop_behind) else drop_behind
        self._asked = time.monotonic()
        self.stop = threading.Event()
        self.done: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self.faults = (0, 0)
        self._dropped: dict[SourceFile, int] = {}
        self._stayed: dict[SourceFile, int] = {}  # consecutive checks that found a dropped page cached
        self._next = 0
        self._lock = threading.Lock()

    def read_all(self, staging: StagingBuffer | None) -> None:
        """Read chunks until none is left or the run is stopped; an error here stops the other readers too."""
        bounces: dict[torch.device, Bounce] = {}
        complete, before = False, thread_faults()
        try:
            while (index := self._take()) is not None:
                self._read(self.chunks[index], bounces, staging)
            for bounce in bounces.values():
                self._arrive(bounce.finish())
            complete = True
        finally:
            for bounce in bounces.values():
                bounce.settle()
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

    def _read(self, chunk: Chunk, bounces: dict[torch.device, Bounce], staging: StagingBuffer | None) -> None:
        """Read one chunk. A chunk for a device arrives when the next one has been read, or at the end."""
        fd = self.files[chunk.source]
        if chunk.rows is not None and staging is None:
            raise ValueError("rows are to be taken and this reader has no staging buffer")
        views = chunk.views if chunk.rows is None or staging is None else [staging.raw[: chunk.nbytes]]
        if chunk.device.type in DIRECT_DEVICES:
            fill(fd, [view.numpy().data for view in views], chunk)
            take_rows(chunk.rows, views, staging)
            self._arrive(chunk)
        else:
            bounce = bounces.get(chunk.device) or bounces.setdefault(chunk.device, Bounce(chunk.device))
            fill(fd, [bounce.window(chunk.nbytes)], chunk)
            self._arrive(bounce.send(chunk, views, staging))
            if chunk.rows is not None:  # the staging buffer is used again for the next rows
                self._arrive(bounce.finish())
        self._count(chunk)
        if self.drops:
            self._drop_behind(fd, chunk)

    def _arrive(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self.done.put(chunk)

    def _count(self, chunk: Chunk) -> None:
        """Count the chunk as read, and ask now and then whether the rest may stay cached. Once it may not, nothing of
        the files may.
        """
        with self._lock:
            self._unread -= chunk.nbytes
            if self.drops or self._lacks_room is None or time.monotonic() < self._asked + ASK_SECONDS:
                return
            self._asked = time.monotonic()
            unread = self._unread
        if self._lacks_room(unread):
            logger.info("memory is short: the page cache keeps nothing of the files that are read")
            self.drops = True
            for fd in self.files.values():
                drop(fd, 0, 0)

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
