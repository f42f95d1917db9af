"""What the Triton kernels share: numbers packed in words, fixed-point activations, waiting for the previous launch.

Only `cuda_fused` imports the triton_* modules, once Triton is known to be installed. `ASM` enables inline PTX. Without
it plain Triton does the same arithmetic, so that its interpreter can check it without a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def early(PDL: tl.constexpr):
    """Let the next kernel of the stream start to load its weights, then wait until the previous one has written
    everything.

    Programmatic dependent launch (from sm_90 on). Before this call a kernel may only read what no kernel of the pass
    writes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def halves(pair, HALF: tl.constexpr):
    """The two 16-bit floats of a word as fp32; HALF is "bf16" or "fp16"."""
    if HALF == "bf16":
        floats = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        floats = low.to(tl.float32), high.to(tl.float32)
    return floats


@triton.jit
def four(quad, HALF: tl.constexpr):
    """The four 16-bit floats of a 64-bit word as fp32."""
    return halves(quad.to(tl.int32), HALF) + halves((quad >> 32).to(tl.int32), HALF)


@triton.jit
def two(pair):
    """The two fp32 numbers of a 64-bit word."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def signed_byte(word, i: tl.constexpr):
    """Byte i of a word, signed."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def byte(word, i: tl.constexpr):
    """Byte i of a word, unsigned."""
    return (word >> (8 * i)) & 255


@triton.jit
def fixed(x, inverse, ASM: tl.constexpr):
    """round(x[i] * inverse), i < 4, |.| <= 32512, as 256 * high + low: a word of four signed highs and one of four
    unsigned lows.
    """
    if ASM:
        # Added to 1.5 * 2^23, the rounded number is in the low bits.
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, p, q;
            fma.rn.f32 a, $2, $6, 0f4B400000;
            fma.rn.f32 b, $3, $6, 0f4B400000;
            fma.rn.f32 c, $4, $6, 0f4B400000;
            fma.rn.f32 d, $5, $6, 0f4B400000;
            prmt.b32 p, a, b, 0x0040;
            prmt.b32 q, c, d, 0x0040;
            prmt.b32 $1, p, q, 0x5410;
            prmt.b32 p, a, b, 0x0051;
            prmt.b32 q, c, d, 0x0051;
            prmt.b32 $0, p, q, 0x5410;
            }""",
            "=&r,=&r,f,f,f,f,f",
            [x[0], x[1], x[2], x[3], inverse],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        high = (x[0] * 0).to(tl.int32)
        low = high
        for i in tl.static_range(4):
            q = tl.floor(x[i] * inverse + 0.5).to(tl.int32)
            high = high | (((q >> 8) & 255) << (8 * i))
            low = low | ((q & 255) << (8 * i))
    return high, low


@triton.jit
def fixed_sum(high, low, ASM: tl.constexpr):
    """Sum of the four numbers of `fixed`."""
    if ASM:
        total = tl.inline_asm_elementwise(
            """{
            .reg .s32 h, o;
            mov.b32 o, 0x01010101;
            dp4a.s32.s32 h, $1, o, 0;
            shl.b32 h, h, 8;
            dp4a.u32.u32 $0, $2, o, h;
            }""",
            "=&r,r,r",
            [high, low],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = high * 0
        for i in tl.static_range(4):
            total += 256 * signed_byte(high, i) + byte(low, i)
    return total


@triton.jit
def first(t, RL: tl.constexpr, NB: tl.constexpr):
    """Element 0 of the last dimension of [RL, NB, 4]."""
    a, _b = tl.split(t.reshape(RL, NB, 2, 2))
    c, _d = tl.split(a)
    return c


@triton.jit
def dot_int8(w, high, low, RL: tl.constexpr, NB: tl.constexpr, ASM: tl.constexpr):
    """[RL, NB]: sums over 16 columns of int8 times fixed-point x; all are words [RL, NB, 4]."""
    if ASM:
        sums = tl.inline_asm_elementwise(
            """{
            .reg .s32 h, l;
            dp4a.s32.s32 h, $4, $8, 0;
            dp4a.s32.u32 l, $4, $12, 0;
            dp4a.s32.s32 h, $5, $9, h;
            dp4a.s32.u32 l, $5, $13, l;
            dp4a.s32.s32 h, $6, $10, h;
            dp4a.s32.u32 l, $6, $14, l;
            dp4a.s32.s32 h, $7, $11, h;
            dp4a.s32.u32 l, $7, $15, l;
            mad.lo.s32 $0, h, 256, l;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, high, low],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        total = first(sums, RL, NB)
    else:
        sums = w * 0
        for i in tl.static_range(4):
            sums += signed_byte(w, i) * (256 * signed_byte(high, i) + byte(low, i))
        total = tl.sum(sums, 2)
    return total


