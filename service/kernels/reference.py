"""Every operation in plain torch: the truth that faster kernels are tested against, and the path that works everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# fp32 elements of a widened weight tile: 1 MiB stays in a core's L2, where the product reads it back.
TILE_ELEMENTS = 1 << 18


class ReferenceKernels:
    """Activations and sums in `activation` (fp32 on CPU); weights in any floating type, never widened as a whole."""

    name = "reference"

    def __init__(self, activation: torch.dtype = torch.float32) -> None:
        self.activation = activation
        self.reason = "plain torch"

    def embed(self, ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [tokens] int64 of `table` [vocab, hidden] into `out` [tokens, hidden]."""
        return out.copy_(table[ids])

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [tokens, rows] = x [tokens, cols] @ weight [rows, cols]^T."""
        if weight.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        step = max(1, TILE_ELEMENTS // weight.shape[1])
        for row in range(0, weight.shape[0], step):
            out[:, row : row + step] = x @ weight[row : row + step].to(x.dtype).t()
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
        """out = x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and Sennrich 2019)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return out.copy_(wide.mul(scale).mul_(weight))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in place (Su et al. 2021, halves paired as in Qwen): x [tokens, heads, dim]; cos, sin [tokens, dim/2] fp32."""
        half = cos.shape[-1]
        low, high = x[..., :half], x[..., half : 2 * half]
        cos, sin = cos[:, None], sin[:, None]
        turned = (low * cos - high * sin, high * cos + low * sin)
        low.copy_(turned[0])
        high.copy_(turned[1])
        return x

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        """Causal grouped-query attention, scale dim^-0.5.

        q [tokens, heads, dim] at positions start..; k, v [kv_heads, start + tokens, dim]; out [tokens, heads, dim].
        """
        tokens, heads, dim = q.shape
        kv_heads, length, _ = k.shape
        group = heads // kv_heads
        grouped = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, dim)
        scores = torch.bmm(grouped.float(), k.float().transpose(1, 2)).mul_(dim**-0.5)
        if tokens > 1:
            visible = causal_mask(tokens, length, q.device).repeat(group, 1)
            scores.masked_fill_(~visible, float("-inf"))
        mixed = torch.bmm(scores.softmax(-1), v.float())
        return out.copy_(mixed.view(kv_heads, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [tokens, width] = silu(gate) * up with gate_up [tokens, 2 * width] (Shazeer 2020, SwiGLU)."""
        gate, up = gate_up.chunk(2, -1)
        return torch.mul(F.silu(gate), up, out=out)


def causal_mask(tokens: int, length: int, device: torch.device) -> torch.Tensor:
    """Bool [tokens, length]: the last `tokens` of `length` positions see themselves and what came before."""
    return torch.ones(tokens, length, dtype=torch.bool, device=device).tril_(length - tokens)
