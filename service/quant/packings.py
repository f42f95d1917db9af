"""The tensors that published checkpoints store for a quantized matrix [rows, cols], and their conversion to ours.

Sources: the saving code of compressed-tensors 0.20, GPTQModel and AutoAWQ; DeepSeek-V3's and Qwen3-FP8's checkpoints
for block scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch

from ..errors import ModelError
from .damage import refuse_negative
from .formats import DEFAULT_GROUP, FP8_BLOCKS, FP8_ROWS, INT8, int4
from .layouts import (
    WORD,
    awq_nibbles,
    blocks_of_awq,
    blocks_of_gptq,
    blocks_of_rows,
    word_nibbles,
)
from .weight import BLOCK_BYTES, BLOCK_COLUMNS, Format, QuantizedWeight

# Converts `values`, the stored rows from `first` on, into a weight. The text names the stored tensor in messages.
Take: TypeAlias = Callable[[torch.Tensor, int, QuantizedWeight, str], None]
Finish: TypeAlias = Callable[[QuantizedWeight, str], None]

FLOATS = ("BF16", "F16", "F32")
BLOCK = 128  # rows and columns of an fp8 block
BYTES_OF_WORD = 4


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored tensor: the suffix of its name, types and shape, and its conversion.

    Either its bytes are a field of the weight (`piece`), or `take` converts its rows, `step` of them at a time (the
    last may be fewer).
    """

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    piece: str = ""
    take: Take | None = None
    step: int = 1
    optional: bool = False


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """All stored tensors of one matrix, and its format in memory. `finish` is called after
    all of them were converted.
    """

    held: Format
    parts: tuple[StoredPart, ...]
    finish: Finish | None = None


