"""Which kernels run on a device, and why."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from .cpu import CpuKernels, compile_library
from .cuda import CudaKernels
from .reference import ReferenceKernels

log = logging.getLogger(__name__)


def choose_kernels(device: torch.device, weights: torch.dtype, cache: Path) -> ReferenceKernels:
    """The fastest kernels for weights stored as `weights` on `device`; what was compiled is kept in `cache`."""
    if device.type == "cuda":
        return CudaKernels(weights)
    if device.type != "cpu":
        return ReferenceKernels()
    library, why_not = compile_library(cache)
    if library is None:
        log.warning("decode runs without the compiled GEMV: %s", why_not)
        kernels = ReferenceKernels()
        kernels.reason = f"plain torch: {why_not}"
        return kernels
    return CpuKernels(library)
