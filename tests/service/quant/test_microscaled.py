"""NVFP4 and MXFP8: every number means what its bits mean, and products match the dequantized weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.config import load_config
from onedesk.service.kernels.cpu.compile import compile_library
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.quant.formats import (
    MXFP8,
    NVFP4,
    aligned_bytes,
    bits_a_weight,
    title,
    weight_of,
    weight_tensors,
)
from onedesk.service.quant.microscaled import Mxfp8, Nvfp4
from onedesk.service.quant.packings import Packing
from onedesk.service.quant.weight import E2M1, QuantizedWeight, dequantize
from published import mxfp8, nvfp4

SHAPES = [(5, 16), (3, 48), (4, 80), (2, 176), (6, 512)]


def taken(packing: Packing, rows: int, cols: int, stored: dict[str, torch.Tensor], step: int = 2) -> QuantizedWeight:
    """The weight of stored tensors, converted `step` rows at a time."""
    layout = packing.layout(rows, cols)
    weight = weight_of(layout.held, rows, cols, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    for part in layout.parts:
        values = stored[part.suffix]
        if part.take is None:
            weight.data.copy_(values)
        elif part.shape == (1,):
            part.take(values.view(1), 0, weight, part.suffix)
        else:
            for first in range(0, rows, step):
                part.take(values[first : first + step], first, weight, part.suffix)
    return weight


def meant(nibbles: int) -> float:
    """E2M1 from its bits: sign, exponent with bias 1, mantissa."""
    sign, exponent, mantissa = nibbles >> 3, nibbles >> 1 & 3, nibbles & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return math.copysign(value, -1 if sign else 1)


def test_the_sixteen_numbers_are_those_of_their_bits():
    assert [math.copysign(value, value) for value in E2M1] == [meant(nibbles) for nibbles in range(16)]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**31),
    divides=st.booleans(),
    step=st.integers(1, 6),
)
def test_nvfp4_means_number_times_scale_times_factor(
    shape: tuple[int, int], seed: int, divides: bool, step: int
) -> None:
    stored, wanted = nvfp4(divides=divides)(*shape, torch.Generator().manual_seed(seed))
    packing = Nvfp4("t", "weight_packed", "weight_global_scale", True) if divides else Nvfp4("t")
    weight = taken(packing, *shape, stored, step)
    assert torch.equal(dequantize(weight), wanted)
    rows = torch.tensor([shape[0] - 1, 0])
    assert torch.equal(dequantize(weight.take_rows(rows)), wanted[rows])
    assert torch.equal(dequantize(weight.row_slice(1, shape[0])), wanted[1:])
    assert torch.equal(dequantize(weight, slice(5, shape[1] - 3)), wanted[:, 5:-3])
    other = taken(packing, *shape, nvfp4(divides=divides)(*shape, torch.Generator().manual_seed(seed + 1))[0])
    other.put_rows(rows, weight.take_rows(rows))
    assert torch.equal(dequantize(other)[rows], wanted[rows])


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**31))
def test_mxfp8_means_number_times_a_power_of_two(shape: tuple[int, int], seed: int) -> None:
    stored, wanted = mxfp8(*shape, torch.Generator().manual_seed(seed))
    assert torch.equal(dequantize(taken(Mxfp8("t"), *shape, stored)), wanted)


@pytest.mark.parametrize("exponent", [0, 1, 127, 254])
def test_every_power_of_two_is_held_the_smallest_too(exponent: int):
    stored = {
        "weight": torch.ones(1, 32).to(torch.float8_e4m3fn),
        "weight_scale": torch.full((1, 1), exponent, dtype=torch.uint8),
    }
    assert dequantize(taken(Mxfp8("t"), 1, 32, stored))[0, 0].item() == 2.0 ** (exponent - 127)


def test_what_they_take_in_memory():
    assert title(NVFP4) == "nvfp4"
    assert title(MXFP8) == "fp8"
    assert bits_a_weight(NVFP4, 2560) == pytest.approx(4.5, abs=0.02)  # 32 bits per row for the factor of the matrix
    assert bits_a_weight(MXFP8, 2560) == 9.0
    assert [piece.name for piece in weight_tensors(NVFP4, 640, 2560)] == ["data", "scales", "factors"]
    assert aligned_bytes(NVFP4, 640, 2560, 256) == 640 * 2560 // 2 + 640 * 160 + 640 * 4


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_are_those_of_the_meaning(tokens: int) -> None:
    """Both are compiled. MXFP8 is FP8 with groups of 32. NVFP4 meets activations of 15 bits in a few rows, and fp32 in
    many.
    """
    generator = torch.Generator().manual_seed(tokens)
    library, why_not = compile_library(load_config(None).cache)
    assert library is not None, why_not
    kernels = CpuKernels(library)
    for packing, make in ((Nvfp4("t"), nvfp4(divides=False)), (Mxfp8("t"), mxfp8)):
        stored, wanted = make(96, 512, generator)
        weight = taken(packing, 96, 512, stored)
        x = torch.randn(tokens, 512, generator=generator)
        truth = (x.double() @ wanted.double().t()).float()
        largest = (x.abs().double() @ wanted.abs().double().t()).float()
        for kind in (kernels, ReferenceKernels()):
            found = kind.linear(x, weight, torch.empty(tokens, 96))
            bound = largest * 512 * 2**-24  # sums of 512 in fp32
            if kind is kernels and isinstance(packing, Nvfp4):
                spans = x.abs().view(tokens, -1, 16).amax(2).repeat_interleave(16, 1)
                bound += spans @ wanted.abs().t() / 65534
            assert ((found - truth).abs() <= bound).all()
    assert (kernels.plain, kernels.compiled) == (0, 2)


def test_requantizing_to_int8_loses_less_than_nvfp4() -> None:
    """The result of `onedesk quantize`: a factor per row adds 0.7 % to the squared error of rounding to NVFP4."""
    from onedesk.service.quant.formats import INT8
    from onedesk.service.quant.quantize_weights import quantize

    generator = torch.Generator().manual_seed(0)
    original = torch.randn(256, 2048, generator=generator)
    groups = original.view(256, -1, 16)
    factor = original.abs().max() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn).float() * factor
    values = torch.tensor(E2M1[:8])
    nearest = values[((groups.abs() / scale[:, :, None])[..., None] - values).abs().argmin(-1)]
    rounded = (nearest * groups.sign() * scale[:, :, None]).view(256, 2048)
    own = (rounded - original).square().mean()
    more = (dequantize(quantize(rounded, INT8)) - rounded).square().mean()
    assert more < own / 50
