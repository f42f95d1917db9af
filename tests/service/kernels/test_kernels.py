"""The reference matches its formulas, and torch's fused CUDA attention matches the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.kernels.cuda.sdpa_kernels import CudaKernels
from onedesk.service.kernels.forward_batch import NormWeight
from onedesk.service.kernels.reference import ReferenceKernels


def truth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().t()).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 31), (33, 32), (130, 1000), (2048, 64)])
def test_linear_is_the_product(dtype: torch.dtype, tokens: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows * cols + tokens)
    x = torch.randn(tokens, cols, generator=generator)
    weight = torch.randn(rows, cols, generator=generator).to(dtype)
    wanted = truth(x, weight)
    kernels, out = ReferenceKernels(), torch.full((tokens, rows), float("nan"))
    assert kernels.linear(x, weight, out) is out
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


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
    # One query at a time over what it may see, one head at a time: no masks, no grouping.
    wanted = torch.empty_like(q)
    for t in range(tokens):
        for h in range(kv_heads * group):
            seen = past + t + 1
            weights = (k[h // group, :seen] @ q[t, h] * dim**-0.5).softmax(0)
            wanted[t, h] = weights @ v[h // group, :seen]
    out = torch.empty_like(q)
    ReferenceKernels().attention(q, k, v, past, out)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_norm_and_gate_are_their_formulas() -> None:
    kernels = ReferenceKernels()
    x, weight = torch.randn(5, 48), torch.rand(48)
    wanted = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(kernels.rms_norm(x, NormWeight(weight, 1e-6), torch.empty_like(x)), wanted)
    both = torch.randn(5, 2 * 48)
    wanted = both[:, :48] * torch.sigmoid(both[:, :48]) * both[:, 48:]
    torch.testing.assert_close(kernels.silu_mul(both, torch.empty(5, 48)), wanted)


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 9), (7, 0), (7, 5)])
def test_the_fused_attention_is_the_references(tokens: int, past: int) -> None:
    """CUDA attention with its masks and grouping, computed on the CPU."""
    generator = torch.Generator().manual_seed(tokens + past)
    q = torch.randn(tokens, 6, 16, generator=generator)
    k, v = (torch.randn(2, past + tokens, 16, generator=generator) for _ in range(2))
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    CudaKernels(torch.float32).attention(q, k, v, past, out)
    torch.testing.assert_close(out, ReferenceKernels().attention(q, k, v, past, wanted), rtol=1e-4, atol=1e-5)
