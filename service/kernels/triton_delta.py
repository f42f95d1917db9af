"""The gated delta rule (see delta.py) on CUDA: one step of several sequences, and chunks of one sequence in tensor cores.

A projected row has queries, keys, values and gates of all heads one behind the other, or (FUSED) those of each key head together.
Numbers of states and windows are fp32. H key heads of D, R value heads of E to each; C = 2 H D + H R E channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import early


@triton.jit
def place_of(c, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FUSED: tl.constexpr):
    """Where channel c lies in a projected row."""
    if FUSED:
        EACH: tl.constexpr = 2 * D + 2 * R * E
        KEYS: tl.constexpr = H * D
        of_values = c - 2 * KEYS
        query = (c // D) * EACH + c % D
        key = ((c - KEYS) // D) * EACH + D + (c - KEYS) % D
        value = (of_values // (R * E)) * EACH + 2 * D + of_values % (R * E)
        place = tl.where(c < KEYS, query, tl.where(c < 2 * KEYS, key, value))
    else:
        place = c
    return place


@triton.jit
def gate_place(j, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FUSED: tl.constexpr):
    """Where the gates of value head j begin in a projected row."""
    if FUSED:
        place = (j // R) * (2 * D + 2 * R * E) + 2 * D + R * E + (j % R) * E
    else:
        place = 2 * H * D + H * R * E + j * E
    return place


@triton.jit
def head_rates(rates, decay, bias, row, j, live, H: tl.constexpr, R: tl.constexpr, FUSED: tl.constexpr):
    """log of what is left of the state, and how much of a correction is taken, of value head j in rows `row`."""
    HEADS: tl.constexpr = H * R
    if FUSED:
        beta_at = (j // R) * (2 * R) + j % R
        speed_at = beta_at + R
    else:
        beta_at = j
        speed_at = HEADS + j
    p = rates + row.to(tl.int64) * (2 * HEADS)
    beta = tl.sigmoid(tl.load(p + beta_at, mask=live, other=0.0).to(tl.float32))
    speed = tl.load(p + speed_at, mask=live, other=0.0).to(tl.float32) + tl.load(bias + j)
    # softplus, without a large number's exp
    soft = tl.maximum(speed, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(speed)))
    return tl.where(live, tl.load(decay + j) * soft, 0.0), tl.where(live, beta, 0.0)


@triton.jit
def convolve_rows(
    projected, windows, taps, source, target, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, FUSED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode: out fp32 [B, C] = silu of the convolution behind windows [slots, K - 1, C], which go on. Grid (B, blocks of C)."""
    CHANNELS: tl.constexpr = 2 * H * D + H * R * E
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    last = tl.load(taps + (K - 1) * CHANNELS + c, mask=live, other=0.0)
    early(PDL)
    x = tl.load(projected + b * WIDTH + place_of(c, H, R, D, E, FUSED), mask=live, other=0.0).to(tl.float32)
    old = windows + tl.load(source + b) * ((K - 1) * CHANNELS) + c
    new = windows + tl.load(target + b) * ((K - 1) * CHANNELS) + c
    y = x * last
    for i in tl.static_range(K - 1):
        w = tl.load(old + i * CHANNELS, mask=live, other=0.0)
        y += w * tl.load(taps + i * CHANNELS + c, mask=live, other=0.0)
        if i > 0:
            tl.store(new + (i - 1) * CHANNELS, w, live)
    tl.store(new + (K - 2) * CHANNELS, x, live)
    tl.store(out + b * CHANNELS + c, y * tl.sigmoid(y), live)


