"""A table that stays in its files: single rows are read where they lie, once for each pass that needs them."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import torch

from ..errors import ModelError
from ..quant.formats import NVFP4
from ..quant.weight import E2M1
from .dtypes import torch_dtype
from .files import read_exactly
from .header import TensorInfo
from .kept import KeptFiles
from .readers import advise_file
from .rows import read_rows

_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)
# Room for rows as they lie in the files that is kept between passes: the rows of a decode step take some KiB.
KEPT_BYTES = 1 << 20


class FileTable:
    """Rows of matrices that lie one behind the other, `parts` in order. `scale`: one number [1] that all others are multiplied by.

    `groups`: of each part its E4M3 scales for 16 columns; then the part's rows are E2M1 numbers, two in a byte (NVFP4). The files stay
    open as long as the table lives.
    """

    def __init__(self, parts: Sequence[TensorInfo], scale: TensorInfo | None = None, groups: Sequence[TensorInfo] = ()) -> None:
        self.parts = tuple(parts)
        self._groups = tuple(groups)
        self._ends = tuple(accumulate(part.shape[0] for part in self.parts))
        self._scale_info = scale
        # What reading has cost so far: seconds that a pass waited, and bytes of rows.
        self.seconds, self.bytes = 0.0, 0
        self._scale: float | None = None if scale is not None else 1.0
        self._files = KeptFiles()
        self._widths = tuple(infos[0].nbytes // infos[0].shape[0] for infos in (self.parts, self._groups) if infos)
        self._room = bytearray()

    @property
    def shape(self) -> tuple[int, int]:
        return self._ends[-1], self.parts[0].shape[1] * (2 if self._groups else 1)

    def announce(self, rows: Sequence[int]) -> None:
        """Say that the rows will be read soon: the system brings their pages in. Raises FileError, IndexError."""
        wanted = self._sorted(rows)
        for infos, width in zip((self.parts, self._groups), self._widths, strict=False):
            for part, own in self._by_part(wanted):
                info = infos[part]
                fd = self._files.descriptor(info.source)
                for row in own:
                    advise_file(fd, info.start + row * width, width, _WILLNEED)

    def read(self, rows: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows, in this order: [n, width] fp32, in `out` [n, width] of any floating type if given. Each is read once.

        Raises FileError, ModelError, IndexError.
        """
        started = time.perf_counter()
        wanted = self._sorted(rows)
        values = self._values(wanted)
        if len(wanted) != len(rows) or wanted != list(rows):
            places = {row: place for place, row in enumerate(wanted)}
            values = values[torch.tensor([places[row] for row in rows])]
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

    def _sorted(self, rows: Sequence[int]) -> list[int]:
        """Each of the rows once, in rising order. IndexError for one that is not there."""
        wanted = sorted(set(rows))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self._ends[-1]:
            raise IndexError(f"row {wanted[-1]} is not in a table of {self._ends[-1]}")
        return wanted

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

    def _values(self, wanted: Sequence[int]) -> torch.Tensor:
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
            self._refuse(self._groups, wanted[int(torch.nonzero(~torch.isfinite(scales))[0, 0])], "scales that are NaN")
        nibbles = torch.stack((numbers & 15, numbers >> 4), dim=2).view(len(wanted), -1)
        wrong = (scales < 0) | ((scales == 0) & (nibbles & 7).view(*scales.shape, -1).any(2))
        if bool(wrong.any()):
            self._refuse(self._groups, wanted[int(wrong.nonzero()[0, 0])], "a scale below 0, or of 0 over other numbers")
        return torch.tensor(E2M1)[nibbles.int()] * scales.repeat_interleave(NVFP4.group, 1)

    def _refuse(self, infos: Sequence[TensorInfo], row: int, what: str) -> NoReturn:
        """ModelError that names the part in which a row of the table lies."""
        part = bisect_right(self._ends, row)
        own = row - self._ends[part] + self.parts[part].shape[0]
        shown = f"{infos[part].source.shown}: tensor {infos[part].name}"
        raise ModelError(f"{shown} has {what} in row {own}; the checkpoint is damaged: get it again")

    def _read(self, infos: Sequence[TensorInfo], wanted: Sequence[int], width: int, room: memoryview) -> torch.Tensor:
        """Rows in rising order of the parts' own type, in `room`."""
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
        dtype = torch_dtype(infos[0].dtype)
        if not at:
            return torch.empty((0, infos[0].shape[1]), dtype=dtype)
        return torch.frombuffer(room, dtype=torch.uint8, count=at).view(dtype).view(len(wanted), infos[0].shape[1])

    def _factor(self) -> float:
        if self._scale is None and self._scale_info is not None:
            self._scale = float(read_rows(self._scale_info, [0]).float())
            if not (math.isfinite(self._scale) and self._scale >= 0):
                raise ModelError(f"{self._scale_info.source.shown}: tensor {self._scale_info.name} is {self._scale}; get the model again")
        return self._scale if self._scale is not None else 1.0
