"""What the compiled kernels take at most, and the room that they ask for; the numbers are those of the C sources."""

from __future__ import annotations

from ..delta import DeltaHeads
from ..forward_batch import FEW_ROWS, HeadShape

# What gemm.c and attention.c take at once at most (widest vectors): rows of x, columns and rows of a panel, query rows of a tile.
MANY_ROWS, DEPTH, PANEL, TILE_ROWS = 264, 256, 32, 60
# The most queries that share a key head in attention.c, and what its head widths are a multiple of on any processor.
MOST_GROUP, HEAD_STEP = 64, 16
# What delta.c takes: widths of heads are a multiple of this, and at most these.
DELTA_STEP, DELTA_KEY, DELTA_VALUES, DELTA_TAPS = 16, 256, 2048, 8
# What streams.c takes: hidden widths are a multiple of this. What experts.c takes: so many experts of a token at most.
STREAM_STEP, MOST_ACTIVE = 16, 32
ALIGNMENT = 64


def fits(heads: HeadShape, step: int) -> bool:
    """Whether attention.c has something for heads whose width is to be a multiple of `step`."""
    return heads.head_dim % step == 0 and heads.heads // heads.kv_heads <= MOST_GROUP


def fits_delta(heads: DeltaHeads) -> bool:
    """Whether delta.c has something for the heads."""
    whole = not (heads.key_dim % DELTA_STEP or heads.value_dim % DELTA_STEP)
    values = heads.group * heads.value_dim
    return whole and heads.key_dim <= DELTA_KEY and values <= DELTA_VALUES and heads.taps.shape[0] <= DELTA_TAPS


def shared_bytes(columns: int) -> int:
    """Room that all threads share, for rows of x that are `columns` wide."""
    return MANY_ROWS * -(-columns // DEPTH) * DEPTH * 4 + 4 * ALIGNMENT


def thread_bytes(columns: int, heads: HeadShape) -> int:
    """Room of one thread, for the same and for attention."""
    row = -(-columns // DEPTH) * DEPTH * 4
    panels = 2 * PANEL * DEPTH * 4 + 2 * MANY_ROWS * PANEL * 4
    tile = max(TILE_ROWS, heads.heads // heads.kv_heads + TILE_ROWS - 48)
    mixing = (2 * heads.head_dim + 34) * tile * 4 + 32 * heads.head_dim * 4
    return max((FEW_ROWS + 1) * row, 2 * row + panels, mixing) + 16 * ALIGNMENT
