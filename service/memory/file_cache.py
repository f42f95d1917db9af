"""The pages of checkpoint files in the page cache: kept after a load while memory has room, and dropped first.

A model that gives way and comes back is then copied from memory, not read from the disk.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..errors import OnedeskError
from .backends.mapped import resident_bytes

log = logging.getLogger(__name__)

_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # None: macOS


class FileCache:
    """Which checkpoint files a pool leaves in the page cache. Thread-safe; it holds no descriptor.

    `room()` is the host memory in bytes that cached pages may fill: above the floor, not counted on by any lease.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._files: dict[Path, None] = {}  # least recently read first
        self._reading: Counter[Path] = Counter()

    def lacks_room(self, nbytes: int) -> bool:
        """Whether `nbytes` that are about to be read have to leave the page cache again, because memory is short."""
        try:
            return self._room() < nbytes
        except OnedeskError as error:
            log.warning("file pages are dropped behind a load: memory cannot be read (%s)", error)
            return True

    @contextmanager
    def reading(self, files: Iterable[Path]) -> Iterator[None]:
        """Record `files` as read now. Until the block ends they are not dropped for memory that others need."""
        chosen = list(dict.fromkeys(files))
        with self._lock:
            self._reading.update(chosen)
            for path in chosen:
                self._files.pop(path, None)
                self._files[path] = None
        try:
            yield
        finally:
            with self._lock:
                self._reading -= Counter(chosen)

    def cached(self) -> int:
        """Bytes of the recorded files that are in the page cache now."""
        with self._lock:
            files = list(self._files)
        return sum(cached_bytes(path) for path in files)

    def drop(self, nbytes: int) -> int:
        """Drop files from the page cache, least recently read first, until `nbytes` are free; returns the bytes that
        left it. Files that are being read stay.
        """
        freed = 0
        with self._lock:
            candidates = [path for path in self._files if path not in self._reading]
        for path in candidates:
            if freed >= nbytes:
                break
            with self._lock:
                if path in self._reading:
                    continue
                self._files.pop(path, None)
            freed += _drop(path)
        if freed:
            log.debug("%d bytes of checkpoint files left the page cache, %d were needed", freed, nbytes)
        return freed


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache, in whole pages; 0 for an empty, absent or unreadable file.

    mincore over a mapping that is never touched: a file that is truncated meanwhile cannot end the process.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as pages:
            view = np.frombuffer(pages, dtype=np.uint8)
            found = resident_bytes(view.ctypes.data, len(view))
            del view  # the mapping cannot be closed before
            return found
    except (OSError, ValueError):
        return 0


def _drop(path: Path) -> int:
    """Drop a file's clean pages; returns the bytes that left the page cache. Pages that another process maps stay."""
    before = cached_bytes(path)
    if not before or _DONTNEED is None:
        return 0
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, _DONTNEED)
    except OSError as error:
        log.debug("%s stays in the page cache: %s", path.name, error.strerror)
        return 0
    return max(0, before - cached_bytes(path))
