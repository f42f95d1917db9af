"""The gated delta rule in plain torch: whole chunks at once for prompts, one step for decode. All numbers are fp32.

A head's state S [key_dim, value_dim] takes a token in by S <- e^g S; S <- S + k (beta (v - S^T k))^T, and answers with S^T q (Yang et al.
2024, "Gated Delta Networks"). Shapes: T tokens or B rows, H key heads, R value heads that share one, D and E the widths of key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from .forward_batch import NormWeight, Slots

# Tokens that are solved for at once: the triangular system is quadratic in it, what is done per chunk shrinks with it.
CHUNK = 64
UNIT_EPS = 1e-6


@dataclass(slots=True)
class DeltaHeads:
    """What a gated delta net has between its projections.

    taps fp32 [K, channels]; decay (negative) and bias fp32 [H, R]; norm of the answers [E], and what their gates go through. `fused`: a
    projected row has for each key head its queries, keys, values and gates, and of the rates beta and speed; else all heads of each.
    """

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    fused: bool
    gate: Literal["silu", "sigmoid"]
    taps: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    norm: NormWeight

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.key_heads * self.group * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution sees: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(slots=True)
class DeltaStep:
    """Decode of B rows: projected [B, channels + values] and rates [B, 2 * H * R] give out [B, H * R * E].

    windows [slots, K - 1, channels] and states [slots, H, R, D, E] fp32 are read and written where `slots` says. `trail`: see Rows.
    """

    projected: torch.Tensor
    rates: torch.Tensor
    windows: torch.Tensor
    states: torch.Tensor
    slots: Slots
    out: torch.Tensor
    trail: bool = False


def unit(x: torch.Tensor) -> torch.Tensor:
    """x scaled to length 1 over its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def convolve_chunk(x: torch.Tensor, window: torch.Tensor, taps: torch.Tensor, apart: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of the causal convolution of every channel: x [T, C] behind window [(K - 1) * apart, C], taps [K, C] so many tokens apart.

    Returns [T, C], and the window behind the chunk.
    """
    count, seen = x.shape[0], torch.cat((window, x))
    out = seen[:count] * taps[0]
    for tap in range(1, taps.shape[0]):
        out.addcmul_(seen[tap * apart : tap * apart + count], taps[tap])
    return F.silu(out, inplace=True), seen[count:]


def convolve_step(x: torch.Tensor, windows: torch.Tensor, taps: torch.Tensor, apart: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """As convolve_chunk for the next token of B sequences: x [B, C], windows [B, (K - 1) * apart, C]."""
    seen = torch.cat((windows, x[:, None]), dim=1)
    return F.silu((seen[:, ::apart] * taps).sum(1), inplace=True), seen[:, 1:]


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The tokens of one sequence, time linear in T: q, k [T, H, D], v [T, H, R, E], decay (g) and beta [T, H, R].

    state [H, R, D, E] is changed in place; returns [T, H, R, E]. Within a chunk the corrections d_t = beta_t (v_t - S_t^T k_t) depend on
    earlier ones of the chunk only through a triangular system, which is solved for all tokens of a chunk together.
    """
    out = torch.empty_like(v)
    for first in range(0, q.shape[0], CHUNK):
        piece = slice(first, first + CHUNK)
        queries, keys = (x[piece].transpose(0, 1)[:, None] for x in (q, k))  # [H, 1, C, D]
        values, rate = v[piece].permute(1, 2, 0, 3), beta[piece].permute(1, 2, 0)[..., None]
        total = decay[piece].cumsum(0).permute(1, 2, 0)
        count = total.shape[-1]
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        left = (total[..., :, None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()  # what is left of s at t
        since = total.exp()[..., None]
        system = (keys @ keys.transpose(-1, -2)) * left * rate
        wanted = rate * (values - since * (keys @ state))
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        answers = since * (queries @ state) + ((queries @ keys.transpose(-1, -2)) * left) @ corrections
        out[piece] = answers.permute(2, 0, 1, 3)
        last = total[..., -1:]
        kept = keys * (last - total).exp()[..., None]
        state.mul_(last.exp()[..., None]).add_(kept.transpose(-1, -2) @ corrections)
    return out


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """The next token of B sequences: q, k [B, H, D], v [B, H, R, E], decay (g) and beta [B, H, R].

    states [B, H, R, D, E] are changed in place; returns [B, H, R, E].
    """
    keys = k[:, :, None]
    states.mul_(decay.exp()[..., None, None])
    recalled = (keys[..., None, :] @ states)[..., 0, :]
    corrections = beta[..., None] * (v - recalled)
    states.addcmul_(keys[..., :, None], corrections[..., None, :])
    return (q[:, :, None, None, :] @ states)[..., 0, :]
