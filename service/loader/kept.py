"""Checkpoint files that stay open for reads of single rows, and are checked for changes before each use."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict

from ..errors import FileError
from .files import SourceFile, open_regular
from .readers import advise_file, check_unchanged

_RANDOM: int | None = getattr(os, "POSIX_FADV_RANDOM", None)
# A checkpoint of 360 GB has 131 files. The tables of a model together use at most this share of the process's
# descriptor limit.
MOST_OPEN = 160
SHARE = 4


class KeptFiles:
    """Descriptors by file. Above the limit the least recently used one is closed; all are closed with the object.

    Several tables may share one object: hold `lock` while calling `descriptor` and using its result.
    """

    def __init__(self) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, allowed // SHARE))
        self.lock = threading.Lock()
        self._process = os.getpid()
        self._open: OrderedDict[SourceFile, int] = OrderedDict()
        self._closing = weakref.finalize(self, _close_all, self._open)

    def settle(self) -> None:
        """Give a forked child its own lock: one held by a thread of the parent would never be released. Its
        descriptors are copies.
        """
        if self._process != os.getpid():
            self._process, self.lock = os.getpid(), threading.Lock()

    def descriptor(self, source: SourceFile) -> int:
        """The file's descriptor for random reads; valid until the next call. FileError where the file has changed since
        it was opened.
        """
        fd = self._open.get(source)
        if fd is None:
            return self._opened(source)
        if not source.unchanged():
            self._close(source)
            return self._opened(source)  # raises with the reason
        self._open.move_to_end(source)
        return fd

    def _opened(self, source: SourceFile) -> int:
        while len(self._open) >= self.most:
            self._close(next(iter(self._open)))
        with open_regular(source.path, source.shown) as (fd, _):
            check_unchanged(source, fd)
            try:
                kept = os.dup(fd)
            except OSError as error:
                raise FileError(f"{source.shown} cannot be kept open: {os.strerror(error.errno or 0)}") from None
        advise_file(kept, 0, 0, _RANDOM)  # no read-ahead around a row of a few KiB
        self._open[source] = kept
        return kept

    def _close(self, source: SourceFile) -> None:
        os.close(self._open.pop(source))

    def close(self) -> None:
        """Close all of them; they are reopened on demand."""
        _close_all(self._open)


def _close_all(files: OrderedDict[SourceFile, int]) -> None:
    while files:
        os.close(files.popitem()[1])
