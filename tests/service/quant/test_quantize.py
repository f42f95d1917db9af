"""Rounding to int8 and int4: within the stated bounds for any weights, exact where possible,
refused by name otherwise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import QUANTIZATIONS
from onedesk.service.errors import ModelError
from onedesk.service.quant.formats import (
    CHOICES,
    INT8,
    aligned_bytes,
    bits_a_weight,
    int4,
    title,
    weight_of,
    weight_tensors,
)
from onedesk.service.quant.quantize_weights import quantize, quantize_into
from onedesk.service.quant.weight import Format, dequantize, pack_nibbles, unpack_nibbles

FORMATS = [
    INT8,
    int4(),
    int4(32),
    int4(64),
    int4(symmetric=False),
    int4(32, symmetric=False),
    Format("int8", 8, 128, True),
]
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-30, -1e-12, 6e-8, 3e4, -3e4, 7.5, 8.0, -8.0, 0.5)


def largest_error(values: torch.Tensor, held: Format) -> torch.Tensor:
    """The bound of quant/formats.py for each weight [rows, cols], from the weights alone."""
    cols = values.shape[1]
    group = held.group or cols
    bound = torch.empty_like(values, dtype=torch.float64)
    for at in range(0, cols, group):
        part = values[:, at : at + group].double()
        high, low = part.amax(1, keepdim=True), part.amin(1, keepdim=True)
        most = torch.maximum(high.abs(), low.abs())
        if held.name == "int8":
            here = (most / 127 / 2).expand_as(part) * (1 + 1e-5)
        elif held.symmetric:
            step = most / 8
            here = torch.where(part.abs() <= 7.5 * step * (1 - 2**-10), step / 2, step) + most * 2**-11 + 8 * 2.0**-25
        else:
            here = (high - low) / 30 + (high - low) * 2**-11 + 2 * low.abs() * 2**-11 + 16 * 2.0**-25
            here = here.expand_as(part)
        bound[:, at : at + group] = here * (1 + 2**-10)
    return bound + 1e-36


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """Odd shapes; normal numbers of some magnitude, with special values, single outliers and groups of zeros."""
    rows, cols = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 31, 32, 33, 127, 128, 129, 480]) | st.integers(1, 300)),
    )
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    values *= 10.0 ** draw(st.integers(-9, 3))
    for _ in range(draw(st.integers(0, 3))):
        values[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = draw(st.sampled_from(SPECIAL))
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, cols - 1))
        values[draw(st.integers(0, rows - 1)), start : start + draw(st.integers(1, 140))] = draw(
            st.sampled_from([0.0, 1.0, -3e-4])
        )
    return values.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


@settings(max_examples=150, deadline=None)
@given(values=weights(), held=st.sampled_from(FORMATS))
def test_no_weight_is_further_off_than_its_format_says(values: torch.Tensor, held: Format) -> None:
    weight = quantize(values, held)
    error = (dequantize(weight).double() - values.double()).abs()
    assert (error <= largest_error(values, held)).all(), (error / largest_error(values, held)).max()
    assert weight.shape == values.shape
    assert [(t.shape, t.dtype) for t in weight.tensors] == [
        (p.shape, p.dtype) for p in weight_tensors(held, *values.shape)
    ]


@settings(max_examples=60, deadline=None)
@given(values=weights(), held=st.sampled_from(FORMATS), tile=st.integers(1, 2000))
def test_row_is_independent_of_tile(values: torch.Tensor, held: Format, tile: int) -> None:
    """Rows are quantized chunk by chunk while a file is read, and single ones again when a prompt needs them first."""
    whole = quantize(values, held)
    alone = quantize(values[-1:], held)
    assert all(torch.equal(t[-1:], one) for t, one in zip(whole.tensors, alone.tensors, strict=True))
    quantize_into(tiled := quantize(torch.zeros_like(values), held), values, "w", torch.empty(tile))
    assert all(torch.equal(t, other) for t, other in zip(whole.tensors, tiled.tensors, strict=True))


def test_representable_weights_round_trip() -> None:
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor([2.0**-9, 2.0**-3, 1.0])[:, None]
    eight = torch.randint(-127, 128, (3, 200), generator=generator).float()
    eight[:, 7] = 127
    assert torch.equal(dequantize(quantize(eight * scales, INT8)), eight * scales)
    four = torch.randint(-8, 8, (3, 256), generator=generator).float()
    four[:, ::100] = -8
    assert torch.equal(dequantize(quantize(four * scales, int4())), four * scales)
    offset = torch.randint(0, 16, (3, 256), generator=generator).float()
    offset[:, ::100], offset[:, 1::100] = 0, 15
    assert torch.equal(dequantize(quantize(offset * scales + 0.5, int4(symmetric=False))), offset * scales + 0.5)


@pytest.mark.parametrize("held", FORMATS, ids=title)
def test_zeros_stay_zeros_beside_one_huge_value(held: Format) -> None:
    values = torch.zeros(3, 300)
    values[1, 140] = 4e5 if held.bits == 8 else 3e4
    back = dequantize(quantize(values, held))
    assert back[1, 140] == pytest.approx(values[1, 140].item(), rel=1e-3)
    back[1, 140] = 0
    assert not back.any()


@pytest.mark.parametrize("held", FORMATS, ids=title)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_refused_with_tensor_name(held: Format, bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(4, 160, dtype=dtype)
    values[2, 130] = bad
    with pytest.raises(ModelError, match=r"layers\.3\.down has weights that are NaN or infinite; it is damaged"):
        quantize(values, held, "layers.3.down")


def test_magnitude_beyond_fp16_scale_is_refused_but_fits_int8() -> None:
    values = torch.ones(2, 64)
    values[0, 3] = -1e6
    for held in (int4(), int4(32, symmetric=False)):
        with pytest.raises(
            ModelError, match=r"w has a weight of magnitude 1e\+06; the scales of int4\S* are 16-bit.* at most 524,032"
        ):
            quantize(values, held, "w")
    assert dequantize(quantize(values, INT8))[0, 3] == -1e6


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 200),
    start=st.integers(0, 220),
    length=st.integers(0, 220),
    held=st.sampled_from(FORMATS),
)
def test_slices_match_the_whole(rows: int, cols: int, start: int, length: int, held: Format) -> None:
    weight = quantize(torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols)), held)
    whole = dequantize(weight)
    assert torch.equal(dequantize(weight, slice(start, start + length)), whole[:, start : start + length])
    assert torch.equal(dequantize(weight.row_slice(1, rows)), whole[1:])
    order = torch.tensor([rows - 1, 0, rows - 1])
    assert torch.equal(dequantize(weight.take_rows(order)), whole[order])


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 4), cols=st.integers(1, 100))
def test_nibbles_come_back_and_padding_means_zero(rows: int, cols: int) -> None:
    nibbles = torch.randint(0, 16, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(cols))
    packed = pack_nibbles(nibbles)
    assert packed.shape == (rows, -(-cols // 32) * 16)
    assert torch.equal(unpack_nibbles(packed, cols), nibbles)
    padding = unpack_nibbles(packed, packed.shape[1] * 2)[:, cols:]
    assert (padding == 8).all()


def test_a_block_has_columns_j_and_j_plus_16_in_byte_j() -> None:
    packed = pack_nibbles(
        torch.arange(64, dtype=torch.uint8).remainder(16)[None] // torch.tensor([1] * 32 + [2] * 32, dtype=torch.uint8)
    )
    assert packed[0, :16].tolist() == [j | j << 4 for j in range(16)]
    assert packed[0, 16:].tolist() == [j // 2 | (j // 2) << 4 for j in range(16)]


def test_sizes_are_those_of_the_tensors() -> None:
    for held in FORMATS:
        weight = weight_of(held, 5, 480, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        assert weight.nbytes == sum(piece.nbytes for piece in weight_tensors(held, 5, 480))
        assert aligned_bytes(held, 5, 480, 256) == sum(
            -(-piece.nbytes // 256) * 256 for piece in weight_tensors(held, 5, 480)
        )
    assert [
        bits_a_weight(held, 1024) for held in (INT8, int4(), int4(32), int4(symmetric=False), int4(32, symmetric=False))
    ] == [
        8 + 32 / 1024,
        4.125,
        4.5,
        4.25,
        5.0,
    ]
    assert [title(held) for held in FORMATS[:4]] == ["int8", "int4-g128", "int4-g32", "int4-g64"]
    assert ("none", *CHOICES) == QUANTIZATIONS
    with pytest.raises(ValueError, match="an int4 group of 48 columns"):
        int4(48)
