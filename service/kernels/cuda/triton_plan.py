"""The plan of a step as the sampling kernels read it, and the bits of 16-bit scores as floats and as ranks."""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of a plan [PLAN_ROWS, batch] int32: the inputs of a step per sequence. engine/device_plan writes them.
TOKEN: tl.constexpr = tl.constexpr(0)  # the token to feed; -1: what row SOURCE of the step before chose
SOURCE: tl.constexpr = tl.constexpr(1)
POSITION: tl.constexpr = tl.constexpr(2)
MODE: tl.constexpr = tl.constexpr(3)  # 0: greedy; 1: draw from all; 2: draw after top_k, top_p, min_p
LIMIT: tl.constexpr = tl.constexpr(4)  # only ids below it may be chosen
TOP_K: tl.constexpr = tl.constexpr(5)  # at most LIMIT
TEMPERATURE: tl.constexpr = tl.constexpr(6)  # this and the next three are fp32
TOP_P: tl.constexpr = tl.constexpr(7)
MIN_P: tl.constexpr = tl.constexpr(8)
UNIFORM: tl.constexpr = tl.constexpr(9)  # the draw in [0, 1): this plus a smaller number
FLAGS: tl.constexpr = tl.constexpr(11)  # bits: see below
SLOT: tl.constexpr = tl.constexpr(12)  # the row of the sequence in `written` and `bias`
PRESENCE: tl.constexpr = tl.constexpr(13)  # this and the next two are fp32
FREQUENCY: tl.constexpr = tl.constexpr(14)
REPETITION: tl.constexpr = tl.constexpr(15)
DRAFTED: tl.constexpr = tl.constexpr(16)  # tokens of this row and up to its own are written too (drafts); or batch
TOP: tl.constexpr = tl.constexpr(17)  # log-probabilities of how many likeliest tokens; -1: of none, nor of the chosen
NEW: tl.constexpr = tl.constexpr(18)  # NEWEST rows: tokens to count before the choice, or -1
NEWEST: tl.constexpr = tl.constexpr(8)
# Bits of FLAGS.
PENALIZED: tl.constexpr = tl.constexpr(1)
BIASED: tl.constexpr = tl.constexpr(2)
MASKED: tl.constexpr = tl.constexpr(4)
ADJUSTING: tl.constexpr = tl.constexpr(7)  # any of those: the choice is made from fp32 scores
CHAINED: tl.constexpr = tl.constexpr(8)  # count the token that row SOURCE of the step before chose
VALUES: tl.constexpr = tl.constexpr(65536)
# Sums of shares per rank are whole numbers of this part of the largest share: their order does not matter then.
MASS_UNIT: tl.constexpr = tl.constexpr(17592186044416.0)  # 2**44


@triton.jit
def planned(plan, row: tl.constexpr, b, batch):
    """An integer of the plan."""
    return tl.load(plan + row * batch + b)


@triton.jit
def planned_float(plan, row: tl.constexpr, b, batch):
    """A float of the plan."""
    return tl.load(plan + row * batch + b).to(tl.float32, bitcast=True)


@triton.jit
def floats_of(bits, HALF: tl.constexpr):
    """16-bit floats given as integers, as fp32."""
    if HALF == "bf16":
        x = (bits << 16).to(tl.float32, bitcast=True)
    else:
        x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def ranks_of(bits):
    """The bits of 16-bit floats as numbers from 0 to 65,535 in the order of the floats."""
    u = bits & 0xFFFF
    return tl.where(u >= 0x8000, 0xFFFF - u, u + 0x8000)


@triton.jit
def bits_of(rank):
    """The inverse of `ranks_of`."""
    return tl.where(rank >= 0x8000, rank - 0x8000, 0xFFFF - rank)
