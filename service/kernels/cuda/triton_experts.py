"""Sparse experts without reading values on the host: routing, tiles of rows that share an expert, and the sum of their
results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import early
from .triton_skinny import (
    fp8_halves,
    int4_halves,
    int8_halves,
    nvfp4_halves,
    nvfp4_scales,
    spread,
)


@triton.jit
def route(
    x, scores, gate, picks, weights, shares,
    COUNT: tl.constexpr, PADDED: tl.constexpr, ACTIVE: tl.constexpr, PICKS: tl.constexpr, NORMALIZED: tl.constexpr,
    SHARED: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """picks and weights [T, ACTIVE]: the largest of scores [T, COUNT] (softmax in fp32), the first of equal ones. Grid
    (T,).

    SHARED: shares [T] = the sigmoid of gate [COLS] times x [T, COLS]. PADDED and PICKS: powers of two, at least COUNT
    and ACTIVE.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
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
        # If scores are NaN, none is the best. The index must still name an expert.
        at = tl.minimum(tl.min(tl.where(left == best, e, PADDED)), COUNT - 1)
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


@triton.jit(do_not_specialize=["count", "most"])
def sort_picks(picks, order, tiles, count, most, BM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """order [count]: the picks sorted by expert, stable. tiles [3, most]: expert (-1: nothing to do), first and end in
    `order` of up to BM picks that share it.

    Grid (experts,): each program counts the picks before its own. Its tiles start at its number + first // BM, so no
    program needs the counts of others; `most` = experts + count // BM.
    """
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    early(PDL)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for at in range(0, count, BLOCK):
        e = tl.load(picks + at + i, mask=at + i < count, other=2147483647)
        before += (e < expert).to(tl.int32)
        own += (e == expert).to(tl.int32)
    first = tl.sum(before)
    end = first + tl.sum(own)
    at_tile = expert + first // BM
    then = expert + 1 + end // BM
    for at in range(at_tile, then, 32):
        t = at + tl.arange(0, 32)
        start = first + (t - at_tile) * BM
        tl.store(tiles + t, tl.where(start < end, expert, -1), t < then)
        tl.store(tiles + most + t, start, t < then)
        tl.store(tiles + 2 * most + t, tl.minimum(start + BM, end), t < then)
    placed = first
    for at in range(0, count, BLOCK):
        e = tl.load(picks + at + i, mask=at + i < count, other=2147483647)
        mine = (e == expert).to(tl.int32)
        tl.store(order + placed + tl.cumsum(mine, 0) - 1, at + i, mine > 0)
        placed += tl.sum(mine)


@triton.jit
def join_nibbles(low, high, BW: tl.constexpr, BK: tl.constexpr):
    """[BW, BK] from two [BW, BK // 2]: low nibbles, then high ones. Every number stays in its thread."""
    return tl.join(low, high).permute(0, 2, 1).reshape(BW, BK)


@triton.jit
def turned_sum(  # noqa: C901 - a kernel's forms, of which each compilation keeps one
    x, w, scales, offsets, row, live, n,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[BW, BM] fp32: rows n of w times the `live` ones of rows `row` of x, in steps of BK columns under one scale
    (nvfp4: any).

    The weight is the left operand: from sm_90 on it may come from registers, where it becomes floats, and the few rows
    of x are the width of a tensor-core product, which may be 16. Scales are read one step ahead: they are too small for
    background copies.
    """
    TWO: tl.constexpr = FORMAT == "int4" or FORMAT == "nvfp4"  # columns per byte
    HELD: tl.constexpr = BK // 2 if TWO else BK
    WIDTH: tl.constexpr = COLS // 2 if TWO else COLS
    UNITS: tl.constexpr = BK // 32 if FORMAT == "nvfp4" else 1
    STEPS: tl.constexpr = (COLS + BK - 1) // BK
    WHOLE: tl.constexpr = COLS % BK == 0
    SCALED: tl.constexpr = FORMAT == "int4" or FORMAT == "nvfp4" or (FORMAT != "float" and GROUPS > 1)
    k = tl.arange(0, BK)
    if TWO:
        k = tl.max_contiguous(tl.multiple_of(k % HELD // 16 * 32 + k % 16 + k // HELD * 16, 16), 16)
    held = tl.arange(0, HELD)
    unit = tl.arange(0, UNITS)
    xs = x + row[:, None] * COLS + k[None, :]
    ws = w + n[:, None] * WIDTH + held[None, :]
    acc = tl.zeros([BW, BM], tl.float32)
    s = tl.zeros([BW, UNITS], tl.float32)
    if SCALED:
        ss = scales + n[:, None] * GROUPS + unit[None, :]
        s = tl.load(ss, mask=(unit < GROUPS)[None, :], other=0.0)
    for i in tl.range(STEPS, num_stages=STAGES):
        if WHOLE:
            t = tl.load(xs + i * BK, mask=live[:, None], other=0.0)
            q = tl.load(ws + i * HELD)
        else:
            t = tl.load(xs + i * BK, mask=live[:, None] & (i * BK + k < COLS)[None, :], other=0.0)
            q = tl.load(ws + i * HELD, mask=(i * HELD + held < WIDTH)[None, :], other=0)
        ahead = s
        if SCALED:
            then = tl.minimum(i + 1, STEPS - 1) * (UNITS if FORMAT == "nvfp4" else BK)
            then = then if FORMAT == "nvfp4" else then // GROUP
            ahead = tl.load(ss + then, mask=(then + unit < GROUPS)[None, :], other=0.0)
        if FORMAT == "int4":
            low, high = int4_halves(q, HALF, ASM)
            acc += tl.dot(join_nibbles(low, high, BW, BK), t.T) * s.to(tl.float32)
            if OFFSETS:
                o = tl.load(offsets + n * GROUPS + i * BK // GROUP).to(tl.float32)[:, None] + 8.0 * s.to(tl.float32)
                acc += o * tl.sum(t.to(tl.float32), 1)[None, :]
        elif FORMAT == "nvfp4":
            low_scale, high_scale = nvfp4_scales(s.to(tl.int32), HALF, ASM)
            low, high = nvfp4_halves(q, spread(low_scale, BW, UNITS), spread(high_scale, BW, UNITS), HALF, ASM)
            acc = tl.dot(join_nibbles(low, high, BW, BK), t.T, acc)
        elif FORMAT == "float":
            acc = tl.dot(q, t.T, acc)
        else:
            q = int8_halves(q, HALF, ASM) if FORMAT == "int8" else fp8_halves(q, HALF)
            if GROUPS > 1:
                acc += tl.dot(q, t.T) * s
            else:
                acc = tl.dot(q, t.T, acc)
        s = ahead
    if FORMAT == "nvfp4":
        acc *= tl.load(offsets + n)[:, None] * (256.0 if ASM and HALF == "bf16" else 1.0)
    elif FORMAT != "float" and not SCALED:
        acc *= tl.load(scales + n)[:, None]
    if FORMAT == "fp8":
        acc *= 256.0
    return acc


@triton.jit(do_not_specialize=["most"])
def grouped(
    x, w, scales, offsets, out, tiles, order, rows, most,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, SHARE: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [picks, rows]: row order[i] // SHARE of x times weight `expert` of the contiguous weights from w on, for the
    picks i of each tile of `sort_picks`. If not SORTED, tiles [most] are the experts of the picks, one tile each.

    GATED as in `skinny`; a tile then alternates eight rows of gates with the eight up rows of the same outputs, so that
    one thread has both. Grid (blocks of rows, most): neighbouring programs read the same rows of x.
    """
    tile = tl.program_id(1)
    early(PDL)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        BN: tl.constexpr = BW // 2 if GATED else BW
        if SORTED:
            i = tl.load(tiles + most + tile) + tl.arange(0, BM)
            live = i < tl.load(tiles + 2 * most + tile)
            pick = tl.load(order + i, mask=live, other=0).to(tl.int64)
        else:
            pick = tile.to(tl.int64) + tl.arange(0, BM)
            live = pick == tile
        m = tl.arange(0, BW)
        r = tl.program_id(0) * BN + ((m // 16) * 8 + m % 8 if GATED else m)
        n = tl.minimum(r, rows - 1).to(tl.int64) + expert.to(tl.int64) * (rows * 2 if GATED else rows)
        if GATED:
            n += m // 8 % 2 * rows
        acc = turned_sum(
            x,
            w,
            scales,
            offsets,
            pick // SHARE,
            live,
            n,
            COLS,
            FORMAT,
            HALF,
            GROUPS,
            GROUP,
            OFFSETS,
            BM,
            BW,
            BK,
            STAGES,
            ASM,
        )
        if GATED:
            gate, up = tl.split(acc.reshape(BW // 16, 2, 8, BM).permute(0, 2, 3, 1))
            acc = (gate * tl.sigmoid(gate) * up).reshape(BN, BM)
            r = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(
            out + pick[None, :] * rows + r[:, None], acc.to(out.dtype.element_ty), live[None, :] & (r < rows)[:, None]
        )


@triton.jit
def combine(
    found, weights, shared, shares, out,
    COLS: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, COLS] += the weighted sum over a row's picks of found [T * ACTIVE, COLS], always in the same order, and
    its share of shared [T, COLS]. Grid (T, blocks of columns).
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < COLS
    early(PDL)
    y = tl.load(out + row * COLS + c, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(ACTIVE):
        y += tl.load(weights + row * ACTIVE + i) * tl.load(
            found + (row * ACTIVE + i) * COLS + c, mask=live, other=0.0
        ).to(tl.float32)
    if SHARED:
        y += tl.load(shares + row) * tl.load(shared + row * COLS + c, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * COLS + c, y.to(out.dtype.element_ty), live)
