"""Chooses the kernels for a device, and says why."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..core import CancelCheck
from ..memory.lease import carved_bytes
from .cpu.compile import compile_library
from .cpu.cpu_kernels import CpuKernels
from .cpu.file_rows import FileRowReader
from .cuda.sdpa_kernels import CudaKernels
from .forward_batch import HeadShape
from .reference import ReferenceKernels

log = logging.getLogger(__name__)

# The oldest GPU that the fused kernels support: bf16 in its tensor cores.
FUSED_FROM = (8, 0)


def choose_kernels(
    device: torch.device, weights: torch.dtype, cache: Path, cancel: CancelCheck | None = None
) -> ReferenceKernels:
    """The fastest kernels for weights stored as `weights` on `device`. Compiled kernels are kept in `cache`. Raises
    Cancelled.
    """
    if device.type == "cuda":
        return cuda_kernels(weights)
    if device.type != "cpu":
        return ReferenceKernels()
    library, why_not = compile_library(cache, cancel)
    if library is None:
        log.warning("the CPU runs plain torch, slower, without compiled kernels: %s", why_not)
        kernels = ReferenceKernels()
        kernels.reason = f"plain torch: {why_not}"
        return kernels
    return CpuKernels(library)


def row_reader(cache: Path, cancel: CancelCheck | None = None) -> FileRowReader | None:
    """A reader of many file rows at once, for a model on any device. None if nothing can be
    compiled. Raises Cancelled.
    """
    library, why_not = compile_library(cache, cancel)
    if library is None:
        log.warning("rows of tables are read one by one, which slows prompts down: %s", why_not)
    return FileRowReader(library) if library is not None else None


def workspace_bytes(
    device: torch.device,
    heads: HeadShape,
    positions: int,
    activation: torch.dtype,
    columns: int,
    capability: tuple[int, int] | None = None,
) -> int:
    """Bytes of workspace that the kernels of `device` may ask for, whichever are chosen; see `workspace_spec`.

    `capability`: that of a GPU that is not in this machine. None asks the GPU that is.
    """
    possible: tuple[type[ReferenceKernels], ...] = (
        (CpuKernels, ReferenceKernels) if device.type == "cpu" else (ReferenceKernels,)
    )
    if device.type == "cuda":
        possible = (fused_or_not(activation, capability)[0],)
    return max(
        sum(carved_bytes(*buffer) for buffer in kind.workspace_spec(heads, positions, activation, columns))
        for kind in possible
    )


def fused_or_not(activation: torch.dtype, capability: tuple[int, int] | None = None) -> tuple[type[CudaKernels], str]:
    """The class of kernels for a GPU of `capability` (default: this process's), and why it is not the fused one."""
    if activation not in (torch.bfloat16, torch.float16):
        return CudaKernels, f"activations in {str(activation).removeprefix('torch.')} are not supported by them"
    if capability is None:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability < FUSED_FROM:
        return CudaKernels, f"the GPU is sm_{capability[0]}{capability[1]} and they need sm_80 or newer"
    try:
        from .cuda.cuda_fused import FusedCudaKernels
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
