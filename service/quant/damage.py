"""Finds scales that no quantizer writes: negative ones, and zeros over numbers that are not zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ModelError
from .weight import QuantizedWeight, unpack_nibbles

# Scales checked together, and numbers checked under zero scales: a few MB of memory for any matrix.
SCALES_AT_ONCE = 1 << 20
NUMBERS_AT_ONCE = 1 << 22


def refuse_negative(scales: torch.Tensor, first: int, name: str) -> None:
    """Raise ModelError for scales [rows, ..] below zero. `first` is the index of the first row in the tensor `name`."""
    below = scales < 0
    if bool(below.any()):
        where = [int(at) for at in below.nonzero()[0]]
        where[0] += first
        raise ModelError(
            f"{name} has a scale below zero at {where} ({scales[below][0].item():g}); the checkpoint is damaged: get it"
            " again"
        )


def zero_scaled(weight: QuantizedWeight) -> tuple[int, int] | None:
    """Row and group of the first scale (times the factor of its row) that is 0 over numbers that are not, or None.

    Blocks of zeros with a scale of 0 are correct. For fp8 and nvfp4.
    """
    groups = weight.scales.shape[1]
    step = max(1, SCALES_AT_ONCE // groups)
    for row in range(0, weight.rows, step):
        part = weight.row_slice(row, min(row + step, weight.rows))
        zero = part.scales.float() == 0
        if part.factors is not None:
            zero |= part.factors == 0
        rows = zero.any(1).nonzero()[:, 0]
        for some in rows.split(max(1, NUMBERS_AT_ONCE // weight.cols)):
            wrong = zero[some] & _any_numbers(part.data.view(torch.uint8)[some], weight, groups)
            if bool(wrong.any()):
                at = wrong.nonzero()[0].tolist()
                return row + int(some[at[0]]), at[1]
    return None


def refuse_zero_scales(weight: QuantizedWeight, parts: Iterable[tuple[str, int]]) -> None:
    """Raise ModelError for what `zero_scaled` finds. `parts`: name and row count of each tensor in the weight."""
    found = zero_scaled(weight)
    if found is None:
        return
    row, group = found
    for name, rows in parts:
        if row < rows:
            raise ModelError(
                f"{name} has numbers other than 0 under a scale of 0 at row {row}, column {group * weight.group}; "
                "the checkpoint is damaged: get it again"
            )
        row -= rows


def _any_numbers(data: torch.Tensor, weight: QuantizedWeight, groups: int) -> torch.Tensor:
    """Whether a group of the rows `data` has a number other than 0: bool [rows, groups]."""
    found = unpack_nibbles(data, weight.cols) & 7 if weight.format.bits == 4 else data & 127  # without the sign
    return (
        torch.nn.functional.pad(found, (0, groups * weight.group - weight.cols))
        .view(len(data), groups, weight.group)
        .any(2)
    )
