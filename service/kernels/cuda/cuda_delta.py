"""Gated delta nets on CUDA between their projections: two kernels for a decode step, three for a few rows, four for a chunk."""

from __future__ import annotations

from typing import Any

import torch

from ..delta import CHUNK, DeltaHeads, DeltaStep
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
from .triton_verify import gate_answers, trail_states

# Widest head: one program of a decode step holds a state.
WIDEST = 128
# Values of a head that one warp takes through a few rows: a program for a whole head took 4.3 us a row on an H200.
TRAIL_VALUES = 16
# What follows is the fastest of some 40 forms for 2,048 tokens of 48 heads of 128 on an H200: 45, 73, 42 and 70 us for the four kernels.
# Channels of a convolution, and its rows in a chunk.
CHANNELS, PIECE_CHANNELS, PIECE_ROWS = 256, 1024, 4
# Values of a head that one program takes through a chunk: 32 take half as long again, 128 twice as long.
VALUES = 64
# Pieces on their way to such a program: two take 75 us and three 46, but many GPUs' shared memory has room for no more than two.
STAGES = 4
# Registers of a thread that solves, so that three programs share a processor: 79 us without. Where tensor cores do not read shared memory
# (on sm_80 too, which has 163 KiB of it) a thread would spill 920 to 1,036 bytes; of so many columns at a time none without that limit, and
# 328 to 436 of all.
SOLVING, SOLVED, LARGE_SHARED = 168, 64, 192 << 10


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
            K=heads.taps.shape[0], FUSED=heads.fused, BLOCK=CHANNELS, TRAIL=step.trail, num_warps=2, **wide, **early,
        )  # fmt: skip
        every, forms = heads.key_heads * heads.group, {"FUSED": heads.fused, "DP": power(heads.key_dim), **early}
        gates: dict[str, Any] = {"EP": power(heads.value_dim), "SIGMOID": heads.gate == "sigmoid"}
        if not step.trail:
            on_grid(step_states, (count, every))(
                seen, step.projected, step.rates, heads.decay, heads.bias, heads.norm.weight, heads.norm.eps, step.states, slots.source,
                slots.target, step.out, num_warps=4, **gates, **forms, **wide,
            )  # fmt: skip
            return True
        answers, block = self.kept("delta answers", torch.float32, step.projected, count, heads.values), min(TRAIL_VALUES, gates["EP"])
        on_grid(trail_states, (-(-heads.value_dim // block), every))(
            seen, step.rates, heads.decay, heads.bias, step.states, slots.source, slots.target, answers, count, BE=block, num_warps=1,
            **forms, **sizes,
        )  # fmt: skip
        on_grid(gate_answers, (count, every))(
            answers, step.projected, heads.norm.weight, heads.norm.eps, step.out, FUSED=heads.fused, num_warps=1, **gates, **wide, **early
        )
        return True

    def delta_chunk(self, heads: DeltaHeads, step: DeltaStep) -> bool:
        if not self.fuses_delta(heads):
            return False
        count, sizes, every = step.projected.shape[0], _sizes(heads), heads.key_heads * heads.group
        like, slots, room = step.projected, step.slots, _ChunkRoom(heads, step.projected, self.activation)
        wide: dict[str, Any] = {"WIDTH": step.projected.shape[1], **sizes}
        tiles: dict[str, Any] = {"DP": room.key_dim, "EP": room.value_dim, "N": CHUNK}
        on_grid(convolve_piece, (-(-count // PIECE_ROWS), -(-heads.channels // PIECE_CHANNELS)))(
            like, step.windows, heads.taps, slots.source, slots.target, room.seen, count,
            K=heads.taps.shape[0], FUSED=heads.fused, ROWS=PIECE_ROWS, BLOCK=PIECE_CHANNELS, num_warps=4, **wide,
        )  # fmt: skip
        on_grid(solve_piece, (room.pieces, every))(
            room.seen, step.rates, heads.decay, heads.bias, room.values, room.keys, room.totals, room.kept, count,
            FUSED=heads.fused, LEVELS=CHUNK.bit_length() - 1, num_warps=4, num_stages=1, **tiles, **sizes,
            **({"COLUMNS": WIDEST, "maxnreg": SOLVING} if self.device.shared > LARGE_SHARED else {"COLUMNS": SOLVED}),
        )  # fmt: skip
        block = min(VALUES, room.value_dim)
        # A piece is a tile each of keys twice and of values, of 2 bytes a number; results on their way out and rates take 10 KiB more.
        stages = min(STAGES, max(2, (self.device.shared - 10240) // (2 * CHUNK * (2 * room.key_dim + block))))
        # What is not read any more takes the corrections: each program reads its own values before it writes them.
        on_grid(scan_pieces, (room.value_dim // block, every))(
            room.seen, room.values, room.keys, room.totals, room.kept, step.states, slots.source, slots.target, room.states, room.values,
            count, BE=block, STAGES=stages, num_warps=4, **tiles, **sizes,
        )  # fmt: skip
        on_grid(answer_piece, (room.pieces, every))(
            room.seen, room.values, room.totals, room.states, like, heads.norm.weight, heads.norm.eps, step.out, count,
            FUSED=heads.fused, SIGMOID=heads.gate == "sigmoid", num_warps=4, num_stages=1, **tiles, **wide,
        )  # fmt: skip
        return True

    def fuses_delta(self, heads: DeltaHeads) -> bool:
        """Whether it runs in fused kernels; one that does not is told of once."""
        if max(heads.key_dim, heads.value_dim) > WIDEST or heads.taps.shape[0] < 2:
            self.tell(f"delta nets with heads of {heads.key_dim} and {heads.value_dim}")
            return False
        return True


class _ChunkRoom:
    """Between the kernels of a chunk: see triton_delta. `key_dim`, `value_dim`: of tiles."""

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
    """A side of a tile of a tensor core's product."""
    return max(16, power(width))
