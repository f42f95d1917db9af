"""Files of a checkpoint that stay open while single rows of them are wanted, and are asked before each use whether
they are the same.
"""

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
# A checkpoint of 360 GB has 131 files; and the tables of a model together take no more than this share of what the
# process may have open.
MOST_OPEN = 160
SHARE = 4


class KeptFiles:
    """Descriptors by file, the longest unused one closed where they would be too many. They are closed with the object.

    Several tables may share one: `descriptor` is called, and what it returned is used, while `lock` is held.
    """

    def __init__(self) -> None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, allowed // SHARE))
        self.lock = threading.Lock()
        self._process = os.getpid()
        self._open: OrderedDict[SourceFile, int] = OrderedDict()
        self._closing = weakref.finalize(self, _close_all, self._open)

    def settle(self) -> None:
        """Give a forked child a lock of its own: one that a thread of its parent held would stay closed. The
        descriptors are its own.
        """
        if self._process != os.getpid():
            self._process, self.lock = os.getpid(), threading.Lock()

    def descriptor(self, source: SourceFile) -> int:
        """Of the file, for reads here and there; valid until the next call. FileError where it is no longer the one
        that was opened.
        """
        fd = self._open.get(source)
        if fd is None:
            return self._opened(source)
        if not source.unchanged():
            self._close(source)
            return self._opened(source)  # says what has become of it
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
        """Close all of them; they are opened again when they are wanted."""
        _close_all(self._open)


def _close_all(files: OrderedDict[SourceFile, int]) -> None:
    while files:
        os.close(files.popitem()[1])
