"""Sparse experts without a look from the host: who is chosen, tiles of rows that share an expert, and what the chosen ones found."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import early
from .triton_skinny import tile_sum


@triton.jit
def route(
    x, scores, gate, picks, weights, shares,
    COUNT: tl.constexpr, ROOM: tl.constexpr, ACTIVE: tl.constexpr, PICKS: tl.constexpr, NORMALIZED: tl.constexpr, SHARED: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """picks and weights [T, ACTIVE]: the likeliest of scores [T, COUNT] (softmax in fp32), the first of equal ones first. Grid (T,).

    SHARED: shares [T] = the sigmoid of gate [COLS] times x [T, COLS]. ROOM and PICKS: powers of two, at least COUNT and ACTIVE.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, ROOM)
    a = tl.arange(0, PICKS)
    c = tl.arange(0, BLOCK)
    early(PDL)
    left = tl.load(scores + row * COUNT + e, mask=e < COUNT, other=float("-inf")).to(tl.float32)
    top = tl.max(left)
    total = tl.sum(tl.exp(left - top))
    found = tl.zeros([PICKS], tl.int32)
    likely = tl.zeros([PICKS], tl.float32)
    for i in tl.static_range(ACTIVE):
        best = tl.max(left)
        # Where scores are no numbers nothing is the best: the place must still be one of an expert.
        at = tl.minimum(tl.min(tl.where(left == best, e, ROOM)), COUNT - 1)
        found = tl.where(a == i, at, found)
        likely = tl.where(a == i, tl.exp(best - top) / total, likely)
        left = tl.where(e == at, float("-inf"), left)
    if NORMALIZED:
        likely = likely / tl.sum(likely)
    tl.store(picks + row * ACTIVE + a, found, a < ACTIVE)
    tl.store(weights + row * ACTIVE + a, likely, a < ACTIVE)
    if SHARED:
        sums = tl.zeros([BLOCK], tl.float32)
        for at in tl.static_range(0, COLS, BLOCK):
            g = tl.load(gate + at + c, mask=at + c < COLS, other=0.0).to(tl.float32)
            sums += g * tl.load(x + row * COLS + at + c, mask=at + c < COLS, other=0.0).to(tl.float32)
        tl.store(shares + row, tl.sigmoid(tl.sum(sums)))


@triton.jit(do_not_specialize=["count"])
def lay_out(chosen, tiles, count, most, COUNT: tl.constexpr, ROOM: tl.constexpr, LOG: tl.constexpr, BM: tl.constexpr):
    """tiles [3, most]: expert (-1 behind the last tile), first and end of up to BM picks that share it; chosen [count]: experts in order.

    One program. ROOM: a power of two of experts, at least COUNT; 2^LOG > count.
    """
    e = tl.arange(0, ROOM)
    end = tl.zeros([ROOM], tl.int32)
    for i in tl.static_range(LOG):
        then = end + (1 << (LOG - 1 - i))
        inside = then <= count
        last = tl.load(chosen + then - 1, mask=inside, other=0)
        end = tl.where(inside & (last <= e), then, end)
    first = tl.zeros([ROOM], tl.int32)
    for i in tl.static_range(LOG):
        then = first + (1 << (LOG - 1 - i))
        inside = then <= count
        last = tl.load(chosen + then - 1, mask=inside, other=0)
        first = tl.where(inside & (last < e), then, first)
    needed = tl.where(e < COUNT, (end - first + BM - 1) // BM, 0)
    at = tl.cumsum(needed, 0) - needed
    for i in range(tl.max(needed)):
        live = i < needed
        tl.store(tiles + at + i, e, live)
        tl.store(tiles + most + at + i, first + i * BM, live)
        tl.store(tiles + 2 * most + at + i, tl.minimum(first + (i + 1) * BM, end), live)
    for i in range(tl.sum(needed), most, ROOM):
        tl.store(tiles + i + e, e * 0 - 1, i + e < most)


@triton.jit(do_not_specialize=["most"])
def grouped(
    x, w, scales, offsets, out, tiles, order, rows, most,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    SHARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [picks, rows]: row order[i] // SHARE of x times weight `expert` of those behind w, for the picks i of each tile of `lay_out`.

    GATED as in `skinny`. Grid (blocks of rows, most): programs beside each other read the same rows of x.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        PER: tl.constexpr = (COLS + BK - 1) // BK
        i = tl.load(tiles + most + tile) + tl.arange(0, BM)
        inside = i < tl.load(tiles + 2 * most + tile)
        live = inside[:, None]
        pick = tl.load(order + i, mask=inside, other=0).to(tl.int64)
        b = pick // SHARE
        r = tl.program_id(0) * BN + tl.arange(0, BN)
        n = tl.minimum(r, rows - 1).to(tl.int64) + expert.to(tl.int64) * (rows * 2 if GATED else rows)
        acc = tile_sum(x, w, scales, offsets, b, live, n, 0, COLS, FORMAT, HALF, GROUPS, GROUP, OFFSETS, BM, BN, BK, PER, STAGES, ASM)
        if GATED:
            n += rows
            up = tile_sum(x, w, scales, offsets, b, live, n, 0, COLS, FORMAT, HALF, GROUPS, GROUP, OFFSETS, BM, BN, BK, PER, STAGES, ASM)
            acc = acc * tl.sigmoid(acc) * up
        tl.store(out + pick[:, None] * rows + r[None, :], acc.to(out.dtype.element_ty), live & (r < rows)[None, :])


@triton.jit
def combine(
    found, weights, shared, shares, out,
    COLS: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, COLS] += the sum over a row's picks of weight times found [T * ACTIVE, COLS], always in the same order, and
    its share of shared [T, COLS]: grid (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < COLS
    early(PDL)
    y = tl.load(out + row * COLS + c, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(ACTIVE):
        y += tl.load(weights + row * ACTIVE + i) * tl.load(found + (row * ACTIVE + i) * COLS + c, mask=live, other=0.0).to(tl.float32)
    if SHARED:
        y += tl.load(shares + row) * tl.load(shared + row * COLS + c, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * COLS + c, y.to(out.dtype.element_ty), live)
