"""Matrices that a checkpoint stores column by column, several per tensor: read one at a time and transposed on
arrival.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ..loader.header import TensorInfo
from ..quant.quantize_weights import Quantizer, quantize_into
from ..quant.weight import Format, QuantizedWeight, Weight
from .reading import Reading, Settle
from .spec import Source


def as_stored(source: Source, info: TensorInfo) -> Source:
    """The source as the file has it. Checkpoints that transformers has saved again store rows; the shape tells
    which.
    """
    if not source.by_columns:
        return source
    count, columns, rows = source.stored
    by_rows = (count, rows, columns)
    return replace(source, stored=by_rows, by_columns=False) if tuple(info.shape) == by_rows else source


def read_by_columns(
    source: Source, info: TensorInfo, turned: Format | None
) -> tuple[tuple[Reading, ...], Settle | None]:
    """How the matrices of `info`, stored [count, columns, rows], are read into rows [count * rows, columns]; `turned`:
    the target format.

    Quantized matrices are transposed one by one while they are read, others in place when all bytes have arrived.
    """
    count, columns, rows = source.stored
    size = info.nbytes // count
    name = f"{info.source.shown}: tensor {info.name}"

    def take(
        values: torch.Tensor, first: int, target: QuantizedWeight, work: torch.Tensor, faster: Quantizer | None
    ) -> None:
        quantize_into(target, values.t().contiguous(), name, work, faster)

    pieces = [
        replace(info, shape=(columns, rows), start=info.start + index * size, nbytes=size) for index in range(count)
    ]
    if turned is None:
        readings = (Reading(piece, index * rows, rows) for index, piece in enumerate(pieces))
        return tuple(readings), partial(_turn, count)
    step = columns  # a whole matrix
    readings = (
        Reading(piece, index * rows, rows, take=take, step=step, most=size, rowwise=False)
        for index, piece in enumerate(pieces)
    )
    return tuple(readings), None


def _turn(count: int, target: Weight) -> None:
    """Transpose each matrix in place, from columns to rows."""
    if isinstance(target, torch.Tensor):
        rows, columns = target.shape[0] // count, target.shape[1]
        for piece in target.view(count, rows, columns):
            piece.copy_(piece.reshape(columns, rows).t().clone())
