"""What changes the scores of a row before the choice: bias, penalties and masks; and the log-probabilities after it.

The state of a sequence is its row of `written` (int32 [slots, vocab]: how often a token was written; the sign bit: the
prompt has it, for the repetition penalty) and of `bias` (fp32 [slots, vocab]).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_plan import (
    ADJUSTING,
    BIASED,
    CHAINED,
    DRAFTED,
    FLAGS,
    FREQUENCY,
    LIMIT,
    MASKED,
    MASS_UNIT,
    MODE,
    NEW,
    NEWEST,
    PENALIZED,
    PRESENCE,
    REPETITION,
    SLOT,
    SOURCE,
    TEMPERATURE,
    TOKEN,
    TOP,
    VALUES,
    bits_of,
    floats_of,
    planned,
    planned_float,
    ranks_of,
)
from .triton_primitives import early

# Log-probabilities of one row of `measures` (int32 [rows, MEASURED]): fp32 of the chosen token, ids, fp32 of the ids.
TOPS: tl.constexpr = tl.constexpr(20)
MEASURED: tl.constexpr = tl.constexpr(41)
# Ranks of adjusted scores: down to 64 below the best, in steps of 1/1024. What is further below has a chance of e**-64.
STEPS: tl.constexpr = tl.constexpr(-1024.0)
DEEPEST: tl.constexpr = tl.constexpr(64.0)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def finite(x):
    """x clipped to the range of fp32; NaN stays."""
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))


@triton.jit
def depth_below(x, best, t):
    """How far the logarithm of a token's probability lies below the best one's."""
    return (best - x) / t


@triton.jit
def rank_below(x, best, t):
    """The rank of adjusted scores, the best one's is VALUES - 1; -2 for those that are too deep to be drawn."""
    depth = depth_below(x, best, t)
    drawn = depth < DEEPEST
    return tl.where(drawn, (VALUES - 1) + (tl.where(drawn, depth, 0.0) * STEPS).to(tl.int32), -2)


@triton.jit
def adjusted(x, i, live, flags, plan, written, bias, masks, words, vocab, b, batch):
    """Scores x of tokens i after bias, penalties and mask, in the order and the arithmetic of engine/sampler."""
    slot = planned(plan, SLOT, b, batch).to(tl.int64) * vocab
    if (flags & BIASED) != 0:
        added = tl.load(bias + slot + i, mask=live, other=0.0)
        x = tl.where(added != 0.0, finite(x + added), x)
    if (flags & PENALIZED) != 0:
        state = tl.load(written + slot + i, mask=live, other=0)
        n = state & LAST_ID
        for row in range(planned(plan, DRAFTED, b, batch), b + 1):
            n += (i == planned(plan, TOKEN, row, batch)).to(tl.int32)
        factor = planned_float(plan, REPETITION, b, batch)
        if factor != 1.0:
            penalized = finite(tl.where(x > 0, tl.math.div_rn(x, factor), x * factor))
            x = tl.where((n > 0) | (state < 0), penalized, x)
        presence = planned_float(plan, PRESENCE, b, batch)
        frequency = planned_float(plan, FREQUENCY, b, batch)
        if (tl.abs(presence) + tl.abs(frequency)) > 0.0:
            x = tl.where(n > 0, finite(x - (presence + frequency * n.to(tl.float32))), x)
    if (flags & MASKED) != 0:
        word = tl.load(masks + b * words + (i >> 5), mask=live, other=0)
        x = tl.where(((word >> (i & 31)) & 1) == 1, x, float("-inf"))
    return tl.where(live, x, float("-inf"))


@triton.jit(do_not_specialize=["batch"])
def tally(plan, chosen, written, vocab, batch, PDL: tl.constexpr):
    """Count the tokens that sequences have written since their last step: those of the plan, and the one that the step
    before chose. Tokens that the model's vocabulary lacks are not counted."""
    b = tl.program_id(0)
    flags = planned(plan, FLAGS, b, batch)
    slot = planned(plan, SLOT, b, batch).to(tl.int64) * vocab
    early(PDL)
    if (flags & PENALIZED) != 0:
        for at in range(NEWEST):
            token = tl.load(plan + (NEW + at) * batch + b)
            tl.atomic_add(written + slot + token, 1, mask=(token >= 0) & (token < vocab))
        if (flags & CHAINED) != 0:
            before = tl.load(chosen + planned(plan, SOURCE, b, batch))
            tl.atomic_add(written + slot + before, 1, mask=(before >= 0) & (before < vocab))


