"""A table that stays in its files: single rows are read where they lie, once for each pass that needs them."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..errors import ModelError
from ..quant.formats import NVFP4
from ..quant.weight import E2M1
from .header import TensorInfo
from .rows import announce_rows, read_rows


class FileTable:
    """Rows of matrices that lie one behind the other, `parts` in order. `scale`: one number [1] that all others are multiplied by.

    `groups`: of each part its E4M3 scales for 16 columns; then the part's rows are E2M1 numbers, two in a byte (NVFP4).
    """

    def __init__(self, parts: Sequence[TensorInfo], scale: TensorInfo | None = None, groups: Sequence[TensorInfo] = ()) -> None:
        self.parts = tuple(parts)
        self._groups = tuple(groups)
        self._ends = tuple(accumulate(part.shape[0] for part in self.parts))
        self._scale_info = scale
        # What reading has cost so far: seconds that a pass waited, and bytes of rows.
        self.seconds, self.bytes = 0.0, 0
        self._scale: float | None = None if scale is not None else 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self._ends[-1], self.parts[0].shape[1] * (2 if self._groups else 1)

    def announce(self, rows: torch.Tensor) -> None:
        """Say that the rows [n] int64 on the CPU will be read soon: the system brings their pages in. Raises FileError, IndexError."""
        for part, own in self._by_part(rows.unique()).items():
            for info in self._infos(part):
                announce_rows(info, own)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [n] int64 on the CPU, in this order: [n, width] fp32. Each is read once. Raises FileError, ModelError, IndexError."""
        started = time.perf_counter()
        wanted, places = rows.unique(return_inverse=True)
        found: list[torch.Tensor] = []
        for part, own in self._by_part(wanted).items():
            found.append(self._part_rows(part, own))
            self.bytes += sum(info.nbytes // info.shape[0] * len(own) for info in self._infos(part))
        values = torch.cat(found)[places] * self._factor()
        self.seconds += time.perf_counter() - started
        return values

    def _by_part(self, wanted: torch.Tensor) -> dict[int, list[int]]:
        """Where rows, in rising order, lie: part and rows there."""
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.shape[0]:
            raise IndexError(f"row {int(wanted[-1])} is not in a table of {self.shape[0]}")
        found: dict[int, list[int]] = {}
        for row in wanted.tolist():
            part = bisect_right(self._ends, row)
            found.setdefault(part, []).append(row - (self._ends[part] - self.parts[part].shape[0]))
        return found

    def _infos(self, part: int) -> tuple[TensorInfo, ...]:
        return (self.parts[part], self._groups[part]) if self._groups else (self.parts[part],)

    def _part_rows(self, part: int, rows: Sequence[int]) -> torch.Tensor:
        """Rows of one part, fp32, without the one scale."""
        values = read_rows(self.parts[part], rows)
        if not self._groups:
            return values.float()
        info = self._groups[part]
        scales = read_rows(info, rows).float()
        if not bool(torch.isfinite(scales).all()):
            raise ModelError(f"{info.source.shown}: tensor {info.name} has scales that are NaN; the checkpoint is damaged: get it again")
        nibbles = torch.stack((values & 15, values >> 4), dim=2).view(len(rows), -1)
        return torch.tensor(E2M1)[nibbles.int()] * scales.repeat_interleave(NVFP4.group, 1)

    def _factor(self) -> float:
        if self._scale is None and self._scale_info is not None:
            self._scale = float(read_rows(self._scale_info, [0]).float())
            if not math.isfinite(self._scale):
                raise ModelError(f"{self._scale_info.source.shown}: tensor {self._scale_info.name} is {self._scale}; get the model again")
        return self._scale if self._scale is not None else 1.0
