"""Fused kernels for CUDA in Triton. A decode step of one row of a dense decoder runs six per layer, eight with low-bit
weights.

All run in torch's stream, allocate nothing after the first call with as many rows, and read no values on the host. A
CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..delta_rule import DeltaHeads
from ..forward_batch import HeadShape
from ..operands import AttentionHeads, ExpertWeights, HyperConnection, LayerPart
from ..reference import Buffer
from .cuda_attention import UNITS, AttentionKernels
from .cuda_delta import DeltaKernels
from .cuda_experts import ExpertKernels
from .cuda_ngram import NgramKernels
from .cuda_plan import SPLIT, TILE_ROWS, GpuDevice
from .cuda_products import WIDENED, power
from .cuda_streams import StreamKernels


class FusedCudaKernels(AttentionKernels, DeltaKernels, ExpertKernels, NgramKernels, StreamKernels):
    """All fused kernels together; see the module."""

    @classmethod
    def for_device(cls, activation: torch.dtype) -> FusedCudaKernels:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        shared = getattr(found, "shared_memory_per_block_optin", 101376)
        cache = getattr(found, "L2_cache_size", 0)
        return cls(activation, GpuDevice(found.multi_processor_count, shared, cache, found.major >= 9))

    def captures(self, heads: HeadShape, parts: Iterable[LayerPart]) -> bool:
        return self.fuses_attention(heads) and all(self._fuses(part) for part in parts)

    def _fuses(self, part: LayerPart) -> bool:
        if isinstance(part, ExpertWeights):
            return self.fuses_experts(part)
        if isinstance(part, AttentionHeads):
            return part.normed
        if isinstance(part, DeltaHeads):
            return self.fuses_delta(part)
        if isinstance(part, HyperConnection):
            return self.fuses_connection(part)
        return not isinstance(self.shape(part), str)

    @classmethod
    def workspace_spec(
        cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int
    ) -> tuple[Buffer, ...]:
        group = -(-heads.heads // heads.kv_heads)
        units = UNITS * heads.kv_heads * power(group)
        return (
            ((columns // 2,), torch.int32),
            ((columns // 8 + 2,), torch.float32),
            ((SPLIT * TILE_ROWS * 2 * columns,), torch.float32),
            ((units * heads.head_dim,), torch.float32),
            ((2, units), torch.float32),
            ((WIDENED + 16 * columns,), activation),
        )
