"""Which kernels run on a device, and why."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..core import CancelCheck
from ..memory.lease import carved_bytes
from .compile import compile_library
from .cpu import CpuKernels
from .cuda import cuda_kernels, fused_or_not
from .file_rows import FileRowReader
from .reference import ReferenceKernels
from .rows import HeadShape

log = logging.getLogger(__name__)


def choose_kernels(device: torch.device, weights: torch.dtype, cache: Path, cancel: CancelCheck | None = None) -> ReferenceKernels:
    """The fastest kernels for weights stored as `weights` on `device`; what was compiled is kept in `cache`. Raises Cancelled."""
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
    """What reads many rows of files at once, for a model on any device; None where nothing can be compiled. Raises Cancelled."""
    library, why_not = compile_library(cache, cancel)
    if library is None:
        log.warning("rows of tables are read one by one, which slows prompts down: %s", why_not)
    return FileRowReader(library) if library is not None else None


def workspace_bytes(device: torch.device, heads: HeadShape, positions: int, activation: torch.dtype, columns: int) -> int:
    """Bytes that the kernels of `device` may ask for beside a pass's rows, whichever of them will be chosen; see `workspace`."""
    possible: tuple[type[ReferenceKernels], ...] = (CpuKernels, ReferenceKernels) if device.type == "cpu" else (ReferenceKernels,)
    if device.type == "cuda":
        possible = (fused_or_not(activation)[0],)
    return max(sum(carved_bytes(*buffer) for buffer in kind.workspace(heads, positions, activation, columns)) for kind in possible)
