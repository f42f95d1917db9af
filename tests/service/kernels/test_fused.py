"""The Triton kernels match plain arithmetic in the interpreter; which kernels a device gets, and why."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from interpreted import results
from onedesk.service.kernels.choose import cuda_kernels, fused_or_not
from onedesk.service.kernels.cuda import cuda_products
from onedesk.service.kernels.cuda.cuda_fused import FusedCudaKernels
from onedesk.service.kernels.cuda.cuda_plan import GpuDevice, WeightShape
from onedesk.service.kernels.cuda.sdpa_kernels import CudaKernels


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results("kernels")


def test_every_kernel_is_within_its_bound(found: dict[str, Any]):
    off = {form: row for form, row in found.items() if not row["error"] <= row["bound"]}
    assert not off


def test_every_kernel_of_a_layer_is_within_its_bound():
    layers = results("layers")
    assert not {form: row for form, row in layers.items() if not row["error"] <= row["bound"]}
    kinds = {"experts", "delta", "streams", "ngrams", "attend", "split_gates", "apply_gates", "attend_indexed"}
    assert {form.partition(" ")[0].rstrip(",") for form in layers} == kinds


def test_all_kernels_and_formats_were_compared(found: dict[str, Any]):
    kinds = [("linear", "fp8")]
    kinds += [
        (k, h) for k in ("linear", "linear_add", "norm_linear", "norm_gate_up") for h in ("float", "int8", "int4")
    ]
    for kernel, held in kinds:
        for rows in (1, 3, 20):
            assert any(form.startswith(f"{kernel} {held} ") and form.endswith(f"rows {rows}") for form in found)
    assert sum(form.startswith("attend ") for form in found) == 4
    assert any(form.startswith("attend, padded ") for form in found)


def test_what_the_kernels_are_not_for_is_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        kernels = cuda_kernels(torch.float32)
    assert type(kernels) is CudaKernels
    assert "activations in float32" in kernels.reason
    assert "activations in float32" in caplog.text


def test_an_old_gpu_gets_plain_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    kind, why_not = fused_or_not(torch.bfloat16)
    assert kind is CudaKernels
    assert why_not == "the GPU is sm_75 and they need sm_80 or newer"


def test_without_triton_plain_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "onedesk.service.kernels.cuda.cuda_fused", None)
    kind, why_not = fused_or_not(torch.bfloat16)
    assert kind is CudaKernels
    assert "install triton" in why_not


@pytest.mark.parametrize("rows", [1, 3])
def test_product_launches_programs_for_its_rows_only(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Scores of experts lie at the front of a larger buffer. Computing all of it once took 13
    ms per step instead of 5.
    """
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda_products, "on_grid", lambda _, grid: grids.append(grid) or (lambda *_, **__: None))
    kernels = FusedCudaKernels(torch.float16, GpuDevice(2, 100_000, 1 << 20, early=False))
    weight, buffer = torch.zeros(40, 64, dtype=torch.float16), torch.zeros(512)
    shape = kernels.shape(weight)
    assert isinstance(shape, WeightShape)
    kernels.few_rows(torch.zeros(rows, 64, dtype=torch.float16), weight, shape, buffer)
    assert [grid[1:] for grid in grids] == [(rows,) if rows > 1 else ()]
