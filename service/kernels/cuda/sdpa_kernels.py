"""Kernels for CUDA in plain torch: activations in the weights' type, sums in fp32 inside the library's products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..reference import ReferenceKernels, causal_mask

# cuDNN is left out: from torch 2.11 it comes first on sm_90 and sm_100 and makes a plan per KV length, 23 to 37 ms each
# (public reports; decode of Qwen3-0.6B on an H200 took 31 ms per token with it).
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CudaKernels(ReferenceKernels):
    """cuBLAS products and torch's fused attention."""

    name = "cuda"

    def __init__(self, activation: torch.dtype) -> None:
        super().__init__(activation)
        self.reason = f"torch on CUDA, activations in {str(activation).removeprefix('torch.')}"

    @classmethod
    def for_device(cls, activation: torch.dtype) -> CudaKernels:
        """Kernels for this process's CUDA device."""
        return cls(activation)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor
    ) -> torch.Tensor:
        tokens, length = q.shape[0], k.shape[1]
        mask = causal_mask(tokens, length, q.device) if tokens > 1 and start > 0 else None
        with sdpa_kernel(BACKENDS):
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask,
                is_causal=tokens > 1 and start == 0,
                enable_gqa=True,
            )
        return out.copy_(mixed[0].transpose(0, 1))