class Packing(Protocol):
    """How a checkpoint stores its matrices. `ignored`: suffixes of tensors that belong to it and are not needed."""

    @property
    def title(self) -> str: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def layout(self, rows: int, cols: int) -> PackedLayout:
        """The stored tensors of a matrix [rows, cols]."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 (E4M3) with a factor per block of 128 x 128, in the tensor with the suffix `scale`."""

    title: str
    scale: str
    ignored: tuple[str, ...] = ("input_scale",)

    def layout(self, rows: int, cols: int) -> PackedLayout:
        shape = (-(-rows // BLOCK), -(-cols // BLOCK))
        scale = StoredPart(self.scale, FLOATS, shape, take=_take_block_scales)
        return PackedLayout(FP8_BLOCKS, (StoredPart("weight", ("F8_E4M3",), (rows, cols), piece="data"), scale))


@dataclass(frozen=True, slots=True)
class Rows8:
    """INT8 or FP8 numbers as they are, with a factor per row, for the whole matrix (`whole`), or per `group` columns of
    a row.
    """

    title: str
    number: str  # I8 or F8_E4M3
    whole: bool = False
    group: int = 0
    ignored: tuple[str, ...] = ("input_scale", "input_zero_point", "weight_zero_point")

    def layout(self, rows: int, cols: int) -> PackedLayout:
        held = FP8_ROWS if self.number == "F8_E4M3" else Format("int8", 8, self.group, True)
        shape = (1,) if self.whole else (rows, held.groups(cols))
        scale = StoredPart("weight_scale", FLOATS, shape, take=_take_whole_scale if self.whole else _take_row_scales)
        return PackedLayout(held, (StoredPart("weight", (self.number,), (rows, cols), piece="data"), scale))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """compressed-tensors' pack-quantized: words along columns, 4 or 8 bits, `group` columns per factor (0: the whole
    row).
    """

    title: str
    bits: int
    group: int
    symmetric: bool
    ignored: tuple[str, ...] = ("weight_shape", "input_scale", "input_zero_point")

    def layout(self, rows: int, cols: int) -> PackedLayout:
        held = _held(self.bits, self.group, self.symmetric)
        stored = self.group or cols
        spread = partial(_take_spread_scales, stored=stored)
        parts = [
            StoredPart(
                "weight_packed",
                ("I32",),
                (rows, -(-cols * self.bits // 32)),
                take=_take_words if self.bits == 4 else _take_bytes,
            ),
            StoredPart("weight_scale", FLOATS, (rows, -(-cols // stored)), take=spread),
            StoredPart(
                "weight_g_idx",
                ("I32",),
                (cols,),
                take=partial(_check_order, stored=stored, field="actorder"),
                optional=True,
            ),
        ]
        if self.symmetric:
            return PackedLayout(held, tuple(parts))
        zeros = partial(_take_row_zeros, stored=stored)
        parts.append(StoredPart("weight_zero_point", ("I32",), (-(-rows // WORD), -(-cols // stored)), take=zeros))
        return PackedLayout(held, tuple(parts), _offsets_of_zeros)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ: words along columns, transposed, 4 or 8 bits. `bias`: stored zero points are smaller by this."""

    title: str
    bits: int
    group: int
    symmetric: bool
    bias: int
    ignored: tuple[str, ...] = ()

    def layout(self, rows: int, cols: int) -> PackedLayout:
        held = _held(self.bits, self.group, self.symmetric)
        stored, word = self.group or cols, 32 // self.bits
        groups = -(-cols // stored)
        zeros: Take = partial(_take_zeros, stored=stored, bias=self.bias)
        if self.symmetric:
            zeros = partial(_check_zeros, bits=self.bits, bias=self.bias)
        take, step = (_take_gptq_words, BLOCK_COLUMNS // WORD) if self.bits == 4 else (_take_gptq_bytes, 1)
        parts = (
            StoredPart("qweight", ("I32",), (-(-cols // word), rows), take=take, step=step),
            StoredPart("scales", FLOATS, (groups, rows), take=partial(_take_group_scales, stored=stored)),
            StoredPart("qzeros", ("I32",), (groups, -(-rows // word)), take=zeros),
            StoredPart(
                "g_idx", ("I32",), (cols,), take=partial(_check_order, stored=stored, field="desc_act"), optional=True
            ),
        )
        return PackedLayout(held, parts, None if self.symmetric else _offsets_of_zeros)


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ in its gemm order: words along rows, transposed, always with zero points."""

    title: str
    group: int
    ignored: tuple[str, ...] = ()

    def layout(self, rows: int, cols: int) -> PackedLayout:
        held = _held(4, self.group, symmetric=False)
        stored = self.group or cols
        groups = -(-cols // stored)
        parts = (
            StoredPart("qweight", ("I32",), (cols, -(-rows // WORD)), take=_take_awq_words, step=BLOCK_COLUMNS),
            StoredPart("scales", FLOATS, (groups, rows), take=partial(_take_group_scales, stored=stored)),
            StoredPart("qzeros", ("I32",), (groups, -(-rows // WORD)), take=partial(_take_awq_zeros, stored=stored)),
        )
        return PackedLayout(held, parts, _offsets_of_zeros)


def _held(bits: int, group: int, symmetric: bool) -> Format:
    """Our format for stored groups: 128, 64 or 32 columns, whichever divides theirs. Whole
    rows become groups of 128.
    """
    own = next((size for size in (DEFAULT_GROUP, 64, BLOCK_COLUMNS) if group % size == 0), 0)
    if not own:
        raise ModelError(
            f"config.json has quantization_config.group_size = {group}; supported are -1 and multiples of"
            f" {BLOCK_COLUMNS}"
        )
    if bits == 8:
        return INT8 if group == 0 else Format("int8", 8, own, True)
    return int4(own, symmetric=symmetric)


# Numbers


def _take_words(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    target.data[first : first + values.shape[0]] = blocks_of_rows(values)[:, : target.data.shape[1]]


def _take_bytes(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    signed = (values.view(torch.uint8)[:, : target.cols] ^ 128).view(torch.int8)
    target.data[first : first + values.shape[0]] = signed


def _take_gptq_words(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    blocks = blocks_of_gptq(values)
    at = first * WORD // BLOCK_COLUMNS * BLOCK_BYTES
    target.data[:, at : at + blocks.shape[1]] = blocks


def _take_gptq_bytes(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    signed = (values.t().contiguous().view(torch.uint8) ^ 128).view(torch.int8)
    at = first * BYTES_OF_WORD
    target.data[:, at : at + signed.shape[1]] = signed[:, : target.cols - at]


def _take_awq_words(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    blocks = blocks_of_awq(values)[: target.rows]
    at = first // BLOCK_COLUMNS * BLOCK_BYTES
    target.data[:, at : at + blocks.shape[1]] = blocks


# Scales


def _checked(values: torch.Tensor, target: QuantizedWeight, name: str, first: int = 0) -> torch.Tensor:
    """Scales in the type of the weight. Raises ModelError for those that it cannot hold."""
    scales = values.to(target.scales.dtype)
    if not bool(torch.isfinite(scales).all()):
        beyond = ", or beyond a 16-bit float's 65,504" if scales.dtype == torch.float16 else ""
        raise ModelError(f"{name} has scales that are NaN or infinite{beyond}; the checkpoint is damaged: get it again")
    if target.format.name == "fp8":
        refuse_negative(scales, first, name)
    return scales


def _take_block_scales(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    spread = _checked(values, target, name, first).repeat_interleave(BLOCK, 0)
    target.scales[first * BLOCK : first * BLOCK + spread.shape[0]] = spread[: target.rows - first * BLOCK]


def _take_whole_scale(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    target.scales[:] = _checked(values, target, name).view(1, 1)


def _take_row_scales(values: torch.Tensor, first: int, target: QuantizedWeight, name: str) -> None:
    target.scales[first : first + values.shape[0]] = _checked(values, target, name, first)


def _take_spread_scales(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int) -> None:
    scales = _checked(values, target, name)
    target.scales[first : first + values.shape[0]] = scales[:, _stored_groups(target, stored)]


def _take_group_scales(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int) -> None:
    """Stored with one row per group of columns."""
    mine = _stored_groups(target, stored)
    here = ((mine >= first) & (mine < first + values.shape[0])).nonzero()[:, 0]
    target.scales[:, here] = _checked(values, target, name).t()[:, mine[here] - first]


def _stored_groups(target: QuantizedWeight, stored: int) -> torch.Tensor:
    """For each of our groups the index of the stored group that contains it, of `stored` columns; int64 [groups]."""
    return torch.arange(target.scales.shape[1], device=target.device) * target.group // stored


# Zero points are first kept in the offsets, exact in fp16, and become offsets once the scales are there too.


def _take_row_zeros(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int) -> None:
    """Stored in words along rows: int32 [rows / 8, groups]."""
    zeros = word_nibbles(values.t()).t()[: target.rows - first * WORD]
    _offsets(target)[first * WORD : first * WORD + zeros.shape[0]] = zeros[:, _stored_groups(target, stored)].half()


def _take_zeros(
    values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int, bias: int
) -> None:
    """GPTQ's: int32 [groups, rows / 8]. With `bias` 1, a stored 15 means zero point 0: the subtraction wrapped."""
    _set_zeros((word_nibbles(values) + bias) & 15, first, target, stored)


def _take_awq_zeros(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int) -> None:
    _set_zeros(awq_nibbles(values), first, target, stored)


def _set_zeros(zeros: torch.Tensor, first: int, target: QuantizedWeight, stored: int) -> None:
    """zeros [stored groups from `first` on, rows]."""
    mine = _stored_groups(target, stored)
    here = ((mine >= first) & (mine < first + zeros.shape[0])).nonzero()[:, 0]
    _offsets(target)[:, here] = zeros[:, : target.rows].t()[:, mine[here] - first].half()


def _check_zeros(values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, bits: int, bias: int) -> None:
    """A symmetric checkpoint may store zero points, but they must be the middle of the range."""
    wanted = (1 << (bits - 1)) - bias
    found = word_nibbles(values) if bits == 4 else values.view(torch.uint8)
    if bool((found[:, : target.rows] != wanted).any()):
        raise ModelError(
            f"{name} has zero points other than {wanted}, but config.json has quantization_config.sym = true; "
            "the config and the weights belong to different models"
        )


def _offsets(target: QuantizedWeight) -> torch.Tensor:
    if target.offsets is None:
        raise ValueError("a symmetric weight has no offsets")
    return target.offsets


def _offsets_of_zeros(target: QuantizedWeight, name: str) -> None:
    """(q - zero) * scale = q * scale + offset: the offset is rounded to fp16, by at most 2^-11 of itself."""
    offsets = _offsets(target)
    offsets.copy_(-(offsets.float() * target.scales.float()))
    if not bool(torch.isfinite(offsets).all()):
        raise ModelError(
            f"{name} has zero points whose offsets are beyond a 16-bit float's 65,504; the checkpoint is damaged: get"
            " it again"
        )


def _check_order(
    values: torch.Tensor, first: int, target: QuantizedWeight, name: str, *, stored: int, field: str
) -> None:
    """Columns must belong to the groups in order."""
    wanted = torch.arange(first, first + values.shape[0], device=values.device) // stored
    if not torch.equal(values.long(), wanted):
        raise ModelError(
            f"{name} groups the columns by activation ({field}); "
            f"only groups of neighbouring columns are supported: get a checkpoint that was made without {field}"
        )
