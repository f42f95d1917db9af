"""Rows of an n-gram table added to residual streams on CUDA (see NgramWeights): a gate per stream, and a convolution
over time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import early

# Below it the root of a score has no slope.
SMALLEST = tl.constexpr(1e-6)


@triton.jit
def gate_streams(
    keys, values, streams, key_norm, query_norm, gates, key_eps, query_eps, conv_eps,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gates fp32 [T, STREAMS, 2]: the share of the values [T, HIDDEN] for each stream, from the agreement of its key
    [T, STREAMS, HIDDEN] with the stream, both normed; and the factor that norms the result. Grid (T, STREAMS).
    """
    t = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    live = c < HIDDEN
    of_key = tl.load(key_norm + stream * HIDDEN + c, mask=live, other=0.0)
    of_query = tl.load(query_norm + stream * HIDDEN + c, mask=live, other=0.0)
    early(PDL)
    at = (t * STREAMS + stream) * HIDDEN + c
    k = tl.load(keys + at, mask=live, other=0.0).to(tl.float32)
    q = tl.load(streams + at, mask=live, other=0.0).to(tl.float32)
    v = tl.load(values + t * HIDDEN + c, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(k * k) / HIDDEN + key_eps) * tl.rsqrt(tl.sum(q * q) / HIDDEN + query_eps) / HIDDEN**0.5
    score = tl.sum(k * of_key * (q * of_query)) * scale
    root = tl.sqrt(tl.maximum(tl.abs(score), SMALLEST))
    root = tl.where(score > 0, root, tl.where(score < 0, -root, score))  # 0 stays 0, and NaN stays NaN
    gate = tl.sigmoid(root)
    p = gates + (t * STREAMS + stream) * 2
    tl.store(p, gate)
    tl.store(p + 1, tl.rsqrt(gate * gate * (tl.sum(v * v) / HIDDEN) + conv_eps))


@triton.jit
def gated_row(values, gates, row, live, c, STREAMS: tl.constexpr, HIDDEN: tl.constexpr):
    """What is added to channels c of all streams of a row, and the factor that norms it; 0 if not `live`."""
    p = gates + (row * STREAMS + c // HIDDEN) * 2
    v = tl.load(values + row * HIDDEN + c % HIDDEN, mask=live, other=0.0).to(tl.float32)
    return v * tl.load(p, mask=live, other=0.0), tl.load(p + 1, mask=live, other=0.0)


@triton.jit
def add_ngram_rows(
    values, gates, norm, taps, windows, source, target, streams,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
    VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """streams [T, STREAMS HIDDEN] += the gated values and silu of their convolution over normed rows, K taps APART
    tokens apart.

    The convolution follows windows [slots, (K - 1) APART, STREAMS HIDDEN], one per row, which shift. VERIFY: the rows
    belong to one sequence; each follows the window of slot source[0] and the rows before it. Grid (T, blocks of
    channels).
    """
    WIDE: tl.constexpr = STREAMS * HIDDEN
    KEPT: tl.constexpr = (K - 1) * APART
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < WIDE
    gone = t if VERIFY else t * 0
    # No other kernel of a pass writes windows.
    old = windows + tl.load(source + (t - gone)) * (KEPT * WIDE) + c
    new = windows + tl.load(target + t) * (KEPT * WIDE) + c
    weight = tl.load(norm + c, mask=live, other=0.0)
    held = ()
    for i in tl.static_range(KEPT):
        held = held + (tl.load(old + (i + gone) * WIDE, mask=live & (i + gone < KEPT), other=0.0),)
    early(PDL)
    added, scale = gated_row(values, gates, t, live, c, STREAMS, HIDDEN)
    latest = added * scale * weight
    if VERIFY:
        seen = ()
        for i in tl.static_range(KEPT):
            row = t + i - KEPT
            before, root = gated_row(values, gates, row, live & (row >= 0), c, STREAMS, HIDDEN)
            seen = seen + (held[i] + before * root * weight,)
        held = seen
    total = latest * tl.load(taps + (K - 1) * WIDE + c, mask=live, other=0.0)
    for i in tl.static_range(K - 1):
        total += held[i * APART] * tl.load(taps + i * WIDE + c, mask=live, other=0.0)
    for i in tl.static_range(1, KEPT):
        tl.store(new + (i - 1) * WIDE, held[i], live)
    if KEPT:
        tl.store(new + (KEPT - 1) * WIDE, latest, live)
    p = streams + t * WIDE + c
    x = tl.load(p, mask=live, other=0.0).to(tl.float32) + added + total * tl.sigmoid(total)
    tl.store(p, x.to(streams.dtype.element_ty), live)
