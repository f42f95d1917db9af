"""The gated delta rule in plain torch: whole chunks at once for prompts, one step for decode. All numbers are fp32.

The state S [key_dim, value_dim] of a head takes in a token by S <- e^g S; S <- S + k (beta (v - S^T k))^T, and answers
with S^T q (Yang et al. 2024, "Gated Delta Networks"). Shapes: T tokens or B rows, H key heads, R value heads per key
head, D and E the widths of key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from .forward_batch import NormWeight, Slots

# Tokens solved together. The triangular system grows with its square, the work per chunk shrinks with it.
CHUNK = 64
UNIT_EPS = 1e-6


@dataclass(slots=True)
class DeltaHeads:
    """What a gated delta net has between its projections.

    taps fp32 [K, channels]; decay (negative) and bias fp32 [H, R]; norm of the answers [E], and the activation of their
    gates. `fused`: a projected row holds queries, keys, values and gates per key head, and the rates beta and speed per
    key head. Otherwise it holds all heads of each in turn.
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
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(slots=True)
class DeltaOperands:
    """Decode of B rows: projected [B, channels + values] and rates [B, 2 * H * R] give out [B, H * R * E].

    windows [slots, K - 1, channels] and states [slots, H, R, D, E], fp32, are read and written where `slots` says.
    `verify`: see VerifyPass.
    """

    projected: torch.Tensor
    rates: torch.Tensor
    windows: torch.Tensor
    states: torch.Tensor
    slots: Slots
    out: torch.Tensor
    verify: bool = False


def unit(x: torch.Tensor) -> torch.Tensor:
    """x scaled to length 1 over its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def convolve_chunk(
    x: torch.Tensor, window: torch.Tensor, taps: torch.Tensor, apart: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of the causal convolution of every channel: x [T, C] after window [(K - 1) * apart, C], taps [K, C] `apart`
    tokens apart.

    Returns [T, C] and the window after the chunk.
    """
    count, seen = x.shape[0], torch.cat((window, x))
    out = seen[:count] * taps[0]
    for tap in range(1, taps.shape[0]):
        out.addcmul_(seen[tap * apart : tap * apart + count], taps[tap])
    return F.silu(out, inplace=True), seen[count:]


def convolve_step(
    x: torch.Tensor, windows: torch.Tensor, taps: torch.Tensor, apart: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like convolve_chunk for the next token of B sequences: x [B, C], windows [B, (K - 1) * apart, C]."""
    seen = torch.cat((windows, x[:, None]), dim=1)
    return F.silu((seen[:, ::apart] * taps).sum(1), inplace=True), seen[:, 1:]


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The tokens of one sequence in time linear in T: q, k [T, H, D], v [T, H, R, E], decay (g) and beta [T, H, R].

    Changes state [H, R, D, E] in place; returns [T, H, R, E]. Within a chunk the corrections d_t = beta_t (v_t - S_t^T
    k_t) depend on earlier ones only through a triangular system, which is solved for all tokens of the chunk at once.
    """
    out = torch.empty_like(v)
    for first in range(0, q.shape[0], CHUNK):
        piece = slice(first, first + CHUNK)
        queries, keys = (x[piece].transpose(0, 1)[:, None] for x in (q, k))  # [H, 1, C, D]
        values, rate = v[piece].permute(1, 2, 0, 3), beta[piece].permute(1, 2, 0)[..., None]
        total = decay[piece].cumsum(0).permute(1, 2, 0)
        count = total.shape[-1]
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        left = (
            (total[..., :, None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()
        )  # share of s left at t
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

    Changes states [B, H, R, D, E] in place; returns [B, H, R, E].
    """
    keys = k[:, :, None]
    states.mul_(decay.exp()[..., None, None])
    recalled = (keys[..., None, :] @ states)[..., 0, :]
    corrections = beta[..., None] * (v - recalled)
    states.addcmul_(keys[..., :, None], corrections[..., None, :])
    return (q[:, :, None, None, :] @ states)[..., 0, :]
