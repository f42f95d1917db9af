"""Gated delta nets on CUDA between their projections: two kernels for a decode step, three for a few rows, four for a
chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from ..delta_rule import CHUNK, DeltaHeads, DeltaOperands
from .cuda_plan import on_grid
from .cuda_products import FusedProducts, power
from .triton_delta import (
    answer_piece,
    convolve_piece,
    convolve_rows,
    scan_pieces,
    solve_piece,
    step_states,
)
from .triton_verify import gate_answers, verify_states

# Widest head: one program of a decode step holds a state.
WIDEST = 128
# Values of a head per warp in a verify pass. One program for a whole head took 4.3 us per row on an H200.
VERIFY_VALUES = 16
# The constants below are the fastest of some 40 combinations for 2,048 tokens of 48 heads of 128 on an H200: 45, 73, 42
# and 70 us for the four kernels.
#
# Channels of a convolution step; channels and rows of a convolution over a chunk.
CHANNELS, PIECE_CHANNELS, PIECE_ROWS = 256, 1024, 4
# Values of a head per program in a chunk. 32 take 1.5 times as long, 128 twice as long.
VALUES = 64
# Pieces in flight per program. Two take 75 us and three 46, but the shared memory of many GPUs holds only two.
STAGES = 4
# Registers per thread of the solver, so that three programs share a processor (79 us without). On GPUs whose tensor
# cores do not read shared memory (including sm_80 with 163 KiB), a thread would spill 920 to 1,036 bytes. Working on
# SOLVED columns at a time without the limit spills none, on all columns 328 to 436 bytes.
SOLVING, SOLVED, LARGE_SHARED = 168, 64, 192 << 10


class DeltaKernels(FusedProducts):
    """Delta net kernels. Answers of a decode step are fp32 up to the gate. Between the kernels of a chunk, queries,
    keys and values have the activation type.
    """

    def delta_step(self, heads: DeltaHeads, step: DeltaOperands) -> bool:
        if not self.fuses_delta(heads):
            return False
        count, sizes, slots = step.projected.shape[0], _sizes(heads), step.slots
        seen = self.static_buffer("delta seen", torch.float32, step.projected, count, heads.channels)
        wide, early = {"WIDTH": step.projected.shape[1], **sizes}, {"PDL": self.device.early, **self.launch}
        on_grid(convolve_rows, (count, -(-heads.channels // CHANNELS)))(
            step.projected, step.windows, heads.taps, slots.source, slots.target, seen,
            K=heads.taps.shape[0], FUSED=heads.fused, BLOCK=CHANNELS, VERIFY=step.verify, num_warps=2, **wide, **early,
        )  # fmt: skip
        every, forms = heads.key_heads * heads.group, {"FUSED": heads.fused, "DP": power(heads.key_dim), **early}
        gates: dict[str, Any] = {"EP": power(heads.value_dim), "SIGMOID": heads.gate == "sigmoid"}
        if not step.verify:
            on_grid(step_states, (count, every))(
                seen, step.projected, step.rates, heads.decay, heads.bias, heads.norm.weight, heads.norm.eps,
                step.states, slots.source, slots.target, step.out, num_warps=4, **gates, **forms, **wide,
            )  # fmt: skip
            return True
        answers, block = (
            self.static_buffer("delta answers", torch.float32, step.projected, count, heads.values),
            min(VERIFY_VALUES, gates["EP"]),
        )
        on_grid(verify_states, (-(-heads.value_dim // block), every))(
            seen, step.rates, heads.decay, heads.bias, step.states, slots.source, slots.target, answers, count,
            BE=block, num_warps=1, **forms, **sizes,
        )  # fmt: skip
        on_grid(gate_answers, (count, every))(
            answers,
            step.projected,
            heads.norm.weight,
            heads.norm.eps,
            step.out,
            FUSED=heads.fused,
            num_warps=1,
            **gates,
            **wide,
            **early,
        )
        return True

    def delta_chunk(self, heads: DeltaHeads, step: DeltaOperands) -> bool:
        if not self.fuses_delta(heads):
            return False
        count, sizes, every = step.projected.shape[0], _sizes(heads), heads.key_heads * heads.group
        like, slots, workspace = step.projected, step.slots, _ChunkWorkspace(heads, step.projected, self.activation)
        wide: dict[str, Any] = {"WIDTH": step.projected.shape[1], **sizes}
        tiles: dict[str, Any] = {"DP": workspace.key_dim, "EP": workspace.value_dim, "N": CHUNK}
        on_grid(convolve_piece, (-(-count // PIECE_ROWS), -(-heads.channels // PIECE_CHANNELS)))(
            like, step.windows, heads.taps, slots.source, slots.target, workspace.seen, count,
            K=heads.taps.shape[0], FUSED=heads.fused, ROWS=PIECE_ROWS, BLOCK=PIECE_CHANNELS, num_warps=4, **wide,
        )  # fmt: skip
        on_grid(solve_piece, (workspace.pieces, every))(
            workspace.seen, step.rates, heads.decay, heads.bias, workspace.values, workspace.keys, workspace.totals,
            workspace.kept, count, FUSED=heads.fused, LEVELS=CHUNK.bit_length() - 1, num_warps=4, num_stages=1, **tiles,
            **sizes,
            **({"COLUMNS": WIDEST, "maxnreg": SOLVING} if self.device.shared > LARGE_SHARED else {"COLUMNS": SOLVED}),
        )  # fmt: skip
        block = min(VALUES, workspace.value_dim)
        # A piece has two tiles of keys and one of values, 2 bytes per number. Results in flight and rates take 10 KiB
        # more.
        stages = min(STAGES, max(2, (self.device.shared - 10240) // (2 * CHUNK * (2 * workspace.key_dim + block))))
        # The corrections overwrite the values: each program reads its own values before it writes.
        on_grid(scan_pieces, (workspace.value_dim // block, every))(
            workspace.seen, workspace.values, workspace.keys, workspace.totals, workspace.kept, step.states,
            slots.source, slots.target, workspace.states, workspace.values, count, BE=block, STAGES=stages, num_warps=4,
            **tiles, **sizes,
        )  # fmt: skip
        on_grid(answer_piece, (workspace.pieces, every))(
            workspace.seen, workspace.values, workspace.totals, workspace.states, like, heads.norm.weight,
            heads.norm.eps, step.out, count, FUSED=heads.fused, SIGMOID=heads.gate == "sigmoid", num_warps=4,
            num_stages=1, **tiles, **wide,
        )  # fmt: skip
        return True

    def fuses_delta(self, heads: DeltaHeads) -> bool:
        """Whether fused kernels support it. What they do not support is logged once."""
        if max(heads.key_dim, heads.value_dim) > WIDEST or heads.taps.shape[0] < 2:
            self.tell(f"delta nets with heads of {heads.key_dim} and {heads.value_dim}")
            return False
        return True


class _ChunkWorkspace:
    """Buffers between the kernels of a chunk, see triton_delta. `key_dim` and `value_dim` are those of tiles."""

    def __init__(self, heads: DeltaHeads, projected: torch.Tensor, activation: torch.dtype) -> None:
        count, device, every = projected.shape[0], projected.device, heads.key_heads * heads.group
        self.key_dim, self.value_dim, self.pieces = _tile(heads.key_dim), _tile(heads.value_dim), -(-count // CHUNK)
        self.seen = torch.empty((count, heads.channels), dtype=activation, device=device)
        self.keys, self.values, self.states = (
            torch.empty((self.pieces, every, rows, cols), dtype=activation, device=device)
            for rows, cols in ((CHUNK, self.key_dim), (self.value_dim, CHUNK), (self.value_dim, self.key_dim))
        )
        self.totals, self.kept = torch.empty((2, self.pieces, every, CHUNK), dtype=torch.float32, device=device)


def _sizes(heads: DeltaHeads) -> dict[str, int]:
    return {"H": heads.key_heads, "R": heads.group, "D": heads.key_dim, "E": heads.value_dim}


def _tile(width: int) -> int:
    """Side length of a tile of a tensor-core product."""
    return max(16, power(width))