@triton.jit
def step_states(
    seen, projected, rates, decay, bias, norm, eps, states, source, target, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    FUSED: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode: states [slots, H, R, D, E] take a token in and answer; out [B, H R E] normed a head and gated. Grid (B, H * R).

    seen fp32 [B, C]: of `convolve_rows`. DP, EP: powers of two, at least D and E.
    """
    b = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    C: tl.constexpr = 2 * H * D + H * R * E
    weight = tl.load(norm + e, mask=e < E, other=0.0)
    early(PDL)
    inside = (d < D)[:, None] & (e < E)[None, :]
    at = j * (D * E) + d[:, None] * E + e[None, :]
    s = tl.load(states + tl.load(source + b) * (H * R * D * E) + at, mask=inside, other=0.0)
    g, beta = head_rates(rates, decay, bias, b, j, j >= 0, H, R, FUSED)
    row = seen + b * C
    q = tl.load(row + (j // R) * D + d, mask=d < D, other=0.0)
    k = tl.load(row + H * D + (j // R) * D + d, mask=d < D, other=0.0)
    v = tl.load(row + 2 * H * D + j * E + e, mask=e < E, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (1.0 / D**0.5)
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    s *= tl.exp(g)
    correction = beta * (v - tl.sum(s * k[:, None], 0))
    s += k[:, None] * correction[None, :]
    tl.store(states + tl.load(target + b) * (H * R * D * E) + at, s, inside)
    y = tl.sum(s * q[:, None], 0)
    y *= tl.rsqrt(tl.sum(y * y) / E + eps) * weight
    z = tl.load(projected + b * WIDTH + gate_place(j, H, R, D, E, FUSED) + e, mask=e < E, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    tl.store(out + b * (H * R * E) + j * E + e, (y * gate).to(out.dtype.element_ty), e < E)


@triton.jit(do_not_specialize=["count"])
def convolve_piece(
    projected, windows, taps, source, target, out, count,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, FUSED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of one sequence: out [count, C] = silu of the convolution behind the window of slot source[0]; that of slot target[0], which
    is another one, becomes what stands behind the chunk. Grid (pieces of ROWS rows, blocks of C)."""
    CHANNELS: tl.constexpr = 2 * H * D + H * R * E
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (t < count) & (c < CHANNELS)
    place = place_of(c, H, R, D, E, FUSED)
    old = windows + tl.load(source) * ((K - 1) * CHANNELS) + c
    y = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(K):
        at = t + i - (K - 1)
        x = tl.load(projected + at.to(tl.int64) * WIDTH + place, mask=live & (at >= 0), other=0.0).to(tl.float32)
        x += tl.load(old + (at + K - 1) * CHANNELS, mask=live & (at < 0), other=0.0)
        y += x * tl.load(taps + i * CHANNELS + c, mask=c < CHANNELS, other=0.0)
    tl.store(out + t.to(tl.int64) * CHANNELS + c, (y * tl.sigmoid(y)).to(out.dtype.element_ty), live)
    if tl.program_id(0) == 0:
        new = windows + tl.load(target) * ((K - 1) * CHANNELS) + c
        for i in tl.static_range(K - 1):
            last = count - (K - 1) + i + c * 0
            z = tl.load(projected + last.to(tl.int64) * WIDTH + place, mask=(c < CHANNELS) & (last >= 0), other=0.0).to(tl.float32)
            z += tl.load(old + (last + K - 1) * CHANNELS, mask=(c < CHANNELS) & (last < 0), other=0.0)
            tl.store(new + i * CHANNELS, z, c < CHANNELS)


@triton.jit
def unit_rows(p, t, live, STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Rows [N, DP] of length 1, fp32."""
    d = tl.arange(0, DP)[None, :]
    x = tl.load(p + t.to(tl.int64)[:, None] * STRIDE + d, mask=live[:, None] & (d < D), other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["count"])
def solve_piece(
    seen, rates, decay, bias, values, keys, totals, count,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """Of N tokens of one value head: the triangular system that ties their corrections, solved for both things it is asked of.

    Corrections are values - keys @ (the state before the N tokens): values [T, H R, E], keys [T, H R, D], both fp32. totals [T, H R]: log
    of what is left of that state at each token. seen [T, C]: of `convolve_piece`. Grid (pieces, H * R).
    """
    piece = tl.program_id(0)
    j = tl.program_id(1)
    C: tl.constexpr = 2 * H * D + H * R * E
    n = tl.arange(0, N)
    t = piece * N + n
    live = t < count
    g, beta = head_rates(rates, decay, bias, t, j, live, H, R, FUSED)
    total = tl.cumsum(g, 0)
    k = unit_rows(seen + H * D + (j // R) * D, t, live, C, D, DP)
    earlier = n[:, None] > n[None, :]
    left = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
    system = tl.where(earlier, tl.dot(k, k.T, input_precision="tf32x3") * left * beta[:, None], 0.0)
    # Row by row: powers of the system, which could be squared up instead, grow beyond all bounds where keys repeat.
    inverse = tl.where(n[:, None] == n[None, :], 1.0, 0.0)
    for i in range(1, N):
        mine = tl.sum(tl.where(n[:, None] == i, system, 0.0), 0)
        row = tl.sum(mine[:, None] * inverse, 0)
        inverse -= tl.where(n[:, None] == i, row[None, :], 0.0)
    e = tl.arange(0, EP)[None, :]
    at = t.to(tl.int64)[:, None] * (H * R) + j
    v = tl.load(seen + t.to(tl.int64)[:, None] * C + 2 * H * D + j * E + e, mask=live[:, None] & (e < E), other=0.0).to(tl.float32)
    found = tl.dot(inverse, v * beta[:, None], input_precision="tf32x3")
    tl.store(values + at * E + e, found, live[:, None] & (e < E))
    d = tl.arange(0, DP)[None, :]
    found = tl.dot(inverse, k * (beta * tl.exp(total))[:, None], input_precision="tf32x3")
    tl.store(keys + at * D + d, found, live[:, None] & (d < D))
    tl.store(totals + t.to(tl.int64) * (H * R) + j, total, live)


@triton.jit(do_not_specialize=["count"])
def scan_pieces(
    seen, values, keys, totals, states, source, target, answers, count,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A chunk of one sequence behind `solve_piece`: answers fp32 [T, H R, E]; the state goes from slot source[0] to slot target[0].

    Grid (H * R, blocks of BE values): each program takes its columns of the state through all pieces of N tokens.
    """
    j = tl.program_id(0)
    C: tl.constexpr = 2 * H * D + H * R * E
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    inside = (d < D)[:, None] & (e < E)[None, :]
    at = j * (D * E) + d[:, None] * E + e[None, :]
    s = tl.load(states + tl.load(source) * (H * R * D * E) + at, mask=inside, other=0.0)
    for first in range(0, count, N):
        t = first + n
        live = t < count
        row = t.to(tl.int64) * (H * R) + j
        total = tl.load(totals + row, mask=live, other=0.0)
        end = tl.minimum(first + N, count) - 1
        last = tl.load(totals + end.to(tl.int64) * (H * R) + j)
        q = unit_rows(seen + (j // R) * D, t, live, C, D, DP) * (1.0 / D**0.5)
        k = unit_rows(seen + H * D + (j // R) * D, t, live, C, D, DP)
        w = tl.load(keys + row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        u = tl.load(values + row[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        correction = u - tl.dot(w, s)
        seen_by = n[:, None] >= n[None, :]
        left = tl.exp(tl.where(seen_by, total[:, None] - total[None, :], 0.0))
        scores = tl.where(seen_by, tl.dot(q, k.T) * left, 0.0)
        y = tl.dot(q * tl.exp(total)[:, None], s)
        y = tl.dot(scores, correction, y)
        tl.store(answers + row[:, None] * E + e[None, :], y, live[:, None] & (e < E)[None, :])
        kept = k * tl.where(live, tl.exp(last - total), 0.0)[:, None]
        s = tl.dot(kept.T, correction, s * tl.exp(last))
    tl.store(states + tl.load(target) * (H * R * D * E) + at, s, inside)


@triton.jit
def gate_answers(
    answers, projected, norm, eps, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, FUSED: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """out [T, H R E] = answers fp32 normed a head, times their gates: grid (T, H * R)."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    e = tl.arange(0, EP)
    at = t * (H * R * E) + j * E + e
    y = tl.load(answers + at, mask=e < E, other=0.0)
    y *= tl.rsqrt(tl.sum(y * y) / E + eps) * tl.load(norm + e, mask=e < E, other=0.0)
    z = tl.load(projected + t * WIDTH + gate_place(j, H, R, D, E, FUSED) + e, mask=e < E, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    tl.store(out + at, (y * gate).to(out.dtype.element_ty), e < E)
