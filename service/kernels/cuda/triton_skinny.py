"""2 to 16 activation rows times a weight: tensor-core tiles with the rows of x padded to 16.

Weights become the activation type in registers, exactly: int8 and nibbles have few enough bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_gemv import folded
from .triton_primitives import e2m1, e4m3, early


@triton.jit
def int8_halves(b, HALF: tl.constexpr, ASM: tl.constexpr):
    """int8 as 16-bit floats."""
    if ASM and HALF == "bf16":
        # (128 + the low 7 bits) - (128, or 256 for negative numbers)
        floats = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, m, n, o;
            mov.b32 o, 0xBF80BF80;
            prmt.b32 p, $2, 0, 0x4140;
            prmt.b32 q, $2, 0, 0x4342;
            lop3.b32 m, p, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 n, p, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, n, o, m;
            lop3.b32 m, q, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 n, q, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, n, o, m;
            }""",
            "=&r,=&r,r",
            [b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif HALF == "bf16":
        floats = b.to(tl.float32).to(tl.bfloat16)
    else:
        floats = b.to(tl.float16)
    return floats


@triton.jit
def int4_halves(b, HALF: tl.constexpr, ASM: tl.constexpr):
    """nibble - 8 of the low and of the high nibbles, as 16-bit floats."""
    if ASM and HALF == "bf16":
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, o, m;
            mov.b32 o, 0x3F803F80;
            mov.b32 m, 0xC308C308;
            prmt.b32 p, $4, 0, 0x4140;
            prmt.b32 q, $4, 0, 0x4342;
            lop3.b32 $0, p, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, q, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 p, p, 4;
            shr.u32 q, q, 4;
            lop3.b32 $2, p, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, q, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, o, m;
            fma.rn.bf16x2 $1, $1, o, m;
            fma.rn.bf16x2 $2, $2, o, m;
            fma.rn.bf16x2 $3, $3, o, m;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [b],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif HALF == "bf16":
        low = ((b & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        high = ((b >> 4).to(tl.float32) - 8.0).to(tl.bfloat16)
    else:
        low = ((b & 15).to(tl.float32) - 8.0).to(tl.float16)
        high = ((b >> 4).to(tl.float32) - 8.0).to(tl.float16)
    return low, high


@triton.jit
def fp8_halves(b, HALF: tl.constexpr):
    """float8_e4m3fn (as bytes) as 16-bit floats divided by 256: shifted into a half they lack
    8 of its exponent bias.
    """
    w = b.to(tl.int16)
    half = (((w & 128) << 8) | ((w & 127) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32).to(tl.bfloat16) if HALF == "bf16" else half


@triton.jit
def nvfp4_scales(both, HALF: tl.constexpr, ASM: tl.constexpr):
    """The scales for `nvfp4_halves`: those of the low and of the high nibbles of a unit, `both` in one number."""
    low, high = e4m3(both & 255), e4m3((both >> 8) & 255)
    if ASM and HALF == "bf16":
        # 2^126 makes up for the exponent bias that nibbles lack as bf16. e4m3 lacks 2^8 and keeps that: 448 * 2^126 is
        # no bf16.
        scales = (low * 8.507059173023462e37).to(tl.bfloat16), (high * 8.507059173023462e37).to(tl.bfloat16)
    else:
        scales = low * 4194304.0, high * 4194304.0
    return scales


@triton.jit
def nvfp4_halves(q, low_scale, high_scale, HALF: tl.constexpr, ASM: tl.constexpr):
    """Low and high nibbles times their scales (`nvfp4_scales`), exactly: both have few bits. With inline PTX for bf16
    divided by 256.
    """
    if ASM and HALF == "bf16":
        # A nibble is a sign, two exponent bits and one mantissa bit, shifted to where a bf16 has its own.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, m, z;
            mov.b32 z, 0x80008000;
            prmt.b32 p, $4, 0, 0x1404;
            prmt.b32 q, $4, 0, 0x3424;
            shr.u32 m, p, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, p, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $2, m, $7, z;
            shr.u32 m, q, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $3, m, $8, z;
            shl.b32 p, p, 4;
            shl.b32 q, q, 4;
            shr.u32 m, p, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, p, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $0, m, $5, z;
            shr.u32 m, q, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, q, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $1, m, $6, z;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [q, low_scale, high_scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif HALF == "bf16":
        low, high = (e2m1(q & 15) * low_scale).to(tl.bfloat16), (e2m1(q >> 4) * high_scale).to(tl.bfloat16)
    else:
        low, high = (e2m1(q & 15) * low_scale).to(tl.float16), (e2m1(q >> 4) * high_scale).to(tl.float16)
    return low, high


@triton.jit
def spread(s, BN: tl.constexpr, UNITS: tl.constexpr):
    """[BN, UNITS * 16] from [BN, UNITS]: the number of a unit for each of its 16 bytes."""
    return tl.broadcast_to(s[:, :, None], (BN, UNITS, 16)).reshape(BN, UNITS * 16)


@triton.jit
def tile_sum(  # noqa: C901 - a kernel's forms, of which each compilation keeps one

    x, w, scales, offsets, b, live, n, part,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PER: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: rows b of x times rows n of w, over the PER steps of BK columns of this part."""
    acc = tl.zeros([BM, BN], tl.float32)
    row = b.to(tl.int64)[:, None] * COLS
    held = n.to(tl.int64)
    if FORMAT == "float" and BN >= 64:
        # The weight is the left operand of the product: from sm_90 on it goes from shared memory into the tensor cores
        # without registers.
        transposed = tl.zeros([BN, BM], tl.float32)
        k = tl.arange(0, BK)
        for i in tl.range(PER, num_stages=STAGES):
            at = (part * PER + i) * BK
            t = tl.load(x + row + at + k[None, :], mask=live & (at + k < COLS)[None, :], other=0.0)
            q = tl.load(w + held[:, None] * COLS + at + k[None, :], mask=(at + k < COLS)[None, :], other=0)
            transposed = tl.dot(q, t.T, transposed)
        acc = transposed.T
    elif FORMAT == "int4" or FORMAT == "nvfp4":  # two columns per byte
        bytes_ = tl.arange(0, BK // 2)
        col = (bytes_ // 16) * 32 + bytes_ % 16
        for i in tl.range(PER, num_stages=STAGES):
            at = (part * PER + i) * BK
            there = (at + col < COLS)[None, :]
            low_x = tl.load(x + row + at + col[None, :], mask=live & there, other=0.0)
            high_x = tl.load(x + row + at + 16 + col[None, :], mask=live & there, other=0.0)
            q = tl.load(w + held[:, None] * (COLS // 2) + at // 2 + bytes_[None, :], mask=there, other=136)
            if FORMAT == "nvfp4":
                unit = at // 32 + tl.arange(0, BK // 32)[None, :]
                both = tl.load(scales + held[:, None] * GROUPS + unit, mask=unit < GROUPS, other=0)
                low_scale, high_scale = nvfp4_scales(both.to(tl.int32), HALF, ASM)
                low, high = nvfp4_halves(
                    q, spread(low_scale, BN, BK // 32), spread(high_scale, BN, BK // 32), HALF, ASM
                )
                acc = tl.dot(low_x, low.T, acc)
                acc = tl.dot(high_x, high.T, acc)
            else:
                s = tl.load(scales + held * GROUPS + at // GROUP, mask=at < COLS, other=0.0).to(tl.float32)
                low, high = int4_halves(q, HALF, ASM)
                d = tl.dot(low_x, low.T)
                d = tl.dot(high_x, high.T, d)
                acc += d * s[None, :]
                if OFFSETS:
                    o = (
                        tl.load(offsets + held * GROUPS + at // GROUP, mask=at < COLS, other=0.0).to(tl.float32)
                        + 8.0 * s
                    )
                    total = tl.sum(low_x.to(tl.float32), 1) + tl.sum(high_x.to(tl.float32), 1)
                    acc += total[:, None] * o[None, :]
        if FORMAT == "nvfp4":
            acc *= tl.load(offsets + held)[None, :] * (256.0 if ASM and HALF == "bf16" else 1.0)
    else:
        k = tl.arange(0, BK)
        for i in tl.range(PER, num_stages=STAGES):
            at = (part * PER + i) * BK
            t = tl.load(x + row + at + k[None, :], mask=live & (at + k < COLS)[None, :], other=0.0)
            q = tl.load(w + held[:, None] * COLS + at + k[None, :], mask=(at + k < COLS)[None, :], other=0)
            if FORMAT == "float":
                acc = tl.dot(t, q.T, acc)
            else:
                q = int8_halves(q, HALF, ASM) if FORMAT == "int8" else fp8_halves(q, HALF)
                if GROUPS > 1:
                    s = tl.load(scales + held * GROUPS + at // GROUP, mask=at < COLS, other=0.0)
                    acc += tl.dot(t, q.T) * s[None, :]
                else:
                    acc = tl.dot(t, q.T, acc)
        if FORMAT != "float" and GROUPS == 1:
            acc *= tl.load(scales + held)[None, :]
        if FORMAT == "fp8":
            acc *= 256.0
    return acc


@triton.jit(do_not_specialize=["count"])
def skinny(
    x, w, scales, offsets, out, parts, rows, count,
    COLS: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, FOLD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [count, rows] = x [count, COLS] @ w [rows, COLS]^T, count <= 16; or out += it (ADD); or silu of it times the
    product with the rows after `rows` (GATED); FOLD: see `folded`. A step of BK columns lies under one scale, except
    for nvfp4.

    With SPLIT > 1, SPLIT programs share a row of weights. Each leaves its sum in `parts` [SPLIT, 16, rows] for
    `add_parts`.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    PER: tl.constexpr = (COLS + BK * SPLIT - 1) // (BK * SPLIT)
    r = tile * BN + tl.arange(0, BN)
    n = tl.minimum(r, rows - 1)
    b = tl.arange(0, 16)
    live = (b < count)[:, None]
    early(PDL)
    acc = tile_sum(
        x,
        w,
        scales,
        offsets,
        b,
        live,
        n,
        part,
        COLS,
        FORMAT,
        HALF,
        GROUPS,
        GROUP,
        OFFSETS,
        16,
        BN,
        BK,
        PER,
        STAGES,
        ASM,
    )
    if GATED:
        n += rows
        up = tile_sum(
            x,
            w,
            scales,
            offsets,
            b,
            live,
            n,
            part,
            COLS,
            FORMAT,
            HALF,
            GROUPS,
            GROUP,
            OFFSETS,
            16,
            BN,
            BK,
            PER,
            STAGES,
            ASM,
        )
        acc = acc * tl.sigmoid(acc) * up
    o = b[:, None] * rows + r[None, :]
    ok = live & (r < rows)[None, :]
    if SPLIT > 1:
        tl.store(parts + part * 16 * rows + o, acc, ok)
    else:
        acc = folded(acc, FOLD)
        if ADD:
            acc += tl.load(out + o, ok, 0.0).to(tl.float32)
        tl.store(out + o, acc.to(out.dtype.element_ty), ok)


@triton.jit
def add_parts(
    parts, out, rows, SPLIT: tl.constexpr, ADD: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [count, rows] = the sum of parts [SPLIT, 16, rows], always in the same order, or out += it. Grid (count,
    blocks of rows).
    """
    b = tl.program_id(0)
    r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o = b * rows + r
    early(PDL)
    y = tl.load(parts + o, r < rows, 0.0)
    for j in tl.static_range(1, SPLIT):
        y += tl.load(parts + j * 16 * rows + o, r < rows, 0.0)
    y = folded(y, FOLD)
    if ADD:
        y += tl.load(out + o, r < rows, 0.0).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), r < rows)
