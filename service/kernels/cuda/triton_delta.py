"""The gated delta rule (see delta_rule.py) on CUDA: one step of several sequences, and chunks of one sequence in tensor
cores.

A projected row holds queries, keys, values and gates of all heads in turn, or (FUSED) those of each key head together.
States and windows are fp32. H key heads of D, R value heads of E per key head; C = 2 H D + H R E channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import early


@triton.jit
def channel_offset(c, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FUSED: tl.constexpr):
    """Offset of channel c in a projected row."""
    if FUSED:
        EACH: tl.constexpr = 2 * D + 2 * R * E
        KEYS: tl.constexpr = H * D
        of_values = c - 2 * KEYS
        query = (c // D) * EACH + c % D
        key = ((c - KEYS) // D) * EACH + D + (c - KEYS) % D
        value = (of_values // (R * E)) * EACH + 2 * D + of_values % (R * E)
        offset = tl.where(c < KEYS, query, tl.where(c < 2 * KEYS, key, value))
    else:
        offset = c
    return offset


@triton.jit
def gate_offset(j, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FUSED: tl.constexpr):
    """Offset of the gates of value head j in a projected row."""
    if FUSED:
        offset = (j // R) * (2 * D + 2 * R * E) + 2 * D + R * E + (j % R) * E
    else:
        offset = 2 * H * D + H * R * E + j * E
    return offset


@triton.jit
def head_rates(rates, decay, bias, row, j, live, H: tl.constexpr, R: tl.constexpr, FUSED: tl.constexpr):
    """For value head j in rows `row`: log of the decay of the state, and the rate of the correction."""
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
    # softplus, without the exp of a large number
    soft = tl.maximum(speed, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(speed)))
    return tl.where(live, tl.load(decay + j) * soft, 0.0), tl.where(live, beta, 0.0)


@triton.jit
def convolve_rows(
    projected, windows, taps, source, target, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    FUSED: tl.constexpr, BLOCK: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode: out fp32 [B, C] = silu of the convolution after windows [slots, K - 1, C], which shift. Grid (B, blocks
    of C).

    VERIFY: the rows belong to one sequence; each follows the window of slot source[0] and the rows before it.
    """
    CHANNELS: tl.constexpr = 2 * H * D + H * R * E
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    # No other kernel of a pass writes windows.
    gone = b if VERIFY else b * 0
    old = windows + tl.load(source + (b - gone)) * ((K - 1) * CHANNELS) + c
    new = windows + tl.load(target + b) * ((K - 1) * CHANNELS) + c
    last = tl.load(taps + (K - 1) * CHANNELS + c, mask=live, other=0.0)
    y = tl.zeros([BLOCK], tl.float32)
    held = ()
    for i in tl.static_range(K - 1):
        held = held + (tl.load(old + (i + gone) * CHANNELS, mask=live & (i + gone < K - 1), other=0.0),)
    early(PDL)
    offset = channel_offset(c, H, R, D, E, FUSED)
    x = tl.load(projected + b * WIDTH + offset, mask=live, other=0.0).to(tl.float32)
    if VERIFY:
        seen = ()
        for i in tl.static_range(K - 1):
            row = b + i - (K - 1)
            seen = seen + (
                held[i] + tl.load(projected + row * WIDTH + offset, mask=live & (row >= 0), other=0.0).to(tl.float32),
            )
        held = seen
    for i in tl.static_range(K - 1):
        y += held[i] * tl.load(taps + i * CHANNELS + c, mask=live, other=0.0)
    for i in tl.static_range(1, K - 1):
        tl.store(new + (i - 1) * CHANNELS, held[i], live)
    tl.store(new + (K - 2) * CHANNELS, x, live)
    y += x * last
    tl.store(out + b * CHANNELS + c, y * tl.sigmoid(y), live)