@triton.jit(do_not_specialize=["batch"])
def bin_scores(
    work, plan, peaks, counts, weights, vocab, batch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of adjusted rows that draw from a part: counts [batch, VALUES], the tokens per rank, and weights (int64), the sum
    of their shares exp((score - best) / temperature) in parts of MASS_UNIT. Both are 0 before."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    drawing = (planned(plan, MODE, b, batch) == 2) & ((planned(plan, FLAGS, b, batch) & ADJUSTING) != 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    live = i < planned(plan, LIMIT, b, batch)
    t = planned_float(plan, TEMPERATURE, b, batch)
    early(PDL)
    if drawing:
        o = tl.arange(0, PADDED)
        best = tl.max(tl.load(peaks + b * BLOCKS + o, mask=o < BLOCKS, other=float("-inf")))
        x = tl.load(work + b.to(tl.int64) * vocab + i, mask=live, other=float("-inf"))
        rank = rank_below(x, best, t)
        inside = live & (rank >= 0)
        share = tl.exp(-tl.where(inside, depth_below(x, best, t), 0.0)).to(tl.float64)
        tl.atomic_add(counts + b * VALUES + rank, 1, mask=inside)
        tl.atomic_add(weights + b * VALUES + rank, (share * MASS_UNIT).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["batch"])
def measure(
    scores, plan, chosen, peaks, masses, keys, seen, measures, vocab, batch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """measures [batch, MEASURED]: log-probabilities in the raw model of the chosen token and of the likeliest ones,
    those of equal score by id. scores: the bits [batch, vocab] int16. Uses keys [batch, BLOCKS, TOPS] int64."""
    b = tl.program_id(0)
    block = tl.program_id(1)
    top = planned(plan, TOP, b, batch)
    i = block * BLOCK + tl.arange(0, BLOCK)
    live = i < vocab
    early(PDL)
    if top >= 0:
        row = scores + b.to(tl.int64) * vocab
        bits = tl.load(row + i, mask=live, other=0).to(tl.int32)
        x = tl.where(live, floats_of(bits, HALF), float("-inf"))
        peak = tl.max(x)
        tl.store(peaks + b * BLOCKS + block, peak)
        tl.store(masses + b * BLOCKS + block, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))))
        key = tl.where(live, (ranks_of(bits).to(tl.int64) << 32) | (i.to(tl.int64) ^ LAST_ID), -1)
        for at in range(top):
            first = tl.max(key)
            tl.store(keys + (b * BLOCKS + block) * TOPS + at, first)
            key = tl.where(key == first, -1, key)
        tl.debug_barrier()
        if tl.atomic_add(seen + b, 1, sem="acq_rel") == BLOCKS - 1:
            tl.store(seen + b, 0)
            o = tl.arange(0, PADDED)
            tops = tl.load(peaks + b * BLOCKS + o, mask=o < BLOCKS, other=float("-inf"))
            best = tl.max(tops)
            parts = tl.load(masses + b * BLOCKS + o, mask=o < BLOCKS, other=0.0) * tl.exp(tops - best)
            whole = best + tl.log(tl.sum(parts))
            token = tl.load(chosen + b)
            there = (token >= 0) & (token < vocab)
            score = floats_of(tl.load(row + token, mask=there, other=0).to(tl.int32), HALF)
            out = measures + b * MEASURED
            tl.store(out, (score - whole).to(tl.int32, bitcast=True))
            n = tl.arange(0, 32)
            spot = o[:, None] * TOPS + n[None, :]
            found = (o[:, None] < BLOCKS) & (n[None, :] < top)
            left = tl.load(keys + b * BLOCKS * TOPS + spot, mask=found, other=-1)
            for at in range(top):
                first = tl.max(tl.max(left, 1), 0)
                left = tl.where(left == first, -1, left)
                value = floats_of(bits_of((first >> 32).to(tl.int32)), HALF)
                tl.store(out + 1 + at, ((first & LAST_ID) ^ LAST_ID).to(tl.int32))
                tl.store(out + 1 + TOPS + at, (value - whole).to(tl.int32, bitcast=True))
