"""Samples the next tokens on the device from 16-bit scores, without the host; engine/sampler defines the meaning.

A 16-bit score has 65,536 possible values, so the number of tokens per value gives order and probabilities. top_k,
top_p, min_p and the draw are computed from these counts without sorting. Tokens of equal score are ordered by id. Sums
are fp64, always in the same order.

An adjusted row (bias, penalties, mask) has fp32 scores, which triton_adjust writes to `work`. Its ranks are steps of
1/1024 in the logarithm of the probability, and tokens of one rank are ordered by id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_adjust import adjusted, rank_below
from .triton_plan import (
    ADJUSTING,
    FLAGS,
    LIMIT,
    MASS_UNIT,
    MIN_P,
    MODE,
    POSITION,
    SOURCE,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    UNIFORM,
    VALUES,
    bits_of,
    floats_of,
    planned,
    planned_float,
    ranks_of,
)
from .triton_primitives import early


@triton.jit(do_not_specialize=["batch"])
def feed(plan, chosen, ids, positions, batch, PADDED: tl.constexpr):
    """ids and positions of the rows of a step."""
    b = tl.arange(0, PADDED)
    live = b < batch
    token = tl.load(plan + TOKEN * batch + b, live, 0)
    source = tl.load(plan + SOURCE * batch + b, live, 0)
    before = tl.load(chosen + tl.maximum(source, 0), live, 0)
    tl.store(ids + b, tl.where(token < 0, tl.maximum(before, 0), token).to(tl.int64), live)
    tl.store(positions + b, tl.load(plan + POSITION * batch + b, live, 0), live)


@triton.jit(do_not_specialize=["batch"])
def likeliest(
    scores, plan, peaks, indices, broken, seen, chosen, vocab, batch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chosen [batch]: the token of the best score (bits [batch, vocab] int16), the first of equal ones; -1 if a score
    is NaN or the best is infinite. Resets `seen` to 0.
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    live = i < planned(plan, LIMIT, b, batch)
    early(PDL)
    x = floats_of(tl.load(scores + b.to(tl.int64) * vocab + i, mask=live, other=0).to(tl.int32), HALF)
    nan = tl.sum((live & (x != x)).to(tl.int32))
    x = tl.where(live & (x == x), x, float("-inf"))
    peak = tl.max(x)
    tl.store(peaks + b * BLOCKS + block, peak)
    tl.store(indices + b * BLOCKS + block, tl.min(tl.where(x == peak, i, vocab)))
    tl.store(broken + b * BLOCKS + block, nan)
    tl.debug_barrier()
    last = tl.atomic_add(seen + b, 1, sem="acq_rel") == BLOCKS - 1
    if last:
        o = tl.arange(0, PADDED)
        tops = tl.load(peaks + b * BLOCKS + o, mask=o < BLOCKS, other=float("-inf"))
        firsts = tl.load(indices + b * BLOCKS + o, mask=o < BLOCKS, other=0)
        bad = tl.sum(tl.load(broken + b * BLOCKS + o, mask=o < BLOCKS, other=0))
        best = tl.max(tops)
        token = tl.min(tl.where((tops == best) & (o < BLOCKS), firsts, vocab))
        tl.store(chosen + b, tl.where((bad > 0) | (tl.abs(best) == float("inf")), -1, token))
        tl.store(seen + b, 0)


@triton.jit(do_not_specialize=["batch"])
def survey(
    scores, plan, peaks, masses, broken, counts, work, written, bias, masks, words, vocab, batch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr, ADJUST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per block of scores: the largest, the sum of exp((score - largest) / temperature), and the count of NaN.

    scores: the bits [batch, vocab] int16. If a row draws from a part, counts [batch, VALUES] gets the tokens per rank
    (0 before). With ADJUST, the scores of adjusted rows go to work [batch, vocab] fp32 and `bin_scores` counts them.
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    live = i < planned(plan, LIMIT, b, batch)
    flags = planned(plan, FLAGS, b, batch) & ADJUSTING
    early(PDL)
    bits = tl.load(scores + b.to(tl.int64) * vocab + i, mask=live, other=0).to(tl.int32)
    x = tl.where(live, floats_of(bits, HALF), float("-inf"))
    if ADJUST:
        if flags != 0:
            x = adjusted(x, i, live, flags, plan, written, bias, masks, words, vocab, b, batch)
            tl.store(work + b.to(tl.int64) * vocab + i, x, live)
    nan = tl.sum((x != x).to(tl.int32))
    x = tl.where(x != x, float("-inf"), x)
    peak = tl.max(x)
    tl.store(peaks + b * BLOCKS + block, peak)
    tl.store(broken + b * BLOCKS + block, nan)
    t = planned_float(plan, TEMPERATURE, b, batch)
    tl.store(masses + b * BLOCKS + block, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp((x - peak) / t))))
    if (planned(plan, MODE, b, batch) == 2) & ((ADJUST == 0) | (flags == 0)):
        tl.atomic_add(counts + b * VALUES + ranks_of(bits), 1, mask=live)


@triton.jit
def shares(
    counts, weights, b, top, done, best, t, exact, HALF: tl.constexpr, ADJUST: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The number of tokens of the PADDED ranks below `top`, from the highest, and the share exp((score - best) / t) of
    each, fp64. `exact`: every token of a rank has the same score; else the share is the mean of those in the rank.
    """
    rank = top - done - tl.arange(0, PADDED)
    there = rank >= 0
    n = tl.load(counts + b * VALUES + rank, mask=there, other=0)
    x = floats_of(bits_of(tl.maximum(rank, 0)), HALF)
    share = tl.where(n > 0, tl.exp((x - best) / t), 0.0).to(tl.float64)
    if ADJUST:
        if exact == 0:
            mass = tl.load(weights + b * VALUES + rank, mask=there, other=0).to(tl.float64) / MASS_UNIT
            share = mass / tl.maximum(n, 1).to(tl.float64)
    return n, share


