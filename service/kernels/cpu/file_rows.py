"""Reads many rows of files at once, with threads that Python's lock does not block."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from .native import bind, structure

# Concurrent reads that wait for a disk. For rows in the page cache 8 threads read no faster than 4.
THREADS = 8


class _FileRows(ctypes.Structure):
    """struct file_rows of file_rows.c."""

    _fields_ = structure(
        "files offsets buffer count width threads announce next failed",
        pointers="files offsets buffer",
        integers="count width threads announce next failed",
    )


class FileRowReader:
    """Reads rows by descriptor and offset in one compiled call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._visit = bind(library, "visit_file_rows", ctypes.c_void_p, result=ctypes.c_long)

    def announce(self, files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], width: int) -> None:
        """Announce that `width` bytes at each offset will be read soon."""
        self._run(files, offsets, 0, width, announce=True)

    def read(
        self, files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], width: int, buffer: npt.NDArray[np.uint8]
    ) -> int:
        """Read `width` bytes at each offset into `buffer`, one row after the other. Returns the first row that was not
        read completely, or the number of rows.
        """
        if buffer.nbytes < len(offsets) * width:
            raise ValueError(f"{len(offsets)} rows of {width} bytes do not fit {buffer.nbytes}")
        return self._run(files, offsets, buffer.ctypes.data, width, announce=False)

    def _run(
        self, files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], buffer: int, width: int, *, announce: bool
    ) -> int:
        files, offsets = np.ascontiguousarray(files, np.int32), np.ascontiguousarray(offsets, np.int64)
        wanted = _FileRows(files.ctypes.data, offsets.ctypes.data, buffer, len(offsets), width, THREADS, announce, 0, 0)
        return self._visit(ctypes.addressof(wanted))
