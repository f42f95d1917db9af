"""Checkpoints published in small floats, converted to int8 or int4: read as stored, then rounded again, tensor by
tensor.

Only `onedesk quantize` does this: it briefly holds a matrix twice, which exceeds the memory of a load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..quant.formats import NVFP4, Carve, aligned_bytes, weight_of
from ..quant.quantize_weights import Quantizer, quantize_into, tile_elements
from ..quant.weight import Format, QuantizedWeight, dequantize
from .weights import ALIGNMENT, PlannedTensor, WeightPlan, turned_into

# Integers are left alone: rounding them to other integers would only lose precision.
FLOATS = ("fp8", NVFP4.name)


@dataclass(frozen=True, slots=True)
class StagedTensor(PlannedTensor):
    """A tensor that is read as `staged` and held in another format."""

    staged: Format = NVFP4

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staged tensor, alignment included."""
        rows, cols = self.destination.shape
        return aligned_bytes(self.staged, rows, cols, ALIGNMENT)

    def carve_staged(self, carve: Carve) -> QuantizedWeight:
        """Memory for the staged tensor."""
        rows, cols = self.destination.shape
        return weight_of(self.staged, rows, cols, carve)

    def turn(
        self, read: QuantizedWeight, target: QuantizedWeight, work: torch.Tensor, faster: Quantizer | None
    ) -> None:
        """Round the staged tensor into `target`; `work` as in quantize_into. Raises ModelError."""
        rows = target.rows
        step = max(1, tile_elements(read.device) // target.cols)
        for row in range(0, rows, step):
            part = slice(row, min(rows, row + step))
            values = dequantize(read.row_slice(part.start, part.stop))
            quantize_into(target.row_slice(part.start, part.stop), values, self.destination.key, work, faster)


def requantized(plan: WeightPlan) -> WeightPlan:
    """The plan with every matrix in small floats converted to the plan's target format."""
    return replace(plan, tensors=tuple(_turned(tensor, plan.aim) for tensor in plan.tensors))


def _turned(tensor: PlannedTensor, aim: Format | None) -> PlannedTensor:
    held = tensor.held
    target = turned_into(tensor.destination, aim)
    if tensor.stored is not None or not isinstance(held, Format) or held.name not in FLOATS or target is None:
        return tensor
    return StagedTensor(tensor.destination, target, None, tensor.readings, tensor.settle, held)
