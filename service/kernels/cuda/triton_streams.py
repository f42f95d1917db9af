"""Hyper-connections on CUDA: what a layer reads of the residual streams, and the injection of what it found."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_primitives import early


@triton.jit
def norm_streams(
    streams, norm, inject, normed, parts, weights, found, eps,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, INJECT: tl.constexpr, WAITING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """normed [T, STREAMS HIDDEN]: each stream normed for itself. Grid (T, STREAMS).

    WAITING: first streams += weights [T, STREAMS] * found [T, HIDDEN]. INJECT: parts fp32 [T, STREAMS, STREAMS] = what
    each stream adds to the products with inject [STREAMS, STREAMS HIDDEN].
    """
    t = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    live = c < HIDDEN
    weight = tl.load(norm + stream * HIDDEN + c, mask=live, other=0.0)
    rows = ()
    if INJECT:
        for i in tl.static_range(STREAMS):
            rows = rows + (tl.load(inject + i * (STREAMS * HIDDEN) + stream * HIDDEN + c, mask=live, other=0.0),)
    early(PDL)
    at = t * (STREAMS * HIDDEN) + stream * HIDDEN + c
    x = tl.load(streams + at, mask=live, other=0.0)
    if WAITING:
        y = tl.load(found + t * HIDDEN + c, mask=live, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + tl.load(weights + t * STREAMS + stream).to(tl.float32) * y).to(x.dtype)
        tl.store(streams + at, x, live)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / HIDDEN + eps)
    x *= weight
    if INJECT:
        for i in tl.static_range(STREAMS):
            tl.store(parts + (t * STREAMS + stream) * STREAMS + i, tl.sum(rows[i].to(tl.float32) * x) * scale)
    tl.store(normed + at, (x * scale).to(normed.dtype.element_ty), live)


@triton.jit
def mix_streams(
    mixed, normed, parts, read, weights, found,
    STREAMS: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, INJECT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """read [T, HIDDEN] = the mean over streams of sigmoid(mixed) * normed [T, STREAMS HIDDEN]. With INJECT also weights
    [T, STREAMS] = 2 sigmoid(the sum of `parts` / STREAMS), and found [T, HIDDEN] = 0. Grid (T, blocks of HIDDEN);
    PADDED: a power of two, at least STREAMS.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < HIDDEN
    early(PDL)
    y = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(STREAMS):
        at = t * (STREAMS * HIDDEN) + i * HIDDEN + c
        m = tl.load(mixed + at, mask=live, other=0.0).to(tl.float32)
        y += tl.sigmoid(m) * tl.load(normed + at, mask=live, other=0.0).to(tl.float32)
    tl.store(read + t * HIDDEN + c, (y / STREAMS).to(read.dtype.element_ty), live)
    if INJECT:
        tl.store(found + t * HIDDEN + c, (y * 0.0).to(found.dtype.element_ty), live)
        if tl.program_id(1) == 0:
            into = tl.arange(0, PADDED)
            total = tl.zeros([PADDED], tl.float32)
            for stream in tl.static_range(STREAMS):
                total += tl.load(parts + (t * STREAMS + stream) * STREAMS + into, mask=into < STREAMS, other=0.0)
            tl.store(
                weights + t * STREAMS + into,
                (2.0 * tl.sigmoid(total / STREAMS)).to(weights.dtype.element_ty),
                into < STREAMS,
            )


@triton.jit
def inject_found(
    streams, weights, found, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """streams [T, STREAMS, HIDDEN] += weights [T, STREAMS] * found [T, HIDDEN]. Grid (T, blocks of HIDDEN)."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < HIDDEN
    early(PDL)
    y = tl.load(found + t * HIDDEN + c, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(STREAMS):
        at = t * (STREAMS * HIDDEN) + i * HIDDEN + c
        x = tl.load(streams + at, mask=live, other=0.0).to(tl.float32)
        x += tl.load(weights + t * STREAMS + i).to(tl.float32) * y
        tl.store(streams + at, x.to(streams.dtype.element_ty), live)
