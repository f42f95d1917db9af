"""The formats as data: their tensors, their bytes, and the largest error of a weight.

Largest error of one weight w of a group (s: its scale; half steps come from rounding to the nearest):
- int8: s / 2, s = largest |w| of the row / 127. Scales are fp32, so any finite weight fits.
- int4 symmetric: s / 2 if |w| <= 7.5 s, otherwise s; s = largest |w| of the group / 8: the extreme is exact, its
  negative is cut to 7 s.
- int4 asymmetric: s / 2, s = (largest - smallest) / 15; the smallest is the offset.
- fp8 (E4M3, read only): 2^-4 |w|, or 2^-10 s below 2^-6 s.
- nvfp4 (E2M1, read only): |w| / 4, or s / 4 below s; s = an E4M3 per 16 columns * an fp32 per matrix, kept per row.

Scales and offsets of int4 are fp16: each adds at most 2^-11 of itself (times the nibble), and 2^-25 below fp16's normal
range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .weight import BLOCK_COLUMNS, Format, QuantizedWeight

INT8 = Format("int8", 8, 0, True)
# One scale per row, as compressed-tensors stores channels; and blocks of 128 x 128 (DeepSeek-V3), spread over rows.
FP8_ROWS = Format("fp8", 8, 0, True)
FP8_BLOCKS = Format("fp8", 8, 128, True)
# 32 columns under a power of two (OCP MX). Exact, since the factor is widened to fp32.
MXFP8 = Format("fp8", 8, 32, True)
NVFP4 = Format("nvfp4", 4, 16, True)
DEFAULT_GROUP = 128
GROUPS = (128, 32)
# Largest magnitude in a symmetric int4 group: 8 times the largest fp16.
INT4_LARGEST = 8 * 65504

Carve: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def int4(group: int = DEFAULT_GROUP, *, symmetric: bool = True) -> Format:
    """int4 with `group` columns under one scale, a multiple of 32."""
    if group < BLOCK_COLUMNS or group % BLOCK_COLUMNS:
        raise ValueError(f"an int4 group of {group} columns; use a multiple of {BLOCK_COLUMNS}")
    return Format("int4", 4, group, symmetric)


# Formats that floating weights can be converted to, by the name of the choice.
CHOICES = {"int8": INT8, "int4": int4()}


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a quantized weight. `name` is the field of QuantizedWeight."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def title(held: Format) -> str:
    """Its name in messages and tables: int8, int4-g128, int4-g32-asym, fp8, nvfp4."""
    group = f"-g{held.group}" if held.group and held.name not in ("fp8", "nvfp4") else ""
    return held.name + group + ("" if held.symmetric else "-asym")


def weight_tensors(held: Format, rows: int, cols: int) -> tuple[WeightTensor, ...]:
    """The tensors of a weight [rows, cols] of this format, in the order in which they are stored."""
    types = {
        "int8": (torch.int8, torch.float32),
        "fp8": (torch.float8_e4m3fn, torch.float32),
        "int4": (torch.uint8, torch.float16),
        "nvfp4": (torch.uint8, torch.float8_e4m3fn),
    }
    numbers, scale = types[held.name]
    groups = held.groups(cols)
    found = [WeightTensor("data", (rows, held.row_bytes(cols)), numbers), WeightTensor("scales", (rows, groups), scale)]
    if not held.symmetric:
        found.append(WeightTensor("offsets", (rows, groups), scale))
    if held.name == "nvfp4":
        found.append(WeightTensor("factors", (rows, 1), torch.float32))
    return tuple(found)


def weight_of(held: Format, rows: int, cols: int, carve: Carve) -> QuantizedWeight:
    """A weight whose tensors come from `carve(shape, dtype)`, in the order of `weight_tensors`, with that content."""
    found = {piece.name: carve(piece.shape, piece.dtype) for piece in weight_tensors(held, rows, cols)}
    return QuantizedWeight(held, rows, cols, found["data"], found["scales"], found.get("offsets"), found.get("factors"))


def aligned_bytes(held: Format, rows: int, cols: int, alignment: int) -> int:
    """Bytes of a weight whose tensors each start at a multiple of `alignment`."""
    return sum(-(-piece.nbytes // alignment) * alignment for piece in weight_tensors(held, rows, cols))


def bits_a_weight(held: Format, cols: int) -> float:
    """Bits per weight in a row of `cols` columns, scales and offsets included."""
    return sum(piece.nbytes for piece in weight_tensors(held, 1, cols)) * 8 / cols
