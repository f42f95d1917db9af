"""Checkpoints whose numbers are small floats under small groups of scales: NVFP4 and MXFP8.

NVFP4: E2M1 numbers, two per byte with the earlier column in the low nibble, an E4M3 scale per 16 columns, and one fp32
per matrix. ModelOpt multiplies by it (weight_scale_2), compressed-tensors divides by it (weight_global_scale). MXFP8:
E4M3 numbers, and per 32 columns an E8M0, the power of two 2^(byte - 127); 255 is NaN. Sources: the exports of ModelOpt
0.44 and compressed-tensors 0.20, OCP MX 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..errors import ModelError
from .damage import refuse_negative
from .formats import MXFP8, NVFP4
from .layouts import blocks_of_pairs
from .packings import PackedLayout, StoredPart
from .weight import QuantizedWeight

E8M0_NAN = 255
# Scales of a quantized KV cache. Ours holds keys and values unquantized.
CACHE_SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """NVFP4 with the numbers in `numbers` and the factor of the matrix in `factor`, a divisor if `divides`."""

    title: str
    numbers: str = "weight"
    factor: str = "weight_scale_2"
    divides: bool = False
    ignored: tuple[str, ...] = ("input_scale", *CACHE_SCALES)

    def layout(self, rows: int, cols: int) -> PackedLayout:
        parts = (
            StoredPart(self.numbers, ("U8",), (rows, -(-cols // 2)), take=_take_pairs),
            StoredPart("weight_scale", ("F8_E4M3",), (rows, NVFP4.groups(cols)), take=_take_scales),
            StoredPart(self.factor, ("F32",), (1,), take=partial(_take_factor, divides=self.divides)),
        )
        return PackedLayout(NVFP4, parts)


@dataclass(frozen=True, slots=True)
class Mxfp8:
    """MXFP8: numbers as they are, scales widened to fp32."""

    title: str
    ignored: tuple[str, ...] = ("input_scale", *CACHE_SCALES)

    def layout(self, rows: int, cols: int) -> PackedLayout:
        parts = (
            StoredPart("weight", ("F8_E4M3",), (rows, cols), piece="data"),
            StoredPart("weight_scale", ("U8", "F8_E8M0"), (rows, MXFP8.groups(cols)), take=_take_exponents),
        )
        return PackedLayout(MXFP8, parts)


def _take_pairs(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    target.data[first : first + values.shape[0]] = blocks_of_pairs(values)[:, : target.data.shape[1]]


def _take_scales(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    scales = values.float()
    if not bool(torch.isfinite(scales).all()):  # E4M3 has no infinity
        raise ModelError(f"{name} has scales that are NaN; the checkpoint is damaged: get it again")
    refuse_negative(scales, first, name)
    target.scales.view(torch.uint8)[first : first + values.shape[0]] = values.view(torch.uint8)


def _take_factor(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, divides: bool) -> None:
    if target.factors is None:
        raise ValueError("only nvfp4 has factors")
    stored = values.reshape(1).float()
    factor = stored.reciprocal() if divides else stored
    if not bool(torch.isfinite(factor).all()):
        what = "that is zero, NaN or infinite" if divides else "that is NaN or infinite"
        raise ModelError(f"{name} is a factor {what} ({stored.item():g}); the checkpoint is damaged: get it again")
    refuse_negative(factor, first, name)
    target.factors[:] = factor


def _take_exponents(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    exponents = values.view(torch.uint8)
    if bool((exponents == E8M0_NAN).any()):
        raise ModelError(f"{name} has scales that are NaN; the checkpoint is damaged: get it again")
    target.scales[first : first + values.shape[0]] = torch.exp2(exponents.float() - 127)
