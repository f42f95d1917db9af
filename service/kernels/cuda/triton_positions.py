"""Attention with partial rotary embedding, output gates, or key blocks that an indexer selects: heads into the cache,
and decode from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attend import split_size
from .triton_primitives import early


@triton.jit
def split_gates(
    projected, qkv, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """qkv [T, (HEADS + 2 KV) D] = projected [T, (2 HEADS + 2 KV) D] without the gates after the queries of each head.
    Grid (T, blocks).
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = (HEADS + 2 * KV) * D
    column = tl.where(c < HEADS * D, c // D * (2 * D) + c % D, c + HEADS * D)
    early(PDL)
    x = tl.load(projected + t * (WIDTH + HEADS * D) + column, mask=c < WIDTH, other=0.0)
    tl.store(qkv + t * WIDTH + c, x, c < WIDTH)


@triton.jit
def apply_gates(
    projected, mixed, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """mixed [T, HEADS D] *= the sigmoid of the gates in `projected`, see `split_gates`. Grid (T, blocks)."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < HEADS * D
    early(PDL)
    z = tl.load(projected + t * (2 * (HEADS + KV) * D) + c // D * (2 * D) + D + c % D, mask=live, other=0.0).to(
        tl.float32
    )
    p = mixed + t * (HEADS * D) + c
    y = tl.load(p, mask=live, other=0.0).to(tl.float32) * tl.sigmoid(z)
    tl.store(p, y.to(mixed.dtype.element_ty), live)


@triton.jit
def norm_rotate(p, norm, eps, cos, sin, pos, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr):
    """RMS norm of one head [DP], and rotary embedding of its first 2 HALF numbers."""
    d = tl.arange(0, DP)
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(p + d, mask=d < D, other=0.0).to(tl.float32)
    y = tl.load(p + other, mask=d < D, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x) / D + eps)
    x *= root * tl.load(norm + d, mask=d < D, other=0.0)
    y *= root * tl.load(norm + other, mask=d < D, other=0.0)
    c = tl.load(cos + pos * HALF + d % HALF, mask=d < 2 * HALF, other=1.0)
    s = tl.load(sin + pos * HALF + d % HALF, mask=d < 2 * HALF, other=0.0)
    return x * c + tl.where(d < HALF, -y, y) * s


@triton.jit(do_not_specialize=["ahead"], do_not_specialize_on_alignment=["positions", "turns"])
def store_rotated(
    qkv, q_norm, k_norm, q_eps, k_eps, cos, sin, keys, values, positions, turns, tables, ahead,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries in place, norm and rotate keys into the cache, copy values into it. Grid (T, HEADS + 2
    KV), one warp each.

    The block tables of two rows are `ahead` apart, 0 if all rows belong to one sequence.
    """
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pos = tl.load(positions + t)
    turn = tl.load(turns + t)
    d = tl.arange(0, D)
    p = qkv + t * ((HEADS + 2 * KV) * D) + head * D
    block = tl.load(tables + t * ahead + pos // 32).to(tl.int64)
    early(PDL)
    if head < HEADS:
        x = norm_rotate(p, q_norm, q_eps, cos, sin, turn, D, D, HALF)
        tl.debug_barrier()  # what is written here was read there
        tl.store(p + d, x.to(qkv.dtype.element_ty))
    else:
        at = (block * KV + (head - HEADS) % KV) * (32 * D) + (pos % 32) * D + d
        if head < HEADS + KV:
            x = norm_rotate(p, k_norm, k_eps, cos, sin, turn, D, D, HALF)
            tl.store(keys + at, x.to(keys.dtype.element_ty))
        else:
            tl.store(values + at, tl.load(p + d))


@triton.jit(do_not_specialize=["ahead"], do_not_specialize_on_alignment=["positions", "lengths"])
def attend_positions(
    qkv, keys, values, positions, tables, ahead, chosen, lengths, parts, tops, sums, out,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr, RATIO: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of rows whose queries are rotated, and whose keys and values are in the cache. Grid (T, KV, SPLITS),
    see `attend_step`.

    RATIO 0: each row attends to all positions up to its own. Otherwise it attends to the key blocks of RATIO tokens in
    chosen [T, MOST], in order, and to the tokens after the last full key block, lengths [T] tokens in total.
    """
    G: tl.constexpr = HEADS // KV
    b = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    pos = tl.load(positions + b)
    table = tables + b * ahead
    i = tl.arange(0, 16)
    d = tl.arange(0, D)
    early(PDL)
    count = tl.load(lengths + b) if RATIO else pos + 1
    size = split_size(count, SPLITS)
    active = tl.maximum(tl.cdiv(count, size), 1)
    if split < active:
        q = tl.load(
            qkv + b * ((HEADS + 2 * KV) * D) + (kv * G + i)[:, None] * D + d[None, :], mask=(i < G)[:, None], other=0.0
        )
        q = (q.to(tl.float32) * (1.4426950408889634 / D**0.5)).to(keys.dtype.element_ty)
        m = tl.full([16], -1e30, tl.float32)
        weight_sum = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, D], tl.float32)
        end = tl.minimum(split * size + size, count)
        for at in range(split * size, end, 32):
            n = at + tl.arange(0, 32)
            live = n < end
            token = n
            if RATIO:
                tail = (pos + 1) % RATIO
                inside = n < count - tail
                key_block = tl.load(chosen + b * MOST + n // RATIO, mask=live & inside, other=0)
                token = tl.where(inside, key_block * RATIO + n % RATIO, pos + 1 - count + n)
            block = tl.load(table + token // 32, mask=live, other=0).to(tl.int64)
            p = ((block * KV + kv) * (32 * D) + (token % 32) * D)[:, None] + d[None, :]
            k = tl.load(keys + p, mask=live[:, None], other=0.0)
            v = tl.load(values + p, mask=live[:, None], other=0.0)
            scores = tl.where(live[None, :], tl.dot(q, k.T), -1e30)
            top = tl.maximum(m, tl.max(scores, 1))
            weight = tl.exp2(scores - top[:, None])
            fade = tl.exp2(m - top)
            weight_sum = weight_sum * fade + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None])
            m = top
        if active == 1:
            o = out + b * (HEADS * D) + (kv * G + i)[:, None] * D + d[None, :]
            tl.store(o, (acc / weight_sum[:, None]).to(out.dtype.element_ty), (i < G)[:, None])
        else:
            row = ((b * KV + kv) * SPLITS + split) * GP + i
            tl.store(parts + row[:, None] * D + d[None, :], acc, (i < GP)[:, None])
            tl.store(tops + row, m, i < GP)
            tl.store(sums + row, weight_sum, i < GP)


@triton.jit(do_not_specialize=["count", "ahead"], do_not_specialize_on_alignment=["positions", "turns", "first_turns"])
def pool_keys(
    indexed, tails, pooled, queries, q_norm, k_norm, q_eps, k_eps, cos, sin, positions, turns, first_turns, tables,
    ahead, source, target, count, HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    RATIO: tl.constexpr, CHUNK: tl.constexpr, VERIFY: tl.constexpr, FIRSTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Update what an indexer keeps of rows (see IndexerOperands); queries fp32 [T, HEADS, DIM] are normed and rotated.
    Grid (T, HEADS + 1), one warp each.

    The last program of a row handles its key. If its key block is full, the mean of the raw keys goes into `pooled`,
    normed and rotated to the position of the first token; otherwise the raw key goes into the tails. CHUNK: all rows
    belong to one sequence, whose tail goes from slot source[0] to slot target[0], or with VERIFY after each row to slot
    target[t]. FIRSTS: first_turns [T] are the rotary rows of the first tokens, else they follow from turns [T].
    """
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pos = tl.load(positions + t)
    d = tl.arange(0, DP)
    live = d < DIM
    W: tl.constexpr = (HEADS + 1) * DIM
    early(PDL)
    if head < HEADS:
        x = norm_rotate(indexed + t * W + head * DIM, q_norm, q_eps, cos, sin, tl.load(turns + t), DIM, DP, HALF)
        tl.store(queries + (t * HEADS + head) * DIM + d, x, live)
    else:
        own = indexed + HEADS * DIM + d
        sequence = t * 0 if CHUNK else t
        begin = tl.load(positions) if CHUNK else pos
        last = tl.load(positions + count - 1) if CHUNK and not VERIFY else pos
        old = tails + tl.load(source + sequence) * ((RATIO - 1) * DIM) + d
        new = tails + tl.load(target + (t if VERIFY else sequence)) * ((RATIO - 1) * DIM) + d
        if pos % RATIO == RATIO - 1:
            total = tl.zeros([DP], tl.float32)
            for i in tl.static_range(RATIO):
                back = RATIO - 1 - i
                here = pos - back >= begin
                x = tl.load(own + (t - back) * W, mask=live & here, other=0.0).to(tl.float32)
                if i < RATIO - 1:
                    x += tl.load(old + i * DIM, mask=live & (here == 0), other=0.0)
                total += x
            total /= RATIO
            mean = queries + count * (HEADS * DIM) + t * DIM
            tl.store(mean + d, total, live)
            tl.debug_barrier()  # the partners of the rotation are read from there
            first = pos - (RATIO - 1)
            turn = tl.load(first_turns + t) if FIRSTS else tl.load(turns + t) - (RATIO - 1)
            x = norm_rotate(mean, k_norm, k_eps, cos, sin, turn, DIM, DP, HALF)
            block = tl.load(tables + sequence * ahead + first // 32).to(tl.int64)
            tl.store(pooled + (block * (32 // RATIO) + first % 32 // RATIO) * DIM + d, x, live)
        # One program reads the old tail and then writes the new one, so both may lie in one slot.
        if VERIFY or pos == tl.minimum(begin // RATIO * RATIO + RATIO - 1, last):
            base = (last + 1) // RATIO * RATIO
            for i in tl.static_range(RATIO - 1):
                token = base + i
                there = live & (token <= last)
                x = tl.load(own + (t + token - pos) * W, mask=there & (token >= begin), other=0.0).to(tl.float32)
                x += tl.load(old + i * DIM, mask=there & (token < begin), other=0.0)
                tl.store(new + i * DIM, x, there)


@triton.jit(do_not_specialize=["ahead"], do_not_specialize_on_alignment=["positions"])
def score_key_blocks(
    queries, pooled, positions, tables, ahead, scores, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """scores fp32 [T, width] of the full key blocks that a row sees: the sum over heads of the positive products. Grid
    (T, blocks of them).
    """
    t = tl.program_id(0).to(tl.int64)
    early(PDL)
    full = (tl.load(positions + t) + 1) // RATIO
    first = tl.program_id(1) * BLOCK
    if first < full:
        PER: tl.constexpr = 32 // RATIO
        i = first + tl.arange(0, BLOCK)
        d = tl.arange(0, DP)
        block = tl.load(tables + t * ahead + i // PER, mask=i < full, other=0).to(tl.int64)
        p = pooled + ((block * PER + i % PER) * DIM)[:, None] + d[None, :]
        k = tl.load(p, mask=(i < full)[:, None] & (d < DIM)[None, :], other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for head in tl.static_range(HEADS):
            q = tl.load(queries + (t * HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
            total += tl.maximum(tl.sum(k * q[None, :], 1), 0.0)
        tl.store(scores + t * width + i, total, i < full)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def choose_key_blocks(
    scores,
    positions,
    chosen,
    lengths,
    width,
    MOST: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """chosen [T, MOST]: the best key blocks of each row in order, the first of equal ones; lengths [T]: tokens attended
    to. Grid (T,).

    The lowest selected score is found bit by bit: scores are not negative, so their bits have the same order.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    early(PDL)
    pos = tl.load(positions + t)
    full = (pos + 1) // RATIO
    tl.store(lengths + t, tl.minimum(full, MOST) * RATIO + (pos + 1) % RATIO)
    row = scores + t * width
    if full <= MOST:
        for at in range(0, full, BLOCK):
            tl.store(chosen + t * MOST + at + i, at + i, at + i < full)
    else:
        least = full * 0
        for turn in range(31):
            wanted = least | (1 << (30 - turn))
            reached = full * 0
            for at in range(0, full, BLOCK):
                bits = tl.load(row + at + i, mask=at + i < full, other=0.0).to(tl.int32, bitcast=True)
                reached += tl.sum((bits >= wanted).to(tl.int32))
            least = tl.where(reached >= MOST, wanted, least)
        above = full * 0
        for at in range(0, full, BLOCK):
            bits = tl.load(row + at + i, mask=at + i < full, other=0.0).to(tl.int32, bitcast=True)
            above += tl.sum((bits > least).to(tl.int32))
        equal = full * 0
        done = full * 0
        for at in range(0, full, BLOCK):
            bits = tl.load(row + at + i, mask=at + i < full, other=0.0).to(tl.int32, bitcast=True)
            same = ((bits == least) & (at + i < full)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0)
            taken = ((bits > least) | ((same > 0) & (rank <= MOST - above))).to(tl.int32)
            tl.store(chosen + t * MOST + done + tl.cumsum(taken, 0) - 1, at + i, taken > 0)
            equal += tl.sum(same)
            done += tl.sum(taken)
