"""Limits of the compiled kernels, and the workspace that they need. The numbers are those of the C sources."""

from __future__ import annotations

from ..delta_rule import DeltaHeads
from ..forward_batch import FEW_ROWS, HeadShape

# Largest units of gemm.c and attention.c (widest vectors): rows of x, columns and rows of a panel, query rows of a
# tile.
MANY_ROWS, DEPTH, PANEL, TILE_ROWS = 264, 256, 32, 60
# Most queries that share a key head in attention.c, and what head widths are a multiple of on any processor.
MOST_GROUP, HEAD_STEP = 64, 16
# Limits of delta.c: widths of heads are a multiple of the first and at most the others.
DELTA_STEP, DELTA_KEY, DELTA_VALUES, DELTA_TAPS = 16, 256, 2048, 8
# Hidden widths in streams.c are a multiple of this. Most experts per token in experts.c.
STREAM_STEP, MOST_ACTIVE = 16, 32
ALIGNMENT = 64


def fits(heads: HeadShape, step: int) -> bool:
    """Whether attention.c supports the heads, whose width must be a multiple of `step`."""
    return heads.head_dim % step == 0 and heads.heads // heads.kv_heads <= MOST_GROUP


def fits_delta(heads: DeltaHeads) -> bool:
    """Whether delta.c supports the heads."""
    whole = not (heads.key_dim % DELTA_STEP or heads.value_dim % DELTA_STEP)
    values = heads.group * heads.value_dim
    return whole and heads.key_dim <= DELTA_KEY and values <= DELTA_VALUES and heads.taps.shape[0] <= DELTA_TAPS


def shared_bytes(columns: int) -> int:
    """Workspace shared by all threads, for rows of x that are `columns` wide."""
    return MANY_ROWS * -(-columns // DEPTH) * DEPTH * 4 + 4 * ALIGNMENT


def thread_bytes(columns: int, heads: HeadShape) -> int:
    """Workspace per thread, for the same rows and for attention."""
    row = -(-columns // DEPTH) * DEPTH * 4
    panels = 2 * PANEL * DEPTH * 4 + 2 * MANY_ROWS * PANEL * 4
    tile = max(TILE_ROWS, heads.heads // heads.kv_heads + TILE_ROWS - 48)
    mixing = (2 * heads.head_dim + 34) * tile * 4 + 32 * heads.head_dim * 4
    return max((FEW_ROWS + 1) * row, 2 * row + panels, mixing) + 16 * ALIGNMENT