@triton.jit
def kept_of(n, share, seen, before, k, edge, least):
    """How many tokens of each rank top_k, top_p and min_p keep, with `seen` tokens of sum `before` above them. The
    first token is always kept."""
    left = tl.minimum(tl.maximum(k - seen - (tl.cumsum(n, 0) - n), 0), n)
    mass = left.to(tl.float64) * share
    above = before + tl.cumsum(mass, 0) - mass
    fit = tl.ceil((edge - above) / tl.maximum(share, 1e-300))
    kept = tl.minimum(tl.maximum(fit, 0.0), left.to(tl.float64)).to(tl.int32)
    kept = tl.where(share >= least, kept, 0)
    return tl.where((seen == 0) & (tl.cumsum(n, 0) == n) & (n > 0), tl.maximum(kept, 1), kept), left


@triton.jit
def draw_from_part(
    counts, weights, b, top, best, t, exact, k, whole, p, least, u,
    HALF: tl.constexpr, ADJUST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """(rank, index among the tokens of that rank) of a draw u in [0, 1) from the likeliest tokens.

    top: the highest rank that has a token, of score `best`. whole: the sum of all shares; negative: sum those of the
    first k.
    """
    total = whole
    if whole < 0:
        total = total * 0
        done = 0
        seen = 0
        while (seen < k) & (done <= top):
            n, share = shares(counts, weights, b, top, done, best, t, exact, HALF, ADJUST, PADDED)
            left = tl.minimum(tl.maximum(k - seen - (tl.cumsum(n, 0) - n), 0), n)
            total += tl.sum(left.to(tl.float64) * share)
            seen += tl.sum(n)
            done += PADDED
    edge = tl.where(p < 1.0, total * p, float("inf")).to(tl.float64)
    mass = total * 0
    above = total * 0
    done = 0
    seen = 0
    while (seen < k) & (done <= top) & (above < edge):
        n, share = shares(counts, weights, b, top, done, best, t, exact, HALF, ADJUST, PADDED)
        kept, left = kept_of(n, share, seen, above, k, edge, least)
        mass += tl.sum(kept.to(tl.float64) * share)
        above += tl.sum(left.to(tl.float64) * share)
        seen += tl.sum(n)
        done += PADDED
    aim = mass * u
    rank = top
    index = 0
    found = 0
    mass = total * 0
    above = total * 0
    done = 0
    seen = 0
    while (found == 0) & (seen < k) & (done <= top) & (above < edge):
        n, share = shares(counts, weights, b, top, done, best, t, exact, HALF, ADJUST, PADDED)
        kept, left = kept_of(n, share, seen, above, k, edge, least)
        part = kept.to(tl.float64) * share
        until = mass + tl.cumsum(part, 0)
        # If rounding puts the aim after the end, the last kept token is the answer.
        j = tl.arange(0, PADDED)
        hit = tl.min(tl.where((until > aim) & (kept > 0), j, PADDED))
        at = tl.where(hit < PADDED, hit, tl.max(tl.where(kept > 0, j, -1)))
        mine = j == at
        inside = (aim - tl.sum(tl.where(mine, until - part, 0.0))) / tl.maximum(
            tl.sum(tl.where(mine, share, 0.0)), 1e-300
        )
        n_kept = tl.sum(tl.where(mine, kept, 0))
        if at >= 0:
            rank = top - done - at
            index = tl.minimum(tl.maximum(tl.floor(inside).to(tl.int32), 0), n_kept - 1)
        found = (hit < PADDED).to(tl.int32)
        mass += tl.sum(part)
        above += tl.sum(left.to(tl.float64) * share)
        seen += tl.sum(n)
        done += PADDED
    return rank, index


@triton.jit(do_not_specialize=["batch"])
def decide(
    plan, peaks, masses, broken, counts, weights, goals, rests, batch,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ADJUST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `find` looks for in each row: goals [2, batch] = a rank and the index among its tokens (modes 0 and 2), or a
    block and the rest of the draw within it (mode 1, the rest in rests [batch]). The rank is -1 if a score is NaN or
    the best is infinite.
    """
    b = tl.program_id(0)
    early(PDL)
    i = tl.arange(0, PADDED)
    peak = tl.load(peaks + b * BLOCKS + i, mask=i < BLOCKS, other=float("-inf"))
    best = tl.max(peak)
    bad = (tl.sum(tl.load(broken + b * BLOCKS + i, mask=i < BLOCKS, other=0)) > 0) | (tl.abs(best) == float("inf"))
    if HALF == "bf16":
        top = ranks_of((best.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
    else:
        top = ranks_of(best.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32))
    exact = 1
    if ADJUST:
        exact = ((planned(plan, FLAGS, b, batch) & ADJUSTING) == 0).to(tl.int32)
        top = tl.where(exact == 1, top, VALUES - 1)
    rank = top
    index = 0
    mode = planned(plan, MODE, b, batch)
    if (mode > 0) & (bad == 0):
        t = planned_float(plan, TEMPERATURE, b, batch)
        u = planned_float(plan, UNIFORM, b, batch).to(tl.float64) + planned_float(plan, UNIFORM + 1, b, batch).to(
            tl.float64
        )
        mass = tl.load(masses + b * BLOCKS + i, mask=i < BLOCKS, other=0.0).to(tl.float64)
        mass = tl.where(i < BLOCKS, mass * tl.exp((peak - best) / t).to(tl.float64), 0.0)
        whole = tl.sum(mass)
        if mode == 1:
            until = tl.cumsum(mass, 0)
            hit = tl.min(tl.where((until > u * whole) & (mass > 0), i, PADDED))
            rank = tl.where(hit < PADDED, hit, tl.max(tl.where(mass > 0, i, 0)))
            mine = i == rank
            rest = u * whole - tl.sum(tl.where(mine, until - mass, 0.0))
            tl.store(rests + b, rest / tl.sum(tl.where(mine, tl.exp((peak - best) / t), 0.0)).to(tl.float64))
        else:
            k = planned(plan, TOP_K, b, batch)
            if k < planned(plan, LIMIT, b, batch):
                whole = whole * 0 - 1
            p = planned_float(plan, TOP_P, b, batch).to(tl.float64)
            least = planned_float(plan, MIN_P, b, batch).to(tl.float64)
            rank, index = draw_from_part(
                counts, weights, b, top, best, t, exact, k, whole, p, least, u, HALF, ADJUST, 1024
            )
    tl.store(goals + b, tl.where(bad, -1, rank))
    tl.store(goals + batch + b, index)


@triton.jit
def scores_of(row, own, i, live, exact, HALF: tl.constexpr, ADJUST: tl.constexpr):
    """(bits, scores fp32) of tokens i of a row: `own` where it is adjusted, else the 16-bit numbers."""
    bits = tl.load(row + i, mask=live, other=0).to(tl.int32)
    x = floats_of(bits, HALF)
    if ADJUST:
        if exact == 0:
            x = tl.load(own + i, mask=live, other=float("-inf"))
    return bits, x


@triton.jit
def at_goal(bits, x, rank, best, t, mode, exact, ADJUST: tl.constexpr):
    """Which tokens have the rank that is looked for; without a draw, in an adjusted row, the best score."""
    found = ranks_of(bits) == rank
    if ADJUST:
        if exact == 0:
            found = tl.where(mode == 0, x == best, rank_below(x, best, t) == rank)
    return found


@triton.jit(do_not_specialize=["batch"])
def find(
    scores, plan, peaks, counts, weights, goals, rests, matches, seen, chosen, work, vocab, batch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ADJUST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """chosen [batch]: the token that the goal of each row names, -1 if there is none. Resets `counts`, `weights` and
    `seen` to 0.

    Each program counts the tokens of the rank in its block. The last one of a row finds the block with the goal.
    """
    b = tl.program_id(0)
    block = tl.program_id(1)
    limit = planned(plan, LIMIT, b, batch)
    mode = planned(plan, MODE, b, batch)
    exact = ((planned(plan, FLAGS, b, batch) & ADJUSTING) == 0).to(tl.int32)
    t = planned_float(plan, TEMPERATURE, b, batch)
    early(PDL)
    rank = tl.load(goals + b)
    j = tl.arange(0, BLOCK)
    o = tl.arange(0, PADDED)
    row = scores + b.to(tl.int64) * vocab
    own = work + b.to(tl.int64) * vocab
    best = tl.max(tl.load(peaks + b * BLOCKS + o, mask=o < BLOCKS, other=float("-inf")))
    i = block * BLOCK + j
    if mode != 1:
        bits, x = scores_of(row, own, i, i < limit, exact, HALF, ADJUST)
        match = at_goal(bits, x, rank, best, t, mode, exact, ADJUST) & (i < limit)
        tl.store(matches + b * BLOCKS + block, tl.sum(match.to(tl.int32)))
    if mode == 2:
        for at in range(block * BLOCK, VALUES, BLOCKS * BLOCK):
            tl.store(counts + b * VALUES + at + j, tl.zeros([BLOCK], tl.int32), at + j < VALUES)
            if ADJUST:
                tl.store(weights + b * VALUES + at + j, tl.zeros([BLOCK], tl.int64), at + j < VALUES)
    tl.debug_barrier()
    last = tl.atomic_add(seen + b, 1, sem="acq_rel") == BLOCKS - 1
    if last:
        tl.store(seen + b, 0)
        if mode == 1:
            i = rank * BLOCK + j
            bits, x = scores_of(row, own, i, i < limit, exact, HALF, ADJUST)
            e = tl.where(
                i < limit, tl.exp((x - tl.load(peaks + b * BLOCKS + rank, mask=rank >= 0, other=0.0)) / t), 0.0
            ).to(tl.float64)
            hit = tl.min(tl.where((tl.cumsum(e, 0) > tl.load(rests + b)) & (e > 0), j, BLOCK))
            token = rank * BLOCK + tl.where(hit < BLOCK, hit, tl.max(tl.where(e > 0, j, 0)))
        else:
            index = tl.load(goals + batch + b)
            n = tl.load(matches + b * BLOCKS + o, mask=o < BLOCKS, other=0)
            until = tl.cumsum(n, 0)
            mine = tl.min(tl.where(until > index, o, BLOCKS - 1))
            index -= tl.sum(tl.where(o == mine, until - n, 0))
            i = mine * BLOCK + j
            bits, x = scores_of(row, own, i, i < limit, exact, HALF, ADJUST)
            match = (at_goal(bits, x, rank, best, t, mode, exact, ADJUST) & (i < limit)).to(tl.int32)
            token = mine * BLOCK + tl.min(tl.where((tl.cumsum(match, 0) == index + 1) & (match > 0), j, BLOCK - 1))
        tl.store(chosen + b, tl.where(rank < 0, -1, token))
