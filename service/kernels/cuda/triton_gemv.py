"""One activation row times a weight, for decode at batch 1: a persistent grid that streams the rows of the weight.

A program keeps x in registers, prepared once, and walks over groups of BR * RL weight rows. It loads the words of the
next group while it multiplies. A tile is RL rows times NB units of 16 bytes; a row has T tiles. With 8-bit and 4-bit
weights x is fixed-point, 16 bits relative to the largest number of its unit, and products are integer dot products of
four (dp4a): converting every weight to a float would take longer than reading it. The rounding is 2^-16 of the largest
number of the unit, less than that of a bf16 activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import (
    dot_int4,
    dot_int8,
    e2m1_floats,
    e4m3,
    early,
    fixed,
    fixed_sum,
    four,
    fp8_floats,
    halves,
    two,
)


@triton.jit
def stack(t, N: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr):
    """[RL, NB, N] of N = 1, 2, 4 or 8 tensors [RL, NB]."""
    if N == 1:
        r = t[0].reshape(RL, NB, 1)
    elif N == 2:
        r = tl.join(t[0], t[1])
    elif N == 4:
        r = tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3])).reshape(RL, NB, 4)
    else:
        even = tl.join(tl.join(t[0], t[4]), tl.join(t[2], t[6])).reshape(RL, NB, 4)
        odd = tl.join(tl.join(t[1], t[5]), tl.join(t[3], t[7])).reshape(RL, NB, 4)
        r = tl.join(even, odd).reshape(RL, NB, 8)
    return r


@triton.jit
def group_words(
    w, row, rows, BR: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, T: tl.constexpr, UNITS: tl.constexpr
):
    """Words [RL, NB, 4] of rows row.., BR * T of them; zeros outside the weight."""
    unit = tl.arange(0, NB)[None, :, None]
    at = unit * 4 + tl.arange(0, 4)[None, None, :]
    t = ()
    for j in tl.static_range(BR):
        r = row + j * RL + tl.arange(0, RL)[:, None, None]
        p = w + tl.minimum(r, rows - 1).to(tl.int64) * (UNITS * 4) + at
        for k in tl.static_range(T):
            t = t + (tl.load(p + k * NB * 4, mask=(row < rows) & (k * NB + unit < UNITS), other=0),)
    return t


@triton.jit
def group_scales(
    s, row, rows, BR: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, T: tl.constexpr, UNITS: tl.constexpr,
    GROUPS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Scales (or offsets) [RL, NB] of the same units as stored, one per SHARE units. For nvfp4 both scales of a unit as
    one number.
    """
    unit = tl.arange(0, NB)[None, :]
    t = ()
    for j in tl.static_range(BR):
        r = row + j * RL + tl.arange(0, RL)[:, None]
        p = s + tl.minimum(r, rows - 1).to(tl.int64) * GROUPS
        for k in tl.static_range(T):
            b = k * NB + unit
            t = t + (tl.load(p + b // SHARE, mask=(row < rows) & (b < UNITS), other=0),)
    return t


@triton.jit
def unit_floats(
    x, norm, k: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x of tile k: 32 / BITS columns per word as tensors [RL, NB, 4], times the norm's weight; and the sum of squares
    [RL, NB].

    Word v of an int4 unit has columns 4v.. in its low nibbles and 16 + 4v.. in its high ones. x are words of two (BITS
    16) or four numbers.
    """
    unit = k * NB + tl.arange(0, NB)[None, :, None] + 0 * tl.arange(0, RL)[:, None, None]
    at = unit * (8 if BITS == 4 else 4) + tl.arange(0, 4)[None, None, :]
    live = (unit < UNITS) & (at >= 0)
    if BITS == 16:
        xs = halves(tl.load(x + at, mask=live, other=0), HALF)
    elif BITS == 8:
        xs = four(tl.load(x + at, mask=live, other=0), HALF)
    else:
        xs = four(tl.load(x + at, mask=live, other=0), HALF) + four(tl.load(x + at + 4, mask=live, other=0), HALF)
    squares = tl.zeros([RL, NB], tl.float32)
    if NORM:
        for i in tl.static_range(32 // BITS):
            squares += tl.sum(xs[i] * xs[i], 2)
        if BITS == 16:
            xs = weighted(xs, 0, two(tl.load(norm + at, mask=live, other=0)))
        else:
            n = two(tl.load(norm + 2 * at, mask=live, other=0)) + two(tl.load(norm + 2 * at + 1, mask=live, other=0))
            if BITS == 8:
                xs = weighted(xs, 0, n)
            else:
                m = two(tl.load(norm + 2 * at + 8, mask=live, other=0)) + two(
                    tl.load(norm + 2 * at + 9, mask=live, other=0)
                )
                xs = weighted(xs, 0, n) + weighted(xs, 4, m)
    return xs, squares


@triton.jit
def weighted(xs, FROM: tl.constexpr, n):
    """xs[FROM + i] * n[i]."""
    t = ()
    for i in tl.static_range(len(n)):
        t = t + (xs[FROM + i] * n[i],)
    return t


@triton.jit
def largest(xs, N: tl.constexpr):
    """The largest |x| of each unit: [RL, NB]."""
    m = tl.abs(xs[0])
    for i in tl.static_range(1, N):
        m = tl.maximum(m, tl.abs(xs[i]))
    return tl.maximum(tl.max(m, 2), 1e-30)


@triton.jit
def unit_fixed(xs, BITS: tl.constexpr, ASM: tl.constexpr):
    """The floats of `unit_floats` as the fixed-point numbers that `products` takes."""
    m = largest(xs, 32 // BITS)
    inverse = tl.broadcast_to((32512.0 / m)[:, :, None], xs[0].shape)
    scale = m * (1.0 / 32512.0)
    words = fixed((xs[0], xs[1], xs[2], xs[3]), inverse, ASM)
    if BITS == 8:
        ready = words + (scale,)
    else:
        more = fixed((xs[4], xs[5], xs[6], xs[7]), inverse, ASM)
        total = tl.sum(fixed_sum(words[0], words[1], ASM) + fixed_sum(more[0], more[1], ASM), 2)
        ready = words + more + (scale, total)
    return ready


@triton.jit
def held_fixed(x, sums, k: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, UNITS: tl.constexpr, BITS: tl.constexpr):
    """The same from the output of `fixed_point`: high and low words, one scale and one sum per unit."""
    unit = k * NB + tl.arange(0, NB)[None, :] + 0 * tl.arange(0, RL)[:, None]
    W: tl.constexpr = 8 if BITS == 4 else 4
    at = unit[:, :, None] * W + tl.arange(0, 4)[None, None, :]
    live = (unit[:, :, None] < UNITS) & (at >= 0)
    low = x + UNITS * W
    scale = tl.load(sums + unit, mask=unit < UNITS, other=0.0)
    words = (tl.load(x + at, mask=live, other=0), tl.load(low + at, mask=live, other=0))
    if BITS == 8:
        ready = words + (scale,)
    else:
        total = tl.load(sums + UNITS + unit, mask=unit < UNITS, other=0.0).to(tl.int32)
        ready = words + (
            tl.load(x + at + 4, mask=live, other=0),
            tl.load(low + at + 4, mask=live, other=0),
            scale,
            total,
        )
    return ready


@triton.jit
def nvfp4_sums(w, s, xs, j: tl.constexpr, T: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr):
    """[RL, NB] of `products` for the nvfp4 units of group j."""
    a = tl.zeros([RL, NB], tl.float32)
    for k in tl.static_range(T):
        n = e2m1_floats(w[j * T + k])
        low = tl.zeros([RL, NB, 4], tl.float32)
        high = tl.zeros([RL, NB, 4], tl.float32)
        for i in tl.static_range(4):
            low = low + n[i] * xs[k][i]
            high = high + n[4 + i] * xs[k][4 + i]
        both = s[j * T + k].to(tl.int32)
        a += tl.sum(low, 2) * e4m3(both & 255) + tl.sum(high, 2) * e4m3((both >> 8) & 255)
    return a


@triton.jit
def products(  # noqa: C901 - a kernel's forms, of which each compilation keeps one
    w, s, o, xs, BR: tl.constexpr, T: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr,
    HALF: tl.constexpr, SHARE: tl.constexpr, OFFSETS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BR partial sums [RL, NB] of the products of the rows with x. SHARE 0: there is one scale per row, not applied
    here.
    """
    out = ()
    for j in tl.static_range(BR):
        if FORMAT == "nvfp4":
            a = nvfp4_sums(w, s, xs, j, T, RL, NB)
        elif FORMAT == "float" or FORMAT == "fp8":
            a = tl.zeros([RL, NB], tl.float32)
            run = tl.zeros([RL, NB, 4], tl.float32)
            for k in tl.static_range(T):
                n = halves(w[j * T + k], HALF) if FORMAT == "float" else fp8_floats(w[j * T + k])
                if SHARE:
                    run = run * 0
                for i in tl.static_range(len(n)):
                    run = run + n[i] * xs[k][i]
                if SHARE:
                    a += tl.sum(run, 2) * (s[j * T + k].to(tl.float32) * 256.0)
            if not SHARE:
                a = tl.sum(run, 2) * (256.0 if FORMAT == "fp8" else 1.0)
        else:
            a = tl.zeros([RL, NB], tl.float32)
            for k in tl.static_range(T):
                x = xs[k]
                if FORMAT == "int8":
                    q = dot_int8(w[j * T + k], x[0], x[1], RL, NB, ASM).to(tl.float32) * x[2]
                else:
                    zero = x[5] * 0 if OFFSETS else x[5] * -128
                    words = w[j * T + k]
                    q = dot_int4(words, x, tl.broadcast_to(zero[:, :, None], words.shape), RL, NB, ASM).to(
                        tl.float32
                    ) * (x[4] * 0.0625)
                if SHARE:
                    q *= s[j * T + k].to(tl.float32)
                if OFFSETS:
                    q += o[j * T + k].to(tl.float32) * (x[5].to(tl.float32) * x[4])
                a += q
        out = out + (a,)
    return out


@triton.jit
def load_group(
    w, s, o, row, rows, BR: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr, T: tl.constexpr, UNITS: tl.constexpr,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """The inputs of `products` for the rows row..: words, scales, offsets."""
    words = group_words(w, row, rows, BR, RL, NB, T, UNITS)
    held = words
    more = words
    if SHARE:
        held = group_scales(s, row, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE)
    if OFFSETS:
        more = group_scales(o, row, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE)
    return words, held, more


@triton.jit
def folded(y, FOLD: tl.constexpr):
    """silu(y * FOLD), or y if FOLD is 0."""
    if FOLD != 0.0:
        y = y * FOLD
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def gemv(
    x, norm, w, scales, offsets, out, picks, rows, eps,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    OFFSETS: tl.constexpr, BR: tl.constexpr, RL: tl.constexpr, NB: tl.constexpr,
    NORM: tl.constexpr, HELD: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, FOLD: tl.constexpr,
    PICKED: tl.constexpr, SEVERAL: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows] = w [rows, COLS] times x, or out += it (ADD), or silu of it times the product with the rows after
    `rows` (GATED); FOLD: see `folded`.

    w: int32 words. x: words of 16-bit floats; with NORM they are normed first (norm: words of fp32); with HELD they are
    the output of `fixed_point`, and `norm` its scales and sums. GROUPS scales per row; SHARE units of 16 bytes per
    scale, 0 for one per row. nvfp4: both scales of a unit as one number, and the factors of the rows instead of
    offsets.

    PICKED: grid (programs, picks). Pick i uses weight picks[i] of several contiguous ones and row i // PICKED of x, and
    writes row i of out [picks, rows]. SEVERAL: grid (programs, rows of x), one row of out each.
    """
    BITS: tl.constexpr = 16 if FORMAT == "float" else 4 if FORMAT == "int4" or FORMAT == "nvfp4" else 8
    UNITS: tl.constexpr = COLS * BITS // 128
    T: tl.constexpr = (UNITS + NB - 1) // NB
    STEP: tl.constexpr = BR * RL
    # The factor that e2m1 and e4m3 leave out.
    ROW_UNIT: tl.constexpr = 4194304.0 if FORMAT == "nvfp4" else 1.0
    ROW_SCALE: tl.constexpr = (BITS == 8 and SHARE == 0) or FORMAT == "nvfp4"
    if PICKED:
        early(PDL)
        pick = tl.program_id(1).to(tl.int64)
        before_it = tl.load(picks + pick).to(tl.int64) * (rows * 2 if GATED else rows)
        w += before_it * (UNITS * 4)
        scales += before_it * GROUPS
        offsets += before_it * (1 if FORMAT == "nvfp4" else GROUPS)
        x += (pick // PICKED) * (COLS // 2 if BITS == 16 else COLS // 4)
        out += pick * rows
    if SEVERAL:
        own = tl.program_id(1).to(tl.int64)
        x += own * (COLS // 2 if BITS == 16 else COLS // 4)
        out += own * rows
    up = w + rows.to(tl.int64) * (UNITS * 4)
    up_scales = scales + rows.to(tl.int64) * GROUPS
    up_offsets = offsets + rows.to(tl.int64) * (1 if FORMAT == "nvfp4" else GROUPS)
    row_scales = offsets if FORMAT == "nvfp4" else scales
    up_row_scales = up_offsets if FORMAT == "nvfp4" else up_scales
    row = tl.program_id(0) * STEP
    a = load_group(w, scales, offsets, row, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE, OFFSETS)
    b = load_group(up, up_scales, up_offsets, row, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE, OFFSETS) if GATED else a
    if not PICKED:
        early(PDL)
    xs = ()
    squares = tl.zeros([RL, NB], tl.float32)
    for k in tl.static_range(T):
        if HELD:
            xs = xs + (held_fixed(x, norm, k, RL, NB, UNITS, BITS),)
        else:
            floats, more = unit_floats(x, norm, k, RL, NB, UNITS, BITS, HALF, NORM)
            squares += more
            xs = xs + ((unit_fixed(floats, BITS, ASM) if FORMAT == "int8" or FORMAT == "int4" else floats),)
    root = tl.rsqrt(tl.sum(squares, 1) / COLS + eps)[:, None] if NORM else 1.0
    for at in range(row, rows, tl.num_programs(0) * STEP):
        then = at + tl.num_programs(0) * STEP
        a_next = load_group(w, scales, offsets, then, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE, OFFSETS)
        b_next = (
            load_group(up, up_scales, up_offsets, then, rows, BR, RL, NB, T, UNITS, GROUPS, SHARE, OFFSETS)
            if GATED
            else a_next
        )
        r = at + tl.arange(0, BR)[None, :] * RL + tl.arange(0, RL)[:, None]
        ok = r < rows
        before = tl.load(out + r, ok, 0.0).to(tl.float32) if ADD else 0.0
        by = tl.load(row_scales + r, ok, 0.0) * (root * ROW_UNIT) if ROW_SCALE else root
        y = (
            tl.sum(
                stack(products(a[0], a[1], a[2], xs, BR, T, RL, NB, FORMAT, HALF, SHARE, OFFSETS, ASM), BR, RL, NB), 1
            )
            * by
        )
        if GATED:
            by = tl.load(up_row_scales + r, ok, 0.0) * (root * ROW_UNIT) if ROW_SCALE else root
            z = (
                tl.sum(
                    stack(products(b[0], b[1], b[2], xs, BR, T, RL, NB, FORMAT, HALF, SHARE, OFFSETS, ASM), BR, RL, NB),
                    1,
                )
                * by
            )
            y = y * tl.sigmoid(y) * z
        tl.store(out + r, (before + folded(y, FOLD)).to(out.dtype.element_ty), ok)
        a, b = a_next, b_next