@triton.jit
def row_of(
    seen, rates, decay, bias, b, j, e, live,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The inputs of value head j in row b: log of the decay, correction rate, query, key, values e; 0 if not `live`."""
    d = tl.arange(0, DP)
    g, beta = head_rates(rates, decay, bias, b, j, live, H, R, FUSED)
    row = seen + b * (2 * H * D + H * R * E)
    q = tl.load(row + (j // R) * D + d, mask=live & (d < D), other=0.0)
    k = tl.load(row + H * D + (j // R) * D + d, mask=live & (d < D), other=0.0)
    v = tl.load(row + 2 * H * D + j * E + e, mask=live & (e < E), other=0.0)
    return g, beta, q, k, v


@triton.jit
def advanced(s, g, beta, q, k, v, D: tl.constexpr):
    """The state s [DP, EP] after a token, and its answer [EP]."""
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (1.0 / D**0.5)
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    s *= tl.exp(g)
    correction = beta * (v - tl.sum(s * k[:, None], 0))
    s += k[:, None] * correction[None, :]
    return s, tl.sum(s * q[:, None], 0)


@triton.jit
def gates_of(
    projected, b, j, e,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Gates of the answers of value head j in row b."""
    return tl.load(projected + b * WIDTH + gate_offset(j, H, R, D, E, FUSED) + e, mask=e < E, other=0.0).to(tl.float32)


@triton.jit
def gated_answer(y, z, weight, eps, E: tl.constexpr, SIGMOID: tl.constexpr):
    """An answer [EP], normed, times its gates z."""
    y *= tl.rsqrt(tl.sum(y * y) / E + eps) * weight
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    return y * gate


@triton.jit
def step_states(
    seen, projected, rates, decay, bias, norm, eps, states, source, target, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, FUSED: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode: states [slots, H, R, D, E] take in a token and answer; out [B, H R E] is normed per head and gated. Grid
    (B, H * R).

    seen fp32 [B, C]: from `convolve_rows`. DP, EP: powers of two, at least D and E.
    """
    b = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    weight = tl.load(norm + e, mask=e < E, other=0.0)
    inside = (d < D)[:, None] & (e < E)[None, :]
    at = j * (D * E) + d[:, None] * E + e[None, :]
    # No other kernel of a pass writes states.
    s = tl.load(states + tl.load(source + b) * (H * R * D * E) + at, mask=inside, other=0.0)
    new = states + tl.load(target + b) * (H * R * D * E) + at
    early(PDL)
    g, beta, q, k, v = row_of(seen, rates, decay, bias, b, j, e, j >= 0, H, R, D, E, DP, FUSED)
    z = gates_of(projected, b, j, e, WIDTH, H, R, D, E, FUSED)
    s, y = advanced(s, g, beta, q, k, v, D)
    tl.store(new, s, inside)
    y = gated_answer(y, z, weight, eps, E, SIGMOID)
    tl.store(out + b * (H * R * E) + j * E + e, y.to(out.dtype.element_ty), e < E)


@triton.jit(do_not_specialize=["count"])
def convolve_piece(
    projected, windows, taps, source, target, out, count,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    FUSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of one sequence: out [count, C] = silu of the convolution after the window of slot source[0]. The window
    after the chunk goes to slot target[0], a different one. Grid (pieces of ROWS rows, blocks of C).
    """
    CHANNELS: tl.constexpr = 2 * H * D + H * R * E
    begin = tl.program_id(0) * ROWS
    t = (begin + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (t < count) & (c < CHANNELS)
    offset = channel_offset(c, H, R, D, E, FUSED)
    old = windows + tl.load(source) * ((K - 1) * CHANNELS) + c
    y = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(K):
        at = t + i - (K - 1)
        x = tl.load(projected + at.to(tl.int64) * WIDTH + offset, mask=live & (at >= 0), other=0.0).to(tl.float32)
        if begin == 0:
            x += tl.load(old + (at + K - 1) * CHANNELS, mask=live & (at < 0), other=0.0)
        y += x * tl.load(taps + i * CHANNELS + c, mask=c < CHANNELS, other=0.0)
    tl.store(out + t.to(tl.int64) * CHANNELS + c, (y * tl.sigmoid(y)).to(out.dtype.element_ty), live)
    if begin == 0:
        new = windows + tl.load(target) * ((K - 1) * CHANNELS) + c
        for i in tl.static_range(K - 1):
            last = count - (K - 1) + i + c * 0
            z = tl.load(
                projected + last.to(tl.int64) * WIDTH + offset, mask=(c < CHANNELS) & (last >= 0), other=0.0
            ).to(tl.float32)
            z += tl.load(old + (last + K - 1) * CHANNELS, mask=(c < CHANNELS) & (last < 0), other=0.0)
            tl.store(new + i * CHANNELS, z, c < CHANNELS)


@triton.jit
def rows_of(p, first, count, STRIDE: tl.constexpr, D, DP: tl.constexpr, N: tl.constexpr):
    """N rows [N, DP] from `first` on; 0 from row `count` and from column D on."""
    d = tl.arange(0, DP)[None, :]
    n = tl.arange(0, N)[:, None]
    return tl.load(
        p + tl.cast(first, tl.int64) * STRIDE + n * STRIDE + d, mask=(n < count - first) & (d < D), other=0.0
    )


@triton.jit
def unit_scale(x):
    """Factors that scale rows [N, DP] to length 1, fp32."""
    y = x.to(tl.float32)
    return tl.rsqrt(tl.sum(y * y, 1) + 1e-6)


@triton.jit
def inverse_of(system, N: tl.constexpr, LEVELS: tl.constexpr):
    """The inverse of I + system [N, N], with a strictly lower triangular system; N = 2 ** LEVELS.

    The inverses of the diagonal blocks give those of blocks twice as large. Every intermediate product is one of the
    tokens' updates of a state, which never lengthen it. So nothing grows, unlike powers of the system with repeated
    keys, and fp16 holds everything.
    """
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -system, 0.0))
    for level in range(1, LEVELS):
        joins = ((i >> level) != (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1)))
        half = inverse.to(tl.float16)
        step = tl.dot(tl.where(joins, system, 0.0).to(tl.float16), half)
        inverse -= tl.dot(half, step.to(tl.float16))
    return inverse


