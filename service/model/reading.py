"""How one stored tensor fills its rows of a planned one: its bytes unchanged, or its rows converted on arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..loader.chunks import CHUNK_BYTES, Destination, intake_bytes
from ..loader.header import TensorInfo
from ..loader.rows import read_rows
from ..quant.formats import weight_of
from ..quant.quantize_weights import Quantizer, tile_elements
from ..quant.weight import QuantizedWeight, Weight

# Takes stored rows from a first index on into a weight's rows; further arguments: flat fp32 workspace, and the kernels
# that quantize faster, if any.
TakeRows: TypeAlias = Callable[[torch.Tensor, int, QuantizedWeight, torch.Tensor, Quantizer | None], None]
# The last step, once all of a tensor has arrived.
Settle: TypeAlias = Callable[[Weight], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """A stored tensor that fills the rows [row, row + rows) of a planned one.

    Without `take` its bytes are the rows of `piece`, a field of the quantized weight, or of a plain tensor. `take`
    receives `step` rows together and about `most` bytes. `rowwise`: each row of the weight depends on one row of the
    file alone.
    """

    info: TensorInfo
    row: int
    rows: int
    piece: str = ""
    take: TakeRows | None = None
    step: int = 1
    most: int = CHUNK_BYTES
    rowwise: bool = True

    @property
    def staging_bytes(self) -> int:
        """Bytes of the largest part that is converted in one step; 0 where bytes stay unchanged."""
        return 0 if self.take is None else intake_bytes(self.info, self.step, self.most)

    def destination(self, target: Weight, faster: Quantizer | None) -> Destination:
        """Where the loader puts it, in the planned tensor `target`."""
        if self.take is not None and isinstance(target, QuantizedWeight):
            return _TensorIntake(self, target.row_slice(self.row, self.row + self.rows), faster)
        part = self._part(target)
        if part.dtype.itemsize * part.numel() > self.info.nbytes:
            return narrow_end(part, self.info.nbytes)
        return part

    def fetch(self, rows: Sequence[int], target: Weight, faster: Quantizer | None) -> None:
        """Bring these rows of the stored tensor now; only where it is `rowwise`. Raises FileError, ModelError."""
        values = read_rows(self.info, rows)
        index = torch.tensor(rows, dtype=torch.int64, device=target.device) + self.row
        if self.take is None or not isinstance(target, QuantizedWeight):
            self._part(target)[index - self.row] = values.to(target.device)
            return
        values = values.to(target.device)
        own = weight_of(
            target.format,
            len(rows),
            target.cols,
            lambda shape, dtype: torch.empty(shape, dtype=dtype, device=target.device),
        )
        self.take(values, 0, own, torch.empty(tile_elements(target.device), device=target.device), faster)
        target.put_rows(index, own)

    def _part(self, target: Weight) -> torch.Tensor:
        whole = getattr(target, self.piece) if isinstance(target, QuantizedWeight) else target
        return whole[self.row : self.row + self.rows]


@dataclass(frozen=True, slots=True)
class _TensorIntake:
    """See loader.chunks.Intake."""

    reading: Reading
    target: QuantizedWeight
    faster: Quantizer | None

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def step(self) -> int:
        return self.reading.step

    @property
    def most(self) -> int:
        return self.reading.most

    def take(self, values: torch.Tensor, first: int, work: torch.Tensor) -> None:
        if self.reading.take is not None:
            self.reading.take(values, first, self.target, work, self.faster)


def narrow_end(wide: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The last `nbytes` of a tensor as flat bytes: a narrower stored type is read there, then widened over the whole
    tensor.
    """
    return wide.view(-1).view(torch.uint8)[-nbytes:]


def widen(stored: torch.dtype, target: Weight) -> None:
    """Convert the bytes of `narrow_end`, numbers of the type `stored`, to the tensor's own type, over all of it."""
    if isinstance(target, torch.Tensor):
        end = narrow_end(target, target.numel() * stored.itemsize)
        target.view(-1).copy_(end.clone().view(stored))
