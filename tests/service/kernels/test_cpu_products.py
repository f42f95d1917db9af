"""CPU products of any format and size stay within their stated bound, with the same bits in any batching."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.forward_batch import HeadShape, NormWeight
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.quant.formats import (
    FP8_BLOCKS,
    FP8_ROWS,
    INT8,
    MXFP8,
    NVFP4,
    int4,
)
from onedesk.service.quant.weight import Format, QuantizedWeight, Weight, dequantize

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = {
    "int8": INT8,
    "int8-g32": Format("int8", 8, 32, True),
    "int8-g64": Format("int8", 8, 64, True),
    "int8-g256": Format("int8", 8, 256, True),
    "int4-g128": int4(128),
    "int4-g32": int4(32),
    "int4-g128-asym": int4(128, symmetric=False),
    "int4-g32-asym": int4(32, symmetric=False),
    "fp8": FP8_ROWS,
    "fp8-blocks": FP8_BLOCKS,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}
FORMATS = [*FLOATS, *QUANTIZED]
EPS = 1e-6


def random_weight(name: str, rows: int, cols: int, generator: torch.Generator) -> Weight:
    """Every number that the format can hold may occur; some groups are all zeros."""
    if name in FLOATS:
        return torch.randn(rows, cols, generator=generator).to(FLOATS[name])
    held = QUANTIZED[name]
    groups = held.groups(cols)
    scales = torch.rand(rows, groups, generator=generator).mul_(0.1)
    scales[torch.rand(rows, groups, generator=generator) < 0.1] = 0
    if held.name == "nvfp4":
        data = torch.randint(0, 256, (rows, held.row_bytes(cols)), generator=generator, dtype=torch.uint8)
        bits = torch.randint(0, 127, scales.shape, generator=generator, dtype=torch.uint8)  # 127 is a NaN
        bits[scales == 0] = 0
        factors = torch.rand(rows, 1, generator=generator) * 1e-3
        return QuantizedWeight(held, rows, cols, data, bits.view(torch.float8_e4m3fn), None, factors)
    if held.bits == 4:
        data = torch.randint(0, 256, (rows, held.row_bytes(cols)), generator=generator, dtype=torch.uint8)
        offsets = None if held.symmetric else torch.randn(rows, groups, generator=generator).half()
        return QuantizedWeight(held, rows, cols, data, scales.half(), offsets)
    if held.name == "fp8":
        bits = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
        bits[(bits & 127) == 127] = 0  # the two NaNs
        return QuantizedWeight(held, rows, cols, bits.view(torch.float8_e4m3fn), scales)
    return QuantizedWeight(
        held, rows, cols, torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8), scales
    )


def random_rows(kind: str, count: int, cols: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(count, cols, generator=generator)
    if kind == "zeros":
        x.zero_()
    elif kind == "one huge value":  # as some residual channels of trained models
        x[:, torch.randint(0, cols, (1,), generator=generator)] = 3e4
    elif kind == "wide range":
        x *= 10 ** torch.empty(cols).uniform_(-6, 3, generator=generator)
    elif kind == "tiny":
        x *= 1e-20
    return x


@dataclass
class Exact:
    """x W^T in fp64, and the bound of each result."""

    values: torch.Tensor
    bound: torch.Tensor


def exact(x: torch.Tensor, weight: Weight) -> Exact:
    wide, stored = x.double(), dequantize(weight).double() if isinstance(weight, QuantizedWeight) else weight.double()
    size = wide.abs() @ stored.abs().t()
    # an fp32 sum in at least 4 lanes, each step of which rounds by 2^-24
    rounding = (x.shape[1] / 4 + 8) * 2**-24
    bound = rounding * size + 1e-30
    if isinstance(weight, QuantizedWeight) and weight.format.name in ("int8", "int4", "nvfp4"):
        if weight.format.name == "int4":  # nibbles are summed before their zero is subtracted
            shift = weight.offsets if weight.offsets is not None else -8 * weight.scales
            bound += rounding * wide.abs() @ spread(shift, weight).abs().t()
        span = (
            16
            if weight.format.name == "nvfp4"
            else 128
            if weight.group % 128 == 0 or weight.scales.shape[1] == 1
            else 64
            if weight.group % 64 == 0
            else 32
        )
        for from_ in range(0, weight.cols, span):
            largest = wide[:, from_ : from_ + span].abs().amax(1, keepdim=True)
            bound += (
                largest
                / (65278 if weight.format.name == "nvfp4" else 65534)
                * stored[:, from_ : from_ + span].abs().sum(1)
            )
    return Exact(wide @ stored.t(), bound)


def spread(values: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return values.double().repeat_interleave(weight.group, dim=1)[:, : weight.cols]


def normed(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def extreme(kind: str, rows: int, cols: int) -> tuple[QuantizedWeight, torch.Tensor]:
    """An NVFP4 weight and an x [cols] whose integers, digits or scales are as large, or as far apart, as possible."""
    x, column = torch.ones(cols), torch.arange(cols)
    data = torch.full((rows, NVFP4.row_bytes(cols)), 0x77 if kind != "least" else 0xFF, dtype=torch.uint8)  # 6 or -6
    bits = torch.full((rows, NVFP4.groups(cols)), 126, dtype=torch.uint8)  # 448
    if kind == "alternating":
        data.fill_(0xF7)
        x[column % 32 >= 16] = -1
    elif kind == "low digits":  # 128 and 32,384 of 32,639: the lower digit is -128
        x = torch.where(column % 16 == 0, 1.0, torch.where(column % 2 == 0, 128 / 32639, 32384 / 32639))
    elif kind == "scales apart":
        bits[:, 1::2] = 1  # 2^-9
        bits[:, 2::4] = 0
        data.view(rows, -1, 16)[:, :, :] = 0x71
    return QuantizedWeight(
        NVFP4, rows, cols, data, bits.view(torch.float8_e4m3fn), None, torch.full((rows, 1), 0.25)
    ), x


@pytest.mark.parametrize("cols", [16, 40, 256, 608])
@pytest.mark.parametrize("kind", ["most", "least", "alternating", "low digits", "scales apart"])
def test_nvfp4_at_its_extremes_lies_within_its_bound(library: ctypes.CDLL, kind: str, cols: int) -> None:
    kernels = CpuKernels(library)
    weight, x = extreme(kind, 5, cols)
    for scale in (1.0, -1.0, 1e30, 1e-25):
        rows = (x * scale).repeat(8, 1)
        found, wanted = kernels.linear(rows, weight, torch.empty(8, 5)), exact(rows, weight)
        assert ((found.double() - wanted.values).abs() <= wanted.bound).all(), scale
        alone = kernels.linear(rows[:1], weight, torch.empty(1, 5))
        assert torch.equal(alone, found[:1])
    assert kernels.plain == 0


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(FORMATS),
    count=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 70, 300]),
    rows=st.integers(1, 80),
    cols=st.one_of(st.integers(1, 300), st.sampled_from([256, 512, 640])),
    kind=st.sampled_from(["normal", "zeros", "one huge value", "wide range", "tiny"]),
    seed=st.integers(0, 999),
)
def test_products_lie_within_their_bound(
    library: ctypes.CDLL, name: str, count: int, rows: int, cols: int, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = random_weight(name, 2 * rows, cols, generator), random_rows(kind, count, cols, generator)
    norm, residual = (
        NormWeight(torch.rand(cols, generator=generator) + 0.5, EPS),
        torch.randn(count, 2 * rows, generator=generator),
    )
    found: list[list[torch.Tensor]] = []
    for threads in (1, 2):
        kernels = CpuKernels(library, threads)
        spare, both, plain, out = (torch.full((count, size), float("nan")) for size in (cols, 2 * rows, 2 * rows, rows))
        results = [
            kernels.linear(x, weight, plain).clone(),
            kernels.norm_linear(x, norm, weight, plain, spare).clone(),
            kernels.linear_add(x, weight, residual.clone(), plain),
            kernels.norm_gate_up(x, norm, weight, out, spare, both),
        ]
        assert (kernels.compiled, kernels.plain) == (4, 0)
        found.append(results)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True)), "one and two threads differ"
    linear, norm_linear, added, gated = found[0]
    product, after_norm = exact(x, weight), exact(normed(x, norm).float(), weight)
    assert bool(((linear - product.values).abs() <= product.bound).all())
    assert bool(
        ((norm_linear - after_norm.values).abs() <= after_norm.bound * 1.01 + 1e-6 * after_norm.values.abs()).all()
    )
    assert bool(
        (
            (added - residual - product.values).abs() <= product.bound + 2e-7 * (residual.abs() + product.values.abs())
        ).all()
    )
    gate, up = after_norm.values.chunk(2, -1)
    gate_bound, up_bound = after_norm.bound.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    # silu's slope is at most 1.1, and |silu(g)| <= |g|
    bound = (
        1.2 * (gate_bound * (up.abs() + up_bound) + gate.abs() * up_bound)
        + 2e-6 * wanted.abs()
        + 1e-6 * (gate * up).abs()
        + 1e-37
    )
    assert bool(((gated - wanted).abs() <= bound).all())


@pytest.mark.parametrize("name", FORMATS)
def test_row_has_same_bits_alone_and_in_batch(library: ctypes.CDLL, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = random_weight(name, 70, 300, generator), torch.randn(8, 300, generator=generator)
    kernels = CpuKernels(library, 2)
    alone = torch.cat([kernels.linear(x[i : i + 1], weight, torch.empty(1, 70)) for i in range(8)])
    for count in range(2, 9):
        assert torch.equal(kernels.linear(x[:count], weight, torch.empty(count, 70)), alone[:count])
    many = torch.cat((x, x)).contiguous()
    assert torch.equal(*kernels.linear(many, weight, torch.empty(16, 70)).chunk(2))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_what_is_not_a_number_shows(library: ctypes.CDLL, name: str, count: int) -> None:
    weight = random_weight(name, 40, 200, torch.Generator().manual_seed(2))
    for fault in (float("nan"), float("inf")):
        x = torch.randn(count, 200)
        x[0, 150] = fault
        out = CpuKernels(library, 1).linear(x, weight, torch.zeros(count, 40))
        wanted = ReferenceKernels().linear(x, weight, torch.zeros(count, 40))
        assert not bool(out[0].isfinite()[~wanted[0].isfinite()].any())
        assert bool(out[1:].isfinite().all())


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_takes_rows_of_any_format(library: ctypes.CDLL, name: str) -> None:
    table = random_weight(name, 50, 203, torch.Generator().manual_seed(3))
    ids = torch.tensor([0, 49, 7, 7])
    wanted = ReferenceKernels().embed(ids, table, torch.empty(4, 203))
    torch.testing.assert_close(CpuKernels(library).embed(ids, table, torch.empty(4, 203)), wanted, rtol=1e-6, atol=0)
    for wrong in (50, -1):
        with pytest.raises(IndexError, match=f"id {wrong} is not in a table of 50 rows"):
            CpuKernels(library).embed(torch.tensor([3, wrong]), table, torch.empty(2, 203))


def test_shapes_that_do_not_fit_are_refused(library: ctypes.CDLL) -> None:
    kernels, weight = CpuKernels(library), torch.randn(8, 16)
    with pytest.raises(ValueError, match="does not give"):
        kernels.linear(torch.randn(1, 15), weight, torch.empty(1, 8))
    with pytest.raises(ValueError, match="does not give"):
        kernels.linear(torch.randn(2, 16), weight, torch.empty(1, 8))


def test_what_the_c_has_not_runs_in_plain_torch(library: ctypes.CDLL) -> None:
    kernels, generator = CpuKernels(library), torch.Generator().manual_seed(4)
    x = torch.randn(3, 96, generator=generator)
    odd = Format("int8", 8, 24, True)
    numbers = torch.randint(-127, 128, (10, 96), generator=generator, dtype=torch.int8)
    grouped = QuantizedWeight(odd, 10, 96, numbers, torch.rand(10, 4, generator=generator))
    for weight in (grouped, torch.randn(10, 96, generator=generator).double().float().t().contiguous().t()):
        wanted = ReferenceKernels().linear(x, weight, torch.empty(3, 10))
        torch.testing.assert_close(kernels.linear(x, weight, torch.empty(3, 10)), wanted)
    assert (kernels.compiled, kernels.plain) == (0, 2)


def test_the_reserved_room_is_enough(library: ctypes.CDLL) -> None:
    """Everything that a network of these widths needs fits in what `workspace_spec` states.
    Nothing is allocated later.
    """
    shapes = (
        (3072, HeadShape(16, 8, 128)),
        (100, HeadShape(4, 2, 16)),
        (12288, HeadShape(32, 8, 128)),
        (64, HeadShape(64, 1, 256)),
    )
    for columns, heads in shapes:
        kernels = CpuKernels(library)
        (shape, dtype), *_ = CpuKernels.workspace_spec(heads, 512, torch.float32, columns)
        buffer = torch.empty(shape, dtype=dtype)
        kernels.reserve([buffer])
        for name in FORMATS:
            weight = random_weight(name, 2, columns, torch.Generator().manual_seed(5))
            for count in (1, 8, 300):
                kernels.linear(torch.zeros(count, columns), weight, torch.empty(count, 2))
        kernels._calls.scratch(0, kernels._native.attention_scratch(heads.heads, heads.kv_heads, heads.head_dim))
        assert kernels._calls._workspace is buffer
