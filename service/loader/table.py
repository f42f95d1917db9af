"""A table that stays in its files: single rows are read where they lie, once for each pass that needs them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..errors import ModelError
from ..quant.formats import NVFP4
from ..quant.weight import E2M1
from .header import TensorInfo
from .rows import read_rows


class FileTable:
    """Rows of matrices that lie one behind the other, `parts` in order. `scale`: one number [1] that all others are multiplied by.

    `groups`: of each part its E4M3 scales for 16 columns; then the part's rows are E2M1 numbers, two in a byte (NVFP4).
    """

    def __init__(self, parts: Sequence[TensorInfo], scale: TensorInfo | None = None, groups: Sequence[TensorInfo] = ()) -> None:
        self.parts = tuple(parts)
        self._groups = tuple(groups)
        self._ends = tuple(accumulate(part.shape[0] for part in self.parts))
        self._scale_info = scale
        self._scale: float | None = None if scale is not None else 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self._ends[-1], self.parts[0].shape[1] * (2 if self._groups else 1)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [n] int64 on the CPU, in this order: [n, width] fp32. Each is read once. Raises FileError, ModelError, IndexError."""
        wanted, places = rows.unique(return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.shape[0]:
            raise IndexError(f"row {int(wanted[-1])} is not in a table of {self.shape[0]}")
        found: list[torch.Tensor] = []
        by_part: dict[int, list[int]] = {}
        for row in wanted.tolist():
            part = bisect_right(self._ends, row)
            by_part.setdefault(part, []).append(row - (self._ends[part] - self.parts[part].shape[0]))
        for part, own in by_part.items():
            found.append(self._part_rows(part, own))
        return torch.cat(found)[places] * self._factor()

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
