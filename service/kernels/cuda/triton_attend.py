"""Attention over paged keys and values: a decode step with everything fused, and chunks of one sequence (Dao et al.
2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import early


@triton.jit
def block_tile(keys, values, table, at, end, kv, KV: tl.constexpr, D: tl.constexpr):
    """Lower and upper halves of the 32 keys at positions at.., and their values; zeros for values from `end` on.

    A key from `end` on may be anything, because its score is not used. A value that is NaN would spoil a sum even with
    weight 0.
    """
    H: tl.constexpr = D // 2
    n = tl.arange(0, 32)[:, None]
    block = tl.load(table + at // 32, mask=at < end, other=0)
    base = (block.to(tl.int64) * KV + kv) * (32 * D)
    half = n * D + tl.arange(0, H)[None, :]
    low = tl.load(keys + base + half)
    high = tl.load(keys + base + H + half)
    held = tl.load(values + base + n * D + tl.arange(0, D)[None, :], mask=n < end - at, other=0.0)
    return low, high, held


@triton.jit
def rotated(low, high, weight_low, weight_high, c, s, eps, D: tl.constexpr):
    """RMS norm and rotary embedding of heads, given as two halves [rows, D / 2]."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    root = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    low = low * root * weight_low
    high = high * root * weight_high
    return low * c - high * s, high * c + low * s


