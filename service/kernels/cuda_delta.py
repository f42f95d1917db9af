"""Gated delta nets on CUDA between their projections: two kernels for a decode step, four for a chunk of any length."""

from __future__ import annotations

from typing import Any

import torch

from .cuda_plan import on_grid
from .cuda_products import FusedProducts, power
from .delta import CHUNK, DeltaHeads, DeltaStep
from .triton_delta import convolve_piece, convolve_rows, gate_answers, scan_pieces, solve_piece, step_states

# Widest head: one program of a decode step holds a state.
WIDEST = 128
# Values of a head that one program takes through a chunk, and rows and channels of a convolution.
VALUES, PIECE_ROWS, CHANNELS = 32, 16, 256
# Bytes of shared memory that 64 tokens at once of heads of 128 take, as they are compiled for sm_90.
LARGE_SHARED = 131072


class DeltaKernels(FusedProducts):
    """The answers to a decode step are fp32 up to the gate; between the kernels of a chunk, queries, keys and values are activations."""

    def delta_step(self, heads: DeltaHeads, step: DeltaStep) -> bool:
        if not self.fuses_delta(heads):
            return False
        count, sizes, slots = step.projected.shape[0], _sizes(heads), step.slots
        seen = self.kept("delta seen", torch.float32, step.projected, count, heads.channels)
        wide, early = {"WIDTH": step.projected.shape[1], **sizes}, {"PDL": self.device.early, **self.launch}
        on_grid(convolve_rows, (count, -(-heads.channels // CHANNELS)))(
            step.projected, step.windows, heads.taps, slots.source, slots.target, seen,
            K=heads.taps.shape[0], FUSED=heads.fused, BLOCK=CHANNELS, num_warps=2, **wide, **early,
        )  # fmt: skip
        on_grid(step_states, (count, heads.key_heads * heads.group))(
            seen, step.projected, step.rates, heads.decay, heads.bias, heads.norm.weight, heads.norm.eps, step.states, slots.source,
            slots.target, step.out, DP=power(heads.key_dim), EP=power(heads.value_dim), FUSED=heads.fused,
            SIGMOID=heads.gate == "sigmoid", num_warps=8, **wide, **early,
        )  # fmt: skip
        return True

    def delta_chunk(self, heads: DeltaHeads, step: DeltaStep) -> bool:
        if not self.fuses_delta(heads):
            return False
        count, sizes, every = step.projected.shape[0], _sizes(heads), heads.key_heads * heads.group
        like, slots, piece = step.projected, step.slots, CHUNK if self.device.shared > LARGE_SHARED else CHUNK // 2
        wide: dict[str, Any] = {"WIDTH": step.projected.shape[1], **sizes}
        seen = torch.empty((count, heads.channels), dtype=self.activation, device=like.device)
        values, keys, totals = (
            torch.empty((count, every * width), dtype=torch.float32, device=like.device) for width in (heads.value_dim, heads.key_dim, 1)
        )
        on_grid(convolve_piece, (-(-count // PIECE_ROWS), -(-heads.channels // CHANNELS)))(
            like, step.windows, heads.taps, slots.source, slots.target, seen, count,
            K=heads.taps.shape[0], FUSED=heads.fused, ROWS=PIECE_ROWS, BLOCK=CHANNELS, num_warps=8, **wide,
        )  # fmt: skip
        on_grid(solve_piece, (-(-count // piece), every))(
            seen, step.rates, heads.decay, heads.bias, values, keys, totals, count,
            DP=_tile(heads.key_dim), EP=_tile(heads.value_dim), N=piece, FUSED=heads.fused, num_warps=8, num_stages=1, **sizes,
        )  # fmt: skip
        block = min(VALUES, _tile(heads.value_dim))
        # What is not read any more takes the answers: each program reads its own columns before it writes them.
        on_grid(scan_pieces, (every, -(-heads.value_dim // block)))(
            seen, values, keys, totals, step.states, slots.source, slots.target, values, count,
            DP=_tile(heads.key_dim), BE=block, N=piece, num_warps=4, num_stages=1, **sizes,
        )  # fmt: skip
        on_grid(gate_answers, (count, every))(
            values, like, heads.norm.weight, heads.norm.eps, step.out,
            EP=power(heads.value_dim), FUSED=heads.fused, SIGMOID=heads.gate == "sigmoid", num_warps=1, **wide,
        )  # fmt: skip
        return True

    def fuses_delta(self, heads: DeltaHeads) -> bool:
        """Whether it runs in fused kernels; one that does not is told of once."""
        if max(heads.key_dim, heads.value_dim) > WIDEST or heads.taps.shape[0] < 2:
            self.tell(f"delta nets with heads of {heads.key_dim} and {heads.value_dim}")
            return False
        return True


def _sizes(heads: DeltaHeads) -> dict[str, int]:
    return {"H": heads.key_heads, "R": heads.group, "D": heads.key_dim, "E": heads.value_dim}


def _tile(width: int) -> int:
    """A side of a tile of a tensor core's product."""
    return max(16, power(width))
