"""The fast paths agree with the plain reference, and say why when there is none."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.kernels import cpu
from onedesk.service.kernels.choose import choose_kernels
from onedesk.service.kernels.cpu import GEMV_ROWS, CpuKernels, compile_library
from onedesk.service.kernels.cuda import CudaKernels
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.kernels.rows import NormWeight


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    library, why_not = compile_library(tmp_path_factory.mktemp("kernels"))
    assert library is not None, why_not
    return CpuKernels(library)


def truth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().t()).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, GEMV_ROWS, GEMV_ROWS + 1, 70])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 31), (33, 32), (130, 1000), (2048, 64)])
def test_linear_is_the_product(fast: CpuKernels, dtype: torch.dtype, tokens: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows * cols + tokens)
    x = torch.randn(tokens, cols, generator=generator)
    weight = torch.randn(rows, cols, generator=generator).to(dtype)
    wanted = truth(x, weight)
    for kernels in (ReferenceKernels(), fast):
        out = torch.full((tokens, rows), float("nan"))
        assert kernels.linear(x, weight, out) is out
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_decode_uses_the_compiled_product_and_prefill_does_not(fast: CpuKernels) -> None:
    weight = torch.randn(64, 64).bfloat16()
    before = fast.gemv_calls
    fast.linear(torch.randn(1, 64), weight, torch.empty(1, 64))
    fast.linear(torch.randn(200, 64), weight, torch.empty(200, 64))
    assert fast.gemv_calls == before + 1


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20),
    past=st.integers(0, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 24),
    seed=st.integers(0, 999),
)
def test_attention_agrees(tokens: int, past: int, kv_heads: int, group: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim, length = 2 * half, past + tokens
    q = torch.randn(tokens, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(kv_heads, length, dim, generator=generator) for _ in range(2))
    # One query at a time over what it may see, heads one by one: no masks, no grouping.
    wanted = torch.empty_like(q)
    for t in range(tokens):
        for h in range(kv_heads * group):
            seen = past + t + 1
            weights = (k[h // group, :seen] @ q[t, h] * dim**-0.5).softmax(0)
            wanted[t, h] = weights @ v[h // group, :seen]
    library, why_not = compile_library(Path(tempfile.gettempdir()) / "onedesk-test-kernels")
    assert library is not None, why_not
    for kernels in (ReferenceKernels(), CpuKernels(library)):
        out = torch.empty_like(q)
        kernels.attention(q, k, v, past, out)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_norm_and_gate_are_their_formulas() -> None:
    kernels = ReferenceKernels()
    x, weight = torch.randn(5, 48), torch.rand(48)
    wanted = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(kernels.rms_norm(x, NormWeight(weight, 1e-6), torch.empty_like(x)), wanted)
    both = torch.randn(5, 2 * 48)
    wanted = both[:, :48] * torch.sigmoid(both[:, :48]) * both[:, 48:]
    torch.testing.assert_close(kernels.silu_mul(both, torch.empty(5, 48)), wanted)


def test_the_library_is_compiled_once(tmp_path: Path) -> None:
    assert compile_library(tmp_path)[0] is not None
    (first,) = tmp_path.iterdir()
    made = first.stat().st_mtime_ns
    assert compile_library(tmp_path)[0] is not None
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [made]


def test_without_a_compiler_the_plain_path_runs_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu.shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(torch.device("cpu"), torch.float32, tmp_path)
    assert type(kernels) is ReferenceKernels
    assert "no C compiler" in kernels.reason
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: no space left for objects' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(cpu.shutil, "which", lambda _: str(broken))
    library, why_not = compile_library(tmp_path / "cache")
    assert library is None
    assert "no space left for objects" in why_not


def test_a_damaged_library_is_reported(tmp_path: Path) -> None:
    assert compile_library(tmp_path)[0] is not None
    (built,) = tmp_path.iterdir()
    damaged = tmp_path / "other"
    damaged.mkdir()
    (damaged / built.name).write_bytes(b"not a library")
    library, why_not = compile_library(damaged)
    assert library is None
    assert "does not load" in why_not
    assert str(tmp_path) not in why_not


def test_a_cache_that_takes_nothing_is_told_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file, no folder")
    library, why_not = compile_library(tmp_path / "cache")
    assert library is None
    assert "File exists in the cache folder" in why_not
    assert str(tmp_path) not in why_not


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 9), (7, 0), (7, 5)])
def test_the_fused_attention_is_the_references(tokens: int, past: int) -> None:
    """What runs on CUDA, with its masks and grouping, computed here on the CPU."""
    generator = torch.Generator().manual_seed(tokens + past)
    q = torch.randn(tokens, 6, 16, generator=generator)
    k, v = (torch.randn(2, past + tokens, 16, generator=generator) for _ in range(2))
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    CudaKernels(torch.float32).attention(q, k, v, past, out)
    torch.testing.assert_close(out, ReferenceKernels().attention(q, k, v, past, wanted), rtol=1e-4, atol=1e-5)
