"""Compiled quantization to int8 and int4 gives the bits and the refusals of the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError
from onedesk.service.kernels.cpu.compile import compile_library
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.quant.formats import FP8_ROWS, INT8, int4, title, weight_of
from onedesk.service.quant.quantize_weights import quantize, quantize_into
from onedesk.service.quant.weight import Format, QuantizedWeight

FORMATS = [
    INT8,
    int4(),
    int4(32),
    int4(64),
    int4(symmetric=False),
    int4(32, symmetric=False),
    Format("int8", 8, 128, True),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    library, why_not = compile_library(tmp_path_factory.mktemp("kernels"))
    assert library is not None, why_not
    return CpuKernels(library)


def empty(held: Format, rows: int, cols: int) -> QuantizedWeight:
    return weight_of(held, rows, cols, lambda shape, dtype: torch.zeros(shape, dtype=dtype))


@settings(max_examples=150, deadline=None)
@given(
    held=st.sampled_from(FORMATS),
    dtype=st.sampled_from(TYPES),
    rows=st.integers(1, 4),
    cols=st.sampled_from([1, 31, 32, 33, 128, 480]) | st.integers(1, 300),
    power=st.integers(-9, 4),
    zeros=st.integers(0, 200),
    seed=st.integers(0, 2**31),
    room=st.integers(0, 700),
)
def test_it_is_the_plain_way_to_the_bit(
    kernels: CpuKernels,
    held: Format,
    dtype: torch.dtype,
    rows: int,
    cols: int,
    power: int,
    zeros: int,
    seed: int,
    room: int,
) -> None:
    values = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 10.0**power).to(dtype)
    values[0, :zeros] = 0
    if not torch.isfinite(values).all():
        return
    wanted, found = quantize(values, held), empty(held, rows, cols)
    assert kernels.quantize(found, values, torch.empty(room))
    assert all(torch.equal(one, other) for one, other in zip(found.tensors, wanted.tensors, strict=True))


@pytest.mark.parametrize("held", FORMATS, ids=title)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_unrepresentable_weights_are_refused_alike(kernels: CpuKernels, held: Format, bad: float) -> None:
    values = torch.ones(4, 160)
    values[2, 150] = bad
    if bad == 1e30 and held.bits == 8:
        quantize_into(empty(held, 4, 160), values, "w", None, kernels.quantize)
        return
    said = []
    for faster in (None, kernels.quantize):
        with pytest.raises(ModelError) as refused:
            quantize_into(empty(held, 4, 160), values, "w", None, faster)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_unsupported_packing_falls_back(kernels: CpuKernels) -> None:
    assert not kernels.quantize(empty(INT8, 2, 40), torch.randn(2, 40).double(), torch.empty(0))
    assert not kernels.quantize(empty(INT8, 2, 40), torch.randn(40, 2).t(), torch.empty(0))
    assert not kernels.quantize(empty(FP8_ROWS, 2, 40), torch.randn(2, 40), torch.empty(0))
