"""The formats as data: what each is made of, how many bytes it takes, and how far a weight may be from what it was.

Largest error of one weight w of a group (s: its scale; halves of a step come from rounding to the nearest):
- int8: s / 2, s = largest |w| of the row / 127. Scales are fp32, so any finite weight can be held.
- int4 symmetric: s / 2 where |w| <= 7.5 s, else s, s = largest |w| of the group / 8: the extreme is met, its negative cut to 7 s.
- int4 asymmetric: s / 2, s = (largest - smallest) / 15, the smallest being the offset.
Scales and offsets of int4 are fp16: each adds at most 2^-11 of itself (times the nibble), and 2^-25 below fp16's normal range.
- fp8 (E4M3, read only): 2^-4 |w|, or 2^-10 s for what is below 2^-6 s.
- nvfp4 (E2M1, read only): |w| / 4, or s / 4 for what is below s; s = an E4M3 for 16 columns * an fp32 for the matrix, kept for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .weight import BLOCK_COLUMNS, Format, QuantizedWeight

INT8 = Format("int8", 8, 0, True)
# One scale a row, as compressed-tensors stores channels; and blocks of 128 x 128 (DeepSeek-V3's), spread to rows.
FP8_ROWS = Format("fp8", 8, 0, True)
FP8_BLOCKS = Format("fp8", 8, 128, True)
# 32 columns under a power of two (OCP MX); exact, since the factor is widened to fp32.
MXFP8 = Format("fp8", 8, 32, True)
NVFP4 = Format("nvfp4", 4, 16, True)
DEFAULT_GROUP = 128
GROUPS = (128, 32)
# The largest magnitude that a symmetric int4 group can hold: 8 times fp16's largest.
INT4_LARGEST = 8 * 65504

Carve: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def int4(group: int = DEFAULT_GROUP, *, symmetric: bool = True) -> Format:
    """int4 with `group` columns under one scale, a multiple of 32."""
    if group < BLOCK_COLUMNS or group % BLOCK_COLUMNS:
        raise ValueError(f"an int4 group of {group} columns; use a multiple of {BLOCK_COLUMNS}")
    return Format("int4", 4, group, symmetric)


# What a checkpoint's floating weights are turned into, by the name of the choice.
CHOICES = {"int8": INT8, "int4": int4()}


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a quantized weight: `name` is the field of QuantizedWeight."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def title(held: Format) -> str:
    """How messages and tables name it: int8, int4-g128, int4-g32-asym, fp8, nvfp4."""
    group = f"-g{held.group}" if held.group and held.name not in ("fp8", "nvfp4") else ""
    return held.name + group + ("" if held.symmetric else "-asym")


def weight_tensors(held: Format, rows: int, cols: int) -> tuple[WeightTensor, ...]:
    """The tensors that make a weight [rows, cols] of this format, in the order in which they are stored."""
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
    """A weight whose tensors come from `carve(shape, dtype)`, in the order of `weight_tensors`; their content is whatever that gives."""
    found = {piece.name: carve(piece.shape, piece.dtype) for piece in weight_tensors(held, rows, cols)}
    return QuantizedWeight(held, rows, cols, found["data"], found["scales"], found.get("offsets"), found.get("factors"))


def aligned_bytes(held: Format, rows: int, cols: int, alignment: int) -> int:
    """Bytes of a weight whose tensors each begin at a multiple of `alignment`."""
    return sum(-(-piece.nbytes // alignment) * alignment for piece in weight_tensors(held, rows, cols))


def bits_a_weight(held: Format, cols: int) -> float:
    """Bits that one weight of a row of `cols` takes, scales and offsets included."""
    return sum(piece.nbytes for piece in weight_tensors(held, 1, cols)) * 8 / cols