@triton.jit
def own_heads(qkv, kv, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr):
    """Halves of the queries of a key/value head [16, D / 2] and of its new key [1, D / 2], and its new value [D]."""
    G: tl.constexpr = HEADS // KV
    H: tl.constexpr = D // 2
    h = tl.arange(0, H)[None, :]
    i = tl.arange(0, 16)[:, None]
    p = qkv + (kv * G + i) * D + h
    k = qkv + (HEADS + kv) * D + h
    v = qkv + (HEADS + KV + kv) * D + tl.arange(0, D)
    return (
        tl.load(p, mask=i < G, other=0.0),
        tl.load(p + H, mask=i < G, other=0.0),
        tl.load(k),
        tl.load(k + H),
        tl.load(v),
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def join_splits(
    positions, parts, tops, sums, out,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, MORE: tl.constexpr,
    COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the results of all splits of `attend_step`. Grid (B, KV, blocks of COLUMNS). If one split had all the work,
    its result is final already.

    The splits share positions [B] + MORE positions. TOGETHER: all rows share positions[0] + MORE.

    This is a kernel of its own: joining in the last split, after a fence and a counter, took 4.6 us per layer on an
    H200 instead of 2.
    """
    G: tl.constexpr = HEADS // KV
    b = tl.program_id(0)
    kv = tl.program_id(1)
    # For selected positions the kernel before writes their number.
    early(PDL)
    pos = tl.load(positions if TOGETHER else positions + b) + MORE
    active = tl.maximum(tl.cdiv(pos, split_size(pos, SPLITS)), 1)
    if active > 1:
        q = tl.arange(0, SPLITS)[:, None]
        g = tl.arange(0, GP)
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        row = ((b * KV + kv) * SPLITS + q) * GP + g[None, :]
        m = tl.load(tops + row, mask=q < active, other=-1e30)
        mass = tl.load(sums + row, mask=q < active, other=0.0)
        part = tl.load(parts + row[:, :, None] * D + d[None, None, :], mask=(q < active)[:, :, None], other=0.0)
        f = tl.exp2(m - tl.max(m, 0)[None, :])
        f = f / tl.sum(f * mass, 0)[None, :]
        y = tl.sum(part * f[:, :, None], 0)
        o = out + b * (HEADS * D) + (kv * G + g)[:, None] * D + d[None, :]
        tl.store(o, y.to(out.dtype.element_ty), (g < G)[:, None])


@triton.jit
def split_size(pos, SPLITS: tl.constexpr):
    """Positions per split, in whole blocks, if `pos` are shared."""
    return (tl.maximum(tl.cdiv(pos, SPLITS), 1) + 31) // 32 * 32


@triton.jit
def with_block(ql, qh, low, high, held, visible, m, weight_sum, acc):
    """Extend the attention of queries (halves) by a `block_tile`, as far as each sees it: see `attend_step`."""
    scores = tl.dot(qh, high.T, tl.dot(ql, low.T))
    scores = tl.where(visible, scores, -1e30)
    top = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - top[:, None])
    fade = tl.exp2(m - top)
    weight_sum = weight_sum * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(held.dtype), held, acc * fade[:, None])
    return top, weight_sum, acc


@triton.jit
def attend_step(
    qkv, q_norm, k_norm, q_eps, k_eps, cos, sin, keys, values, positions, turns, tables, width, parts, tops, sums, out,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One new token for each of B sequences. Grid (B, KV, SPLITS).

    Norms queries and the new key per head, rotates both, stores the new key and value, and attends to all positions up
    to the new one. The splits share the earlier positions in whole blocks. Each leaves its result in `parts` [B, KV,
    SPLITS, GP, D] with the largest score and the sum of weights, for `join_splits`. tables [B, width]: block ids. Which
    splits have work depends on positions alone, so one CUDA graph fits every length.
    """
    G: tl.constexpr = HEADS // KV
    H: tl.constexpr = D // 2
    b = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    pos = tl.load(positions + b)
    chunk = split_size(pos, SPLITS)
    active = tl.maximum(tl.cdiv(pos, chunk), 1)
    start = split * chunk
    end = tl.minimum(start + chunk, pos)
    table = tables + b * width
    low, high, held = block_tile(keys, values, table, start, end, kv, KV, D)
    h = tl.arange(0, H)[None, :]
    d = tl.arange(0, D)
    i = tl.arange(0, 16)
    turn = tl.load(turns + b)
    c = tl.load(cos + turn * H + h)
    s = tl.load(sin + turn * H + h)
    q_low, q_high = tl.load(q_norm + h), tl.load(q_norm + H + h)
    k_low, k_high = tl.load(k_norm + h), tl.load(k_norm + H + h)
    new = ((tl.load(table + pos // 32).to(tl.int64) * KV + kv) * 32 + pos % 32) * D
    early(PDL)
    if split < active:
        ql, qh, kl, kh, v = own_heads(qkv + b * ((HEADS + 2 * KV) * D), kv, HEADS, KV, D)
        ql, qh = rotated(ql, qh, q_low, q_high, c, s, q_eps, D)
        kl, kh = rotated(kl, kh, k_low, k_high, c, s, k_eps, D)
        kl = kl.to(keys.dtype.element_ty)
        kh = kh.to(keys.dtype.element_ty)
        # exp2 with its scale replaces exp.
        ql = ql * (1.4426950408889634 / D**0.5)
        qh = qh * (1.4426950408889634 / D**0.5)
        own = split == 0
        m = tl.where(own, tl.sum(ql * kl.to(tl.float32) + qh * kh.to(tl.float32), 1), -1e30)
        weight_sum = tl.where(own, tl.full([16], 1.0, tl.float32), 0.0)
        acc = tl.zeros([16, D], tl.float32) + tl.where(own, v.to(tl.float32), 0.0)[None, :]
        if own:
            tl.store(keys + new + h, kl)
            tl.store(keys + new + H + h, kh)
            tl.store(values + new + d, v)
        ql = ql.to(keys.dtype.element_ty)
        qh = qh.to(keys.dtype.element_ty)
        for at in range(start, end, 32):
            low_next, high_next, held_next = block_tile(keys, values, table, at + 32, end, kv, KV, D)
            visible = (at + tl.arange(0, 32) < end)[None, :]
            m, weight_sum, acc = with_block(ql, qh, low, high, held, visible, m, weight_sum, acc)
            low, high, held = low_next, high_next, held_next
        o = out + b * (HEADS * D)
        if active == 1:
            tl.store(
                o + (kv * G + i)[:, None] * D + d[None, :],
                (acc / weight_sum[:, None]).to(out.dtype.element_ty),
                (i < G)[:, None],
            )
        else:
            unit = b * KV + kv
            row = (unit * SPLITS + split) * GP + i
            tl.store(parts + row[:, None] * D + d[None, :], acc, (i < GP)[:, None])
            tl.store(tops + row, m, i < GP)
            tl.store(sums + row, weight_sum, i < GP)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions"])
def attend_rows(
    qkv, keys, values, positions, table, parts, tops, sums, out, count,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few rows of one sequence, queries normed and rotated, keys and values in the cache. Grid (tiles of 16 // GP
    rows, KV, SPLITS).

    A tile stacks the queries of its rows, so that each key is read once for all of them. The splits share all positions
    up to that of the last row, the same ones for every row; see `attend_step`.
    """
    G: tl.constexpr = HEADS // KV
    H: tl.constexpr = D // 2
    W: tl.constexpr = (HEADS + 2 * KV) * D
    kv = tl.program_id(1)
    split = tl.program_id(2)
    i = tl.arange(0, 16)
    t = (tl.program_id(0) * (16 // GP) + i // GP).to(tl.int64)
    g = i % GP
    live = (t < count) & (g < G)
    pos = tl.load(positions + t, mask=t < count, other=0)
    most = tl.load(positions + count - 1) + 1
    size = split_size(most, SPLITS)
    active = tl.maximum(tl.cdiv(most, size), 1)
    start = split * size
    end = tl.minimum(start + size, most)
    h = tl.arange(0, H)[None, :]
    d = tl.arange(0, D)[None, :]
    early(PDL)
    if split < active:
        p = qkv + t[:, None] * W + (kv * G + g)[:, None] * D + h
        # exp2 with its scale replaces exp.
        ql = tl.load(p, mask=live[:, None], other=0.0).to(tl.float32) * (1.4426950408889634 / D**0.5)
        qh = tl.load(p + H, mask=live[:, None], other=0.0).to(tl.float32) * (1.4426950408889634 / D**0.5)
        ql = ql.to(keys.dtype.element_ty)
        qh = qh.to(keys.dtype.element_ty)
        m = tl.full([16], -1e30, tl.float32)
        weight_sum = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, D], tl.float32)
        low, high, held = block_tile(keys, values, table, start, end, kv, KV, D)
        for at in range(start, end, 32):
            low_next, high_next, held_next = block_tile(keys, values, table, at + 32, end, kv, KV, D)
            # A row that sees nothing of a split has the lowest score there, so its share counts nothing.
            visible = (at + tl.arange(0, 32))[None, :] <= tl.minimum(pos, end - 1)[:, None]
            m, weight_sum, acc = with_block(ql, qh, low, high, held, visible, m, weight_sum, acc)
            low, high, held = low_next, high_next, held_next
        if active == 1:
            o = out + t[:, None] * (HEADS * D) + (kv * G + g)[:, None] * D + d
            tl.store(o, (acc / weight_sum[:, None]).to(out.dtype.element_ty), live[:, None])
        else:
            row = ((t * KV + kv) * SPLITS + split) * GP + g
            there = t < count
            tl.store(parts + row[:, None] * D + d, acc, there[:, None])
            tl.store(tops + row, m, there)
            tl.store(sums + row, weight_sum, there)


@triton.jit(do_not_specialize=["count"])
def attend_chunk(
    qkv, keys, values, table, out, positions, count,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`count` rows of one sequence at ascending positions, their keys and values in the cache already. Grid (tiles of
    BM // GP rows, KV).

    qkv [count, (HEADS + 2 KV) D], queries normed and rotated. A tile stacks the queries of its rows for one key/value
    head.
    """
    G: tl.constexpr = HEADS // KV
    BT: tl.constexpr = BM // GP
    kv = tl.program_id(1)
    # The last tiles see the most positions, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = tl.arange(0, BM)
    t = tile * BT + m // GP
    g = m % GP
    live = ((t < count) & (g < G))[:, None]
    d = tl.arange(0, D)[None, :]
    W: tl.constexpr = (HEADS + 2 * KV) * D
    q = tl.load(qkv + t[:, None].to(tl.int64) * W + (kv * G + g)[:, None] * D + d, mask=live, other=0.0)
    q = (q.to(tl.float32) * (1.4426950408889634 / D**0.5)).to(q.dtype)
    own = tl.load(positions + t, mask=t < count, other=0)
    end = tl.load(positions + tl.minimum((tile + 1) * BT, count) - 1) + 1
    top = tl.full([BM], -1e30, tl.float32)
    weight_sum = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    n = tl.arange(0, BN)
    for at in tl.range(0, end, BN, num_stages=STAGES):
        there = (at + n < end)[:, None]
        block = tl.load(table + (at + n) // 32, mask=at + n < end, other=0).to(tl.int64)
        p = ((block * KV + kv) * 32 + (at + n) % 32)[:, None] * D + d
        k = tl.load(keys + p, mask=there, other=0.0)
        scores = tl.dot(q, k.T)
        scores = tl.where((at + n)[None, :] <= own[:, None], scores, -1e30)
        best = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - best[:, None])
        fade = tl.exp2(top - best)
        weight_sum = weight_sum * fade + tl.sum(weight, 1)
        v = tl.load(values + p, mask=there, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None])
        top = best
    o = out + t[:, None].to(tl.int64) * (HEADS * D) + (kv * G + g)[:, None] * D + d
    tl.store(o, (acc / weight_sum[:, None]).to(out.dtype.element_ty), live)