@triton.jit(do_not_specialize=["count"])
def solve_piece(
    seen, rates, decay, bias, values, keys, totals, kept, count,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    N: tl.constexpr, FUSED: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of the corrections of N tokens of one value head, for both right-hand sides, COLUMNS
    of them at a time.

    Corrections are values - keys @ (the state before the N tokens): values [pieces, H R, EP, N], keys [pieces, H R, N,
    DP], activations. totals fp32 [pieces, H R, N]: log of the decay of that state at each token. kept: the weight of
    each raw key in the state after the N tokens. seen [T, C]: from `convolve_piece`. Grid (pieces, H * R).
    """
    piece = tl.program_id(0)
    j = tl.program_id(1)
    C: tl.constexpr = 2 * H * D + H * R * E
    n = tl.arange(0, N)
    t = piece * N + n
    live = t < count
    g, beta = head_rates(rates, decay, bias, t, j, live, H, R, FUSED)
    total = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    k = rows_of(seen + H * D + (j // R) * D, piece * N, count, C, D, DP, N)
    unit = unit_scale(k)
    earlier = n[:, None] > n[None, :]
    left = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
    system = tl.where(earlier, tl.dot(k, k.T) * left * (unit * beta)[:, None] * unit[None, :], 0.0)
    inverse = inverse_of(system, N, LEVELS)
    unit_at = (piece * (H * R) + j).to(tl.int64)
    tl.store(totals + unit_at * N + n, total)
    tl.store(kept + unit_at * N + n, unit * tl.exp(last - total))
    kind = seen.dtype.element_ty
    # In two parts: rounded to bf16 once, states after repeated keys are off four times as much (4.2e-3 instead of
    # 9.5e-4).
    wide = inverse * (unit * beta * tl.exp(total))[None, :]
    part = wide.to(kind)
    rest = (wide - part.to(tl.float32)).to(kind)
    BD: tl.constexpr = COLUMNS if COLUMNS < DP else DP
    for at in tl.range(0, DP, BD, num_stages=1):
        d = at + tl.arange(0, BD)
        some = k if BD == DP else rows_of(seen + H * D + (j // R) * D + at, piece * N, count, C, D - at, BD, N)
        found = tl.dot(rest, some, tl.dot(part, some))
        tl.store(keys + unit_at * (N * DP) + n[:, None] * DP + d[None, :], found.to(kind))
    BE: tl.constexpr = COLUMNS if COLUMNS < EP else EP
    for at in tl.range(0, EP, BE, num_stages=1):
        e = at + tl.arange(0, BE)
        v = rows_of(seen + 2 * H * D + j * E + at, piece * N, count, C, E - at, BE, N)
        wide = inverse * beta[None, :]
        part = wide.to(kind)
        rest = (wide - part.to(tl.float32)).to(kind)
        transposed = tl.dot(v.T, rest.T, tl.dot(v.T, part.T))
        tl.store(values + unit_at * (EP * N) + e[:, None] * N + n[None, :], transposed.to(values.dtype.element_ty))


@triton.jit(do_not_specialize=["count"])
def scan_pieces(
    seen, values, keys, totals, kept, states, source, target, held, corrections, count,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk of one sequence after `solve_piece`: the state goes from slot source[0] to slot target[0].

    held [pieces, H R, EP, DP]: the state before each piece; corrections [pieces, H R, EP, N] of its tokens;
    activations. Grid (blocks of BE values, H * R): each program takes its columns of the state, as rows, through all
    pieces. As the left operand of both products the state goes from registers into the tensor cores.
    """
    j = tl.program_id(1)
    C: tl.constexpr = 2 * H * D + H * R * E
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = (e < E)[:, None] & (d < D)[None, :]
    at = j * (D * E) + d[None, :] * E + e[:, None]
    s = tl.load(states + tl.load(source) * (H * R * D * E) + at, mask=inside, other=0.0)
    kind = seen.dtype.element_ty
    k_at = seen + H * D + (j // R) * D
    for piece in tl.range(0, tl.cdiv(count, N), num_stages=STAGES):
        unit_at = (piece * (H * R) + j).to(tl.int64)
        w = tl.load(keys + unit_at * (N * DP) + n[:, None] * DP + d[None, :])
        k = rows_of(k_at, piece * N, count, C, D, DP, N)
        u = tl.load(values + unit_at * (EP * N) + e[:, None] * N + n[None, :]).to(tl.float32)
        share = tl.load(kept + unit_at * N + n)
        last = tl.load(totals + unit_at * N + N - 1)
        part = s.to(kind)
        tl.store(held + unit_at * (EP * DP) + e[:, None] * DP + d[None, :], part)
        taken = tl.dot(part, w.T)
        correction = u - taken
        tl.store(corrections + unit_at * (EP * N) + e[:, None] * N + n[None, :], correction.to(kind))
        s *= tl.exp(last)
        s = tl.dot((correction * share[None, :]).to(kind), k, s)
    tl.store(states + tl.load(target) * (H * R * D * E) + at, s, inside)


@triton.jit(do_not_specialize=["count"])
def answer_piece(
    seen, corrections, totals, held, projected, norm, eps, out, count,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, N: tl.constexpr, FUSED: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """out [T, H R E] = the answers of N tokens of one value head, normed, times their gates. Grid (pieces, H * R)."""
    piece = tl.program_id(0)
    j = tl.program_id(1)
    C: tl.constexpr = 2 * H * D + H * R * E
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    t = piece * N + n
    live = t < count
    unit_at = (piece * (H * R) + j).to(tl.int64)
    kind = seen.dtype.element_ty
    q = rows_of(seen + (j // R) * D, piece * N, count, C, D, DP, N)
    k = rows_of(seen + H * D + (j // R) * D, piece * N, count, C, D, DP, N)
    s = tl.load(held + unit_at * (EP * DP) + e[:, None] * DP + d[None, :])
    correction = tl.load(corrections + unit_at * (EP * N) + e[:, None] * N + n[None, :])
    total = tl.load(totals + unit_at * N + n)
    unit = unit_scale(q) * (1.0 / D**0.5)
    seen_by = n[:, None] >= n[None, :]
    left = tl.exp(tl.where(seen_by, total[:, None] - total[None, :], 0.0))
    scores = tl.where(seen_by, tl.dot(q, k.T) * left * unit[:, None] * unit_scale(k)[None, :], 0.0)
    y = tl.dot(q, s.T) * (unit * tl.exp(total))[:, None]
    y = tl.dot(scores.to(kind), correction.T, y)
    y *= tl.rsqrt(tl.sum(y * y, 1) / E + eps)[:, None] * tl.load(norm + e, mask=e < E, other=0.0)[None, :]
    inside = live[:, None] & (e < E)[None, :]
    row = t.to(tl.int64)[:, None]
    z = tl.load(projected + row * WIDTH + gate_offset(j, H, R, D, E, FUSED) + e[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    tl.store(out + row * (H * R * E) + j * E + e[None, :], (y * gate).to(out.dtype.element_ty), inside)