@triton.jit
def dot_int4(w, x, zero, RL: tl.constexpr, NB: tl.constexpr, ASM: tl.constexpr):
    """[RL, NB]: 16 * (sums over 32 columns of nibbles times fixed-point x) + zero; words [RL, NB, 4].

    x: (high, low) of the columns in low nibbles, then (high, low) of those in high nibbles. High nibbles are used in
    place, so they count 16 times, and the low ones are multiplied by 16 at the end.
    """
    if ASM:
        sums = tl.inline_asm_elementwise(
            """{
            .reg .s32 a, b, d, e;
            .reg .b32 p, q;
            and.b32 p, $4, 0x0F0F0F0F;
            and.b32 q, $4, 0xF0F0F0F0;
            dp4a.u32.s32 a, p, $8, 0;
            dp4a.u32.u32 b, p, $12, 0;
            dp4a.u32.s32 d, q, $16, 0;
            dp4a.u32.u32 e, q, $20, $24;
            and.b32 p, $5, 0x0F0F0F0F;
            and.b32 q, $5, 0xF0F0F0F0;
            dp4a.u32.s32 a, p, $9, a;
            dp4a.u32.u32 b, p, $13, b;
            dp4a.u32.s32 d, q, $17, d;
            dp4a.u32.u32 e, q, $21, e;
            and.b32 p, $6, 0x0F0F0F0F;
            and.b32 q, $6, 0xF0F0F0F0;
            dp4a.u32.s32 a, p, $10, a;
            dp4a.u32.u32 b, p, $14, b;
            dp4a.u32.s32 d, q, $18, d;
            dp4a.u32.u32 e, q, $22, e;
            and.b32 p, $7, 0x0F0F0F0F;
            and.b32 q, $7, 0xF0F0F0F0;
            dp4a.u32.s32 a, p, $11, a;
            dp4a.u32.u32 b, p, $15, b;
            dp4a.u32.s32 d, q, $19, d;
            dp4a.u32.u32 e, q, $23, e;
            mad.lo.s32 a, a, 16, d;
            mad.lo.s32 b, b, 16, e;
            mad.lo.s32 $0, a, 256, b;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, x[0], x[1], x[2], x[3], zero],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        total = first(sums, RL, NB)
    else:
        sums = w * 0
        for i in tl.static_range(4):
            b = byte(w, i)
            sums += (b & 15) * (256 * signed_byte(x[0], i) + byte(x[1], i)) + (b >> 4) * (
                256 * signed_byte(x[2], i) + byte(x[3], i)
            )
        total = tl.sum(sums, 2) * 16 + first(zero, RL, NB)
    return total


@triton.jit
def fp8_floats(w):
    """The four float8_e4m3fn of a word as fp32, each divided by 256: shifted into a half they lack 8 of its exponent
    bias.
    """
    out = ()
    for i in tl.static_range(4):
        b = byte(w, i)
        bits = ((b & 128) << 8) | ((b & 127) << 7)
        out = out + (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),)
    return out


@triton.jit
def e4m3(b):
    """float8_e4m3fn, given as numbers from 0 to 255, as fp32 divided by 256 (see fp8_floats)."""
    w = b.to(tl.int16)
    return (((w & 128) << 8) | ((w & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1(n):
    """Nibbles of nvfp4, given as numbers from 0 to 15, as fp32 divided by 2^14: shifted into a half they lack 14 of its
    exponent bias.
    """
    w = n.to(tl.int16)
    return (((w & 8) << 12) | ((w & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_floats(w):
    """The eight nibbles of a word as `e2m1`: the low one of each byte, then the high ones."""
    low = ()
    high = ()
    for i in tl.static_range(4):
        b = byte(w, i)
        low = low + (e2m1(b & 15),)
        high = high + (e2m1(b >> 4),)
    return low + high
