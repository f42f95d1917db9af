"""Kernels over activation rows: embedding, norms, fixed-point numbers, the SwiGLU gate, heads into the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import (
    e2m1,
    e4m3,
    early,
    fixed,
    fixed_sum,
    four,
    two,
)


@triton.jit
def embed(ids, table, scales, out, COLS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, COLS] = rows `ids` of the table [vocab, COLS]. GROUPS 0: it holds floats; otherwise int8 with GROUPS
    scales per row.
    """
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(ids + row)
    x = tl.load(table + at * COLS + c, mask=c < COLS, other=0).to(tl.float32)
    if GROUPS:
        x *= tl.load(scales + at * GROUPS + c // GROUP, mask=c < COLS, other=0.0)
    tl.store(out + row.to(tl.int64) * COLS + c, x.to(out.dtype.element_ty), c < COLS)


@triton.jit
def rms_norm(x, weight, out, eps, COLS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [T, COLS] = x * rsqrt(mean(x^2) + eps) * weight."""
    c = tl.arange(0, BLOCK)
    w = tl.load(weight + c, mask=c < COLS, other=0.0)
    early(PDL)
    at = tl.program_id(0).to(tl.int64) * COLS + c
    v = tl.load(x + at, mask=c < COLS, other=0.0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v) / COLS + eps) * w
    tl.store(out + at, v.to(out.dtype.element_ty), c < COLS)


@triton.jit
def fixed_point(
    x, norm, words, sums, eps,
    COLS: tl.constexpr, UNIT_WORDS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row x, normed, as fixed-point numbers for `gemv` with HELD: high and low words, one scale and one sum per
    unit.

    x: 64-bit words of four floats; norm: words of two fp32. UNIT_WORDS: 8 for int4, 4 for int8. PADDED: a power of two,
    at least the number of units.
    """
    UNITS: tl.constexpr = COLS // (4 * UNIT_WORDS)
    unit = tl.arange(0, PADDED)
    at = unit[:, None] * UNIT_WORDS + tl.arange(0, UNIT_WORDS)[None, :]
    live = (unit < UNITS)[:, None] & (at >= 0)
    n = two(tl.load(norm + 2 * at, mask=live, other=0)) + two(tl.load(norm + 2 * at + 1, mask=live, other=0))
    early(PDL)
    f = four(tl.load(x + at, mask=live, other=0), HALF)
    squares = f[0] * f[0] + f[1] * f[1] + f[2] * f[2] + f[3] * f[3]
    root = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / COLS + eps)
    v = (f[0] * n[0], f[1] * n[1], f[2] * n[2], f[3] * n[3])
    m = tl.maximum(tl.maximum(tl.abs(v[0]), tl.abs(v[1])), tl.maximum(tl.abs(v[2]), tl.abs(v[3])))
    m = tl.maximum(tl.max(m, 1), 1e-30)
    high, low = fixed(v, tl.broadcast_to((32512.0 / m)[:, None], v[0].shape), ASM)
    tl.store(words + at, high, live)
    tl.store(words + UNITS * UNIT_WORDS + at, low, live)
    tl.store(sums + unit, m * root * (1.0 / 32512.0), unit < UNITS)
    tl.store(sums + UNITS + unit, tl.sum(fixed_sum(high, low, ASM), 1).to(tl.float32), unit < UNITS)


@triton.jit
def widen(
    w, scales, offsets, out,
    COLS: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, COLS] = the numbers of a quantized weight; w: its bytes (int8 signed, others unsigned). For nvfp4 see
    `gemv`.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < COLS
    if FORMAT == "int4":
        b = tl.load(w + row * (COLS // 2) + (c // 32) * 16 + c % 16, mask=live, other=0).to(tl.int32)
        q = tl.where(c % 32 < 16, b & 15, b >> 4).to(tl.float32)
        if not OFFSETS:
            q -= 8.0
    elif FORMAT == "nvfp4":
        b = tl.load(w + row * (COLS // 2) + (c // 32) * 16 + c % 16, mask=live, other=0).to(tl.int32)
        both = tl.load(scales + row * GROUPS + c // 32, mask=live, other=0).to(tl.int32)
        scale = e4m3(tl.where(c % 32 < 16, both, both >> 8) & 255)
        q = e2m1(tl.where(c % 32 < 16, b & 15, b >> 4)) * scale * (tl.load(offsets + row) * 4194304.0)
    elif FORMAT == "fp8":
        b = tl.load(w + row * COLS + c, mask=live, other=0).to(tl.int16)
        q = (((b & 128) << 8) | ((b & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        q = tl.load(w + row * COLS + c, mask=live, other=0).to(tl.float32)
    if FORMAT != "nvfp4":
        q *= tl.load(scales + row * GROUPS + c // GROUP, mask=live, other=0.0).to(tl.float32)
    if OFFSETS:
        q += tl.load(offsets + row * GROUPS + c // GROUP, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * COLS + c, q.to(out.dtype.element_ty), live)


@triton.jit
def silu_mul(both, out, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, COLS] = silu(gate) * up with both [T, 2 COLS] = gate, up."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(both + row * 2 * COLS + c, mask=c < COLS, other=0.0).to(tl.float32)
    u = tl.load(both + row * 2 * COLS + COLS + c, mask=c < COLS, other=0.0).to(tl.float32)
    tl.store(out + row * COLS + c, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), c < COLS)


@triton.jit
def store_heads(
    qkv, q_norm, k_norm, q_eps, k_eps, cos, sin, keys, values, positions, turns, tables,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows of one sequence: norm and rotate queries in place, norm and rotate keys into the paged cache, copy values
    into it.

    qkv [T, (HEADS + 2 KV) D]; keys, values [blocks, KV, 32, D]; PADDED: a power of two, at least HEADS + 2 KV.
    """
    H: tl.constexpr = D // 2
    row = tl.program_id(0)
    pos = tl.load(positions + row)
    head = tl.arange(0, PADDED)[:, None]
    h = tl.arange(0, H)[None, :]
    key = head >= HEADS
    rotated = head < HEADS + KV
    live = (head < HEADS + 2 * KV) & (h >= 0)
    p = qkv + row.to(tl.int64) * ((HEADS + 2 * KV) * D) + head * D + h
    low = tl.load(p, mask=live, other=0.0).to(tl.float32)
    high = tl.load(p + H, mask=live, other=0.0).to(tl.float32)
    root = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1))[:, None] / D + tl.where(key, k_eps, q_eps))
    a = low * root * tl.where(key, tl.load(k_norm + h), tl.load(q_norm + h))
    b = high * root * tl.where(key, tl.load(k_norm + H + h), tl.load(q_norm + H + h))
    turn = tl.load(turns + row)
    c = tl.load(cos + turn * H + h)
    s = tl.load(sin + turn * H + h)
    low = tl.where(rotated, a * c - b * s, low).to(qkv.dtype.element_ty)
    high = tl.where(rotated, b * c + a * s, high).to(qkv.dtype.element_ty)
    tl.store(p, low, live & (head < HEADS))
    tl.store(p + H, high, live & (head < HEADS))
    block = tl.load(tables + pos // 32).to(tl.int64) * (KV * 32 * D) + (pos % 32) * D
    at = block + ((head - HEADS) % KV) * (32 * D) + h
    tl.store(keys + at, low, live & key & rotated)
    tl.store(keys + at + H, high, live & key & rotated)
    tl.store(values + at, low, live & ~rotated)
    tl.store(values + at + H, high, live & ~rotated)
