"""A table that stays in its files: single rows are read in place, once for each pass that needs them."""

from __future__ import annotations

import errno
import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ModelError
from ..kernels.cpu.file_rows import FileRowReader
from ..quant.formats import NVFP4
from ..quant.weight import E2M1
from .dtypes import torch_dtype
from .files import SourceFile, read_exactly
from .header import TensorInfo
from .kept import KeptFiles
from .readers import advise_file
from .rows import read_rows

_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
# Buffer for raw file rows that is kept between passes: the rows of a decode step take some KiB.
KEPT_BYTES = 1 << 20
# From this many rows on, they are read in compiled calls: one by one, Python takes 14 us per row, and Qwen3.8 prompts
# need 16 rows per token.
MANY = 256

Rows: TypeAlias = "Sequence[int] | npt.NDArray[np.int64]"


@dataclass(slots=True)
class _Few:
    """Rows being read into the buffer `room`. `missing` lists those not read yet: their slices of the buffer, and their
    locations in the files.
    """

    rows: Sequence[int]
    room: memoryview
    missing: list[tuple[memoryview, TensorInfo, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Many:
    """Rows that a thread of the table reads for `asked`: the index of each asked row among them, and the buffer that
    will hold them.
    """

    asked: Sequence[int]
    rows: npt.NDArray[np.int64]
    positions: torch.Tensor | None
    room: Future[memoryview]


class FileTable:
    """Rows of stacked matrices, `parts` in order. `scale`: one number [1] that multiplies all others.

    `groups`: the E4M3 scales of each part, one per 16 columns; then the part's rows are E2M1 numbers, two per byte
    (NVFP4). The files stay open as long as the table lives; `files` is shared by the tables of a model. `reader`: reads
    many rows per call, where available.
    """

    def __init__(
        self,
        parts: Sequence[TensorInfo],
        scale: TensorInfo | None = None,
        groups: Sequence[TensorInfo] = (),
        reader: FileRowReader | None = None,
        files: KeptFiles | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._groups = tuple(groups)
        self._ends = tuple(accumulate(part.shape[0] for part in self.parts))
        self._firsts = (0, *self._ends)
        self._scale_info = scale
        # Cost of reading so far: seconds that passes waited, and bytes of rows.
        self.seconds, self.bytes = 0.0, 0
        self._scale: float | None = None if scale is not None else 1.0
        self._files = KeptFiles() if files is None else files
        self._reader = reader
        self._widths = tuple(infos[0].nbytes // infos[0].shape[0] for infos in (self.parts, self._groups) if infos)
        self._room = bytearray()
        self._coming: _Few | _Many | None = None  # the announced read, until its buffer is reused
        # Many rows are read while the host launches the first layer on a device: 30 ms for 32,768 rows in the page
        # cache.
        self._process, self._thread = os.getpid(), _reading_thread()
        self._may_not_wait = _NOWAIT

    @property
    def shape(self) -> tuple[int, int]:
        return self._ends[-1], self.parts[0].shape[1] * (2 if self._groups else 1)

    def announce(self, rows: Sequence[int]) -> None:
        """Announce that the rows will be read soon. The system prefetches their pages; few rows that are cached are
        read at once. For many rows this neither waits nor raises anything but IndexError.

        Raises FileError, IndexError.
        """
        started = time.perf_counter()
        self._settle()
        self._coming = None
        wanted, positions = self._distinct(rows)
        if isinstance(wanted, np.ndarray):
            self._coming = _Many(rows, wanted, positions, self._thread.submit(self._bring, wanted))
        else:
            self._coming = self._begin(wanted, self._may_not_wait)
        self.seconds += time.perf_counter() - started

    def read(self, rows: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows, in this order: [n, width] fp32, or in `out` [n, width] of any floating type. Each distinct row is
        read once.

        Raises FileError, ModelError, IndexError.
        """
        started = time.perf_counter()
        self._settle()
        coming = self._coming
        if (
            isinstance(coming, _Many) and coming.asked is rows
        ):  # sorting 32,768 rows takes some ms, while a device waits
            wanted, positions = coming.rows, coming.positions
        else:
            wanted, positions = self._distinct(rows)
        values = self._values(wanted)
        if positions is not None:
            values = values[positions]
        out = torch.empty((len(rows), self.shape[1])) if out is None else out
        out.copy_(values)
        factor = self._factor()
        if factor != 1.0:
            if factor == 0.0 and bool(values.any()):
                first = int(values.any(1).nonzero()[0])
                self._refuse(self.parts, rows[first], "numbers other than 0 under a scale of 0")
            out.mul_(factor)
        self.bytes += sum(self._widths) * len(wanted)
        self.seconds += time.perf_counter() - started
        return out

    def _settle(self) -> None:
        """In a forked child, recreate what it does not inherit: the thread, pending rows, and the lock."""
        if self._process != os.getpid():
            self._process, self._thread, self._coming = os.getpid(), _reading_thread(), None
            self._files.settle()

    def _distinct(self, rows: Sequence[int]) -> tuple[Rows, torch.Tensor | None]:
        """The distinct rows, and the index of each of `rows` among them, unless both are the same. Many rows come as a
        sorted array. IndexError for a row that does not exist.
        """
        if self._reader is not None and len(rows) >= MANY:
            wanted, found = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
            self._require(int(wanted[0]), int(wanted[-1]))
            return wanted, torch.from_numpy(found)
        few = list(dict.fromkeys(rows))
        if few:
            self._require(min(few), max(few))
        if len(few) == len(rows):
            return few, None
        at = {row: index for index, row in enumerate(few)}
        return few, torch.tensor([at[row] for row in rows])

    def _require(self, least: int, most: int) -> None:
        if not 0 <= least <= most < self._ends[-1]:
            raise IndexError(f"row {least if least < 0 else most} is not in a table of {self._ends[-1]}")

    def _spots(
        self, infos: Sequence[TensorInfo], wanted: npt.NDArray[np.int64], width: int
    ) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Descriptors and offsets of sorted rows, in groups whose files can be open together, with each group's first
        index.
        """
        parts = np.searchsorted(self._ends, wanted, side="right")
        firsts = np.flatnonzero(np.diff(parts, prepend=-1))
        files, offsets, open_files, begun = (
            np.empty(len(wanted), np.int32),
            np.empty(len(wanted), np.int64),
            dict[SourceFile, int](),
            0,
        )
        for first, end in zip(firsts, [*firsts[1:], len(wanted)], strict=True):
            part = int(parts[first])
            info, source = infos[part], infos[part].source
            if source not in open_files:
                if len(open_files) == self._files.most:
                    yield begun, files[begun:first], offsets[begun:first]
                    begun, open_files = int(first), {}
                open_files[source] = self._files.descriptor(source)
            files[first:end] = open_files[source]
            offsets[first:end] = info.start + (wanted[first:end] - self._firsts[part]) * width
        yield begun, files[begun:], offsets[begun:]

    def _values(self, wanted: Rows) -> torch.Tensor:
        """The rows before the one scale is applied."""
        coming, self._coming = self._coming, None
        if isinstance(wanted, np.ndarray):
            announced = coming.room if isinstance(coming, _Many) and np.array_equal(coming.rows, wanted) else None
            room = (announced or self._thread.submit(self._bring, wanted)).result()
        else:
            room = self._finish(
                coming if isinstance(coming, _Few) and coming.rows == wanted else self._begin(wanted, 0)
            )
        numbers = _typed(self.parts[0], len(wanted), room)
        if not self._groups:
            return numbers
        scales = _typed(self._groups[0], len(wanted), room[self._widths[0] * len(wanted) :]).float()
        if not bool(torch.isfinite(scales).all()):
            self._refuse(
                self._groups, int(wanted[int(torch.nonzero(~torch.isfinite(scales))[0, 0])]), "scales that are NaN"
            )
        nibbles = torch.stack((numbers & 15, numbers >> 4), dim=2).view(len(wanted), -1)
        wrong = (scales < 0) | ((scales == 0) & (nibbles & 7).view(*scales.shape, -1).any(2))
        if bool(wrong.any()):
            self._refuse(
                self._groups, int(wanted[int(wrong.nonzero()[0, 0])]), "a scale below 0, or of 0 over other numbers"
            )
        return torch.tensor(E2M1)[nibbles.int()] * scales.repeat_interleave(NVFP4.group, 1)

    def _refuse(self, infos: Sequence[TensorInfo], row: int, what: str) -> NoReturn:
        """ModelError that names the part of the table with this row."""
        part = bisect_right(self._ends, row)
        own = row - self._firsts[part]
        shown = f"{infos[part].source.shown}: tensor {infos[part].name}"
        raise ModelError(f"{shown} has {what} in row {own}; the checkpoint is damaged: get it again")

    def _room_for(self, rows: int) -> memoryview:
        size = sum(self._widths) * rows
        if len(self._room) < size <= KEPT_BYTES:
            self._room = bytearray(size)
        return memoryview(self._room if size <= KEPT_BYTES else bytearray(size))

    def _bring(self, wanted: npt.NDArray[np.int64]) -> memoryview:
        """Read many rows: numbers, then scales. All reads are announced to the system before the first one blocks."""
        room, behind = np.empty(sum(self._widths) * len(wanted), np.uint8).data, 0
        with self._files.lock:
            for infos, width in zip((self.parts, self._groups), self._widths, strict=False):
                self._read_many(infos, wanted, width, room[behind:])
                behind += width * len(wanted)
        return room

    def _read_many(
        self, infos: Sequence[TensorInfo], wanted: npt.NDArray[np.int64], width: int, room: memoryview
    ) -> None:
        if self._reader is None:
            raise ValueError("nothing reads many rows at once here")
        out = np.frombuffer(room, np.uint8)
        for first, files, offsets in self._spots(infos, wanted, width):
            self._reader.announce(files, offsets, width)
            done = self._reader.read(files, offsets, width, out[first * width :])
            while done < len(offsets):  # read_exactly reports a truncated file or a disk error, or continues
                at, row = (first + done) * width, int(wanted[first + done])
                shown = infos[bisect_right(self._ends, row)].source.shown
                room[at : at + width] = read_exactly(int(files[done]), width, int(offsets[done]), shown)
                done += 1
                done += self._reader.read(files[done:], offsets[done:], width, out[(first + done) * width :])

    def _begin(self, wanted: Sequence[int], flags: int | None) -> _Few:
        """Read rows, grouped by file. With flags (None: not at all) only those that need no waiting; the system is
        asked to prefetch the rest.
        """
        few = _Few(wanted, self._room_for(len(wanted)))
        with self._files.lock:
            self._begin_each(few, flags)
        return few

    def _begin_each(self, few: _Few, flags: int | None) -> None:
        wanted, at, files = few.rows, 0, dict[int, int]()
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        for infos, width in zip((self.parts, self._groups), self._widths, strict=False):
            for index in order:
                row = wanted[index]
                part = bisect_right(self._ends, row)
                info = infos[part]
                fd = files.get(id(info.source))
                if fd is None:
                    if len(files) == self._files.most:
                        files.clear()
                    fd = files[id(info.source)] = self._files.descriptor(info.source)
                to, offset = (
                    few.room[at + index * width : at + index * width + width],
                    info.start + (row - self._firsts[part]) * width,
                )
                if not self._brought(fd, to, offset, flags):
                    few.missing.append((to, info, offset))
                    if flags != 0:
                        advise_file(fd, offset, width, _WILLNEED)
            at += width * len(wanted)

    def _brought(self, fd: int, to: memoryview, offset: int, flags: int | None) -> bool:
        try:
            return flags is not None and os.preadv(fd, [to], offset, flags) == len(to)
        except OSError as error:
            if flags and error.errno != errno.EAGAIN:  # the file system lacks non-blocking reads
                self._may_not_wait = None
            return False

    def _finish(self, few: _Few) -> memoryview:
        """Read what is missing: read_exactly reports a truncated file or a disk error, or continues."""
        for to, info, offset in few.missing:
            with self._files.lock:
                to[:] = read_exactly(self._files.descriptor(info.source), len(to), offset, info.source.shown)
        return few.room

    def _factor(self) -> float:
        if self._scale is None and self._scale_info is not None:
            self._scale = float(read_rows(self._scale_info, [0]).float())
            if not (math.isfinite(self._scale) and self._scale >= 0):
                raise ModelError(
                    f"{self._scale_info.source.shown}: tensor {self._scale_info.name} is {self._scale}; get the model"
                    " again"
                )
        return self._scale if self._scale is not None else 1.0


def _reading_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "table-rows")


def _typed(part: TensorInfo, count: int, room: memoryview) -> torch.Tensor:
    """The first `count` rows of the part's type in `room`."""
    dtype = torch_dtype(part.dtype)
    if not count:
        return torch.empty((0, part.shape[1]), dtype=dtype)
    return torch.frombuffer(room, dtype=dtype, count=count * part.shape[1]).view(count, part.shape[1])
