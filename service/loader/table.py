"""A table that stays in its files: single rows are read where they lie, once for each pass that needs them."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ModelError
from ..kernels.file_rows import FileRowReader
from ..quant.formats import NVFP4
from ..quant.weight import E2M1
from .dtypes import torch_dtype
from .files import SourceFile, read_exactly
from .header import TensorInfo
from .kept import KeptFiles
from .readers import advise_file
from .rows import read_rows

_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)
# Room for rows as they lie in the files that is kept between passes: the rows of a decode step take some KiB.
KEPT_BYTES = 1 << 20
# From so many rows on they are read in compiled calls: one by one Python takes 14 us a row, and prompts of Qwen3.8 16 rows a token.
MANY = 256

Rows: TypeAlias = "Sequence[int] | npt.NDArray[np.int64]"


class FileTable:
    """Rows of matrices that lie one behind the other, `parts` in order. `scale`: one number [1] that all others are multiplied by.

    `groups`: of each part its E4M3 scales for 16 columns; then the part's rows are E2M1 numbers, two in a byte (NVFP4). The files stay
    open as long as the table lives. `reader`: for many rows at once, where there is one.
    """

    def __init__(
        self,
        parts: Sequence[TensorInfo],
        scale: TensorInfo | None = None,
        groups: Sequence[TensorInfo] = (),
        reader: FileRowReader | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._groups = tuple(groups)
        self._ends = tuple(accumulate(part.shape[0] for part in self.parts))
        self._scale_info = scale
        # What reading has cost so far: seconds that a pass waited, and bytes of rows.
        self.seconds, self.bytes = 0.0, 0
        self._scale: float | None = None if scale is not None else 1.0
        self._files = KeptFiles()
        self._reader = reader
        self._widths = tuple(infos[0].nbytes // infos[0].shape[0] for infos in (self.parts, self._groups) if infos)
        self._room = bytearray()

    @property
    def shape(self) -> tuple[int, int]:
        return self._ends[-1], self.parts[0].shape[1] * (2 if self._groups else 1)

    def announce(self, rows: Sequence[int]) -> None:
        """Say that the rows will be read soon: the system brings their pages in. Raises FileError, IndexError."""
        wanted = self._sorted(rows)[0]
        for infos, width in zip((self.parts, self._groups), self._widths, strict=False):
            if isinstance(wanted, np.ndarray):
                self._announce_many(infos, wanted, width)
                continue
            for part, own in self._by_part(wanted):
                info = infos[part]
                fd = self._files.descriptor(info.source)
                for row in own:
                    advise_file(fd, info.start + row * width, width, _WILLNEED)

    def _announce_many(self, infos: Sequence[TensorInfo], wanted: npt.NDArray[np.int64], width: int) -> None:
        if self._reader is not None:
            for _, files, offsets in self._spots(infos, wanted, width):
                self._reader.announce(files, offsets, width)

    def read(self, rows: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows, in this order: [n, width] fp32, in `out` [n, width] of any floating type if given. Each is read once.

        Raises FileError, ModelError, IndexError.
        """
        started = time.perf_counter()
        wanted, places = self._sorted(rows)
        values = self._values(wanted)
        if places is not None:
            values = values[places]
        out = torch.empty((len(rows), self.shape[1])) if out is None else out
        out.copy_(values)
        factor = self._factor()
        if factor != 1.0:
            if factor == 0.0 and bool(values.any()):
                place = int(values.any(1).nonzero()[0])
                self._refuse(self.parts, rows[place], "numbers other than 0 under a scale of 0")
            out.mul_(factor)
        self.bytes += sum(self._widths) * len(wanted)
        self.seconds += time.perf_counter() - started
        return out

    def _sorted(self, rows: Sequence[int]) -> tuple[Rows, torch.Tensor | None]:
        """Each of the rows once, in rising order, and where in it each of `rows` is, unless they are in this order. An array where
        many are read at once. IndexError for one that is not there."""
        wanted: Rows
        if self._reader is not None and len(rows) >= MANY:
            wanted, found = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
            places = torch.from_numpy(found)
        else:
            wanted, places = sorted(set(rows)), None
            if len(wanted) != len(rows) or wanted != list(rows):
                at = {row: place for place, row in enumerate(wanted)}
                places = torch.tensor([at[row] for row in rows])
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self._ends[-1]:
            raise IndexError(f"row {wanted[-1]} is not in a table of {self._ends[-1]}")
        return wanted, places

    def _spots(
        self, infos: Sequence[TensorInfo], wanted: npt.NDArray[np.int64], width: int
    ) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Descriptors and offsets of rows in rising order, as many at a time as have their files open together: which is the first one."""
        parts = np.searchsorted(self._ends, wanted, side="right")
        firsts = np.flatnonzero(np.diff(parts, prepend=-1))
        files, offsets, open_files, begun = np.empty(len(wanted), np.int32), np.empty(len(wanted), np.int64), dict[SourceFile, int](), 0
        for first, end in zip(firsts, [*firsts[1:], len(wanted)], strict=True):
            part = int(parts[first])
            info, source = infos[part], infos[part].source
            if source not in open_files:
                if len(open_files) == self._files.most:
                    yield begun, files[begun:first], offsets[begun:first]
                    begun, open_files = int(first), {}
                open_files[source] = self._files.descriptor(source)
            files[first:end] = open_files[source]
            offsets[first:end] = info.start + (wanted[first:end] - (self._ends[part] - self.parts[part].shape[0])) * width
        yield begun, files[begun:], offsets[begun:]

    def _by_part(self, wanted: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Where rows, in rising order, lie: part and rows there."""
        found: list[tuple[int, list[int]]] = []
        last = -1
        for row in wanted:
            part = bisect_right(self._ends, row)
            if part != last:
                found.append((part, []))
                last = part
            found[-1][1].append(row - (self._ends[part] - self.parts[part].shape[0]))
        return found

    def _values(self, wanted: Rows) -> torch.Tensor:
        """Rows in rising order, without the one scale."""
        size = sum(self._widths) * len(wanted)
        if len(self._room) < size <= KEPT_BYTES:
            self._room = bytearray(size)
        room = memoryview(self._room if size <= KEPT_BYTES else bytearray(size))
        numbers = self._read(self.parts, wanted, self._widths[0], room)
        if not self._groups:
            return numbers
        scales = self._read(self._groups, wanted, self._widths[1], room[self._widths[0] * len(wanted) :]).float()
        if not bool(torch.isfinite(scales).all()):
            self._refuse(self._groups, int(wanted[int(torch.nonzero(~torch.isfinite(scales))[0, 0])]), "scales that are NaN")
        nibbles = torch.stack((numbers & 15, numbers >> 4), dim=2).view(len(wanted), -1)
        wrong = (scales < 0) | ((scales == 0) & (nibbles & 7).view(*scales.shape, -1).any(2))
        if bool(wrong.any()):
            self._refuse(self._groups, int(wanted[int(wrong.nonzero()[0, 0])]), "a scale below 0, or of 0 over other numbers")
        return torch.tensor(E2M1)[nibbles.int()] * scales.repeat_interleave(NVFP4.group, 1)

    def _refuse(self, infos: Sequence[TensorInfo], row: int, what: str) -> NoReturn:
        """ModelError that names the part in which a row of the table lies."""
        part = bisect_right(self._ends, row)
        own = row - self._ends[part] + self.parts[part].shape[0]
        shown = f"{infos[part].source.shown}: tensor {infos[part].name}"
        raise ModelError(f"{shown} has {what} in row {own}; the checkpoint is damaged: get it again")

    def _read(self, infos: Sequence[TensorInfo], wanted: Rows, width: int, room: memoryview) -> torch.Tensor:
        """Rows in rising order of the parts' own type, in `room`."""
        dtype = torch_dtype(infos[0].dtype)
        if not len(wanted):
            return torch.empty((0, infos[0].shape[1]), dtype=dtype)
        if isinstance(wanted, np.ndarray):
            self._read_many(infos, wanted, width, room)
        else:
            self._read_few(infos, wanted, width, room)
        numbers = torch.frombuffer(room, dtype=torch.uint8, count=len(wanted) * width)
        return numbers.view(dtype).view(len(wanted), infos[0].shape[1])

    def _read_many(self, infos: Sequence[TensorInfo], wanted: npt.NDArray[np.int64], width: int, room: memoryview) -> None:
        if self._reader is None:
            raise ValueError("nothing reads many rows at once here")
        places = np.frombuffer(room, np.uint8)
        for first, files, offsets in self._spots(infos, wanted, width):
            done = self._reader.read(files, offsets, width, places[first * width :])
            while done < len(offsets):  # read_exactly says where the file ends or what the disk answers, or reads on
                at, row = (first + done) * width, int(wanted[first + done])
                shown = infos[bisect_right(self._ends, row)].source.shown
                room[at : at + width] = read_exactly(int(files[done]), width, int(offsets[done]), shown)
                done += 1
                done += self._reader.read(files[done:], offsets[done:], width, places[(first + done) * width :])

    def _read_few(self, infos: Sequence[TensorInfo], wanted: Sequence[int], width: int, room: memoryview) -> None:
        at = 0
        for part, own in self._by_part(wanted):
            info = infos[part]
            fd = self._files.descriptor(info.source)
            for row in own:
                place, offset = room[at : at + width], info.start + row * width
                try:
                    whole = os.preadv(fd, [place], offset) == width
                except OSError:
                    whole = False
                if not whole:  # read_exactly says where the file ends or what the disk answers, or reads on
                    place[:] = read_exactly(fd, width, offset, info.source.shown)
                at += width

    def _factor(self) -> float:
        if self._scale is None and self._scale_info is not None:
            self._scale = float(read_rows(self._scale_info, [0]).float())
            if not (math.isfinite(self._scale) and self._scale >= 0):
                raise ModelError(f"{self._scale_info.source.shown}: tensor {self._scale_info.name} is {self._scale}; get the model again")
        return self._scale if self._scale is not None else 1.0
