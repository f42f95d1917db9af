"""The gated delta rule on CUDA for a few rows of one sequence, with a stored state after each of them (see
triton_delta).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_delta import advanced, gated_answer, gates_of, row_of
from .triton_primitives import early


@triton.jit(do_not_specialize=["count"])
def verify_states(
    seen, rates, decay, bias, states, source, target, answers, count,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, BE: tl.constexpr,
    FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like `step_states` for the rows of one sequence in order, from the state of slot source[0]. The state after row i
    goes to slot target[i]. answers fp32 [count, H R E]: for `gate_answers`.

    Grid (blocks of BE values, H * R): a warp holds enough of a head's state that it need not wait for others. It loads
    the next row while it works on one.
    """
    j = tl.program_id(1)
    d = tl.arange(0, DP)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = (d < D)[:, None] & (e < E)[None, :]
    at = j * (D * E) + d[:, None] * E + e[None, :]
    # No other kernel of a pass writes states.
    s = tl.load(states + tl.load(source) * (H * R * D * E) + at, mask=inside, other=0.0)
    slot = tl.load(target)
    early(PDL)
    b = slot * 0
    g, beta, q, k, v = row_of(seen, rates, decay, bias, b, j, e, j >= 0, H, R, D, E, DP, FUSED)
    for _row in range(count):
        more = b + 1 < count
        next_slot = tl.load(target + b + 1, mask=more, other=0)
        next_g, next_beta, next_q, next_k, next_v = row_of(
            seen, rates, decay, bias, b + 1, j, e, more, H, R, D, E, DP, FUSED
        )
        s, y = advanced(s, g, beta, q, k, v, D)
        tl.store(states + slot * (H * R * D * E) + at, s, inside)
        tl.store(answers + b * (H * R * E) + j * E + e, y, e < E)
        slot = next_slot
        g, beta, q, k, v = next_g, next_beta, next_q, next_k, next_v
        b += 1


@triton.jit
def gate_answers(
    answers, projected, norm, eps, out,
    WIDTH: tl.constexpr, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    FUSED: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, H R E]: the answers of `verify_states`, normed per head and gated. Grid (T, H * R)."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    e = tl.arange(0, EP)
    weight = tl.load(norm + e, mask=e < E, other=0.0)
    at = b * (H * R * E) + j * E + e
    early(PDL)
    y = tl.load(answers + at, mask=e < E, other=0.0)
    z = gates_of(projected, b, j, e, WIDTH, H, R, D, E, FUSED)
    y = gated_answer(y, z, weight, eps, E, SIGMOID)
    tl.store(out + at, y.to(out.dtype.element_ty), e < E)
