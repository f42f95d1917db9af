"""Kernels for CUDA in plain torch: activations in the weights' type, sums in fp32 inside the library's products."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .reference import ReferenceKernels, causal_mask

# Not cuDNN's: from torch 2.11 it comes first on sm_90 and sm_100 and makes a plan for every KV length, 23 to 37 ms each (public reports;
# decode of Qwen3-0.6B on an H200 took 31 ms a token with it).
log = logging.getLogger(__name__)

# The oldest GPU that the fused kernels are written for: bf16 in its tensor cores.
FUSED_FROM = (8, 0)
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

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        tokens, length = q.shape[0], k.shape[1]
        mask = causal_mask(tokens, length, q.device) if tokens > 1 and start > 0 else None
        with sdpa_kernel(BACKENDS):
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=tokens > 1 and start == 0, enable_gqa=True
            )
        return out.copy_(mixed[0].transpose(0, 1))


def fused_or_not(activation: torch.dtype) -> tuple[type[CudaKernels], str]:
    """The class of kernels for this process's CUDA device, and why it is not the fused one (empty if it is)."""
    if activation not in (torch.bfloat16, torch.float16):
        return CudaKernels, f"activations in {str(activation).removeprefix('torch.')} are not what they are written for"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability < FUSED_FROM:
        return CudaKernels, f"the GPU is sm_{capability[0]}{capability[1]} and they need sm_80 or newer"
    try:
        from .cuda_fused import FusedCudaKernels
    except ImportError as error:
        return CudaKernels, f"Triton does not load ({error}); install triton for this torch"
    return FusedCudaKernels, ""


def cuda_kernels(activation: torch.dtype) -> CudaKernels:
    """The fastest kernels for this process's CUDA device."""
    kind, why_not = fused_or_not(activation)
    if why_not:
        log.warning("the GPU runs without fused kernels: %s", why_not)
        kernels = CudaKernels(activation)
        kernels.reason += f"; no fused kernels: {why_not}"
        return kernels
    return kind.for_device(activation)
