"""The demo painter's network: the Flux architecture (joint text and picture attention, then single-stream blocks) in
plain torch.

Tensor names and layout are those that ComfyUI's UNETLoader detects: no vector_in, no guidance_in (so it samples with
shift 1). Text tokens carry no position; what their order means must already be in the writer's hidden states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

HEAD = 128
AXES = (16, 56, 56)  # rotary dimensions of (picture index, row, column)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the network; hidden must be a multiple of 128."""

    hidden: int = 256
    double: int = 1
    single: int = 4
    context: int = 512
    channels: int = 16


def time_embedding(t: torch.Tensor) -> torch.Tensor:
    """t [B] in 0..1 -> [B, 256]: cosines, then sines, of 1000 t at frequencies from 1 to 1/10000."""
    frequency = torch.exp(-math.log(10000) * torch.arange(128, device=t.device, dtype=torch.float32) / 128)
    angle = 1000 * t.float()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), -1)


def positions(text: int, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [text + rows * columns, 64] of the rotary embedding; text tokens stand at the origin."""
    ids = torch.zeros(text + rows * columns, 3, device=device)
    ids[text:, 1] = torch.arange(rows, device=device).repeat_interleave(columns).float()
    ids[text:, 2] = torch.arange(columns, device=device).repeat(rows).float()
    angles = []
    for axis, size in enumerate(AXES):
        frequency = 10000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angles.append(ids[:, axis, None] * frequency)
    angle = torch.cat(angles, -1)
    return angle.cos(), angle.sin()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the last axis."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Rms(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class QkNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = Rms(HEAD), Rms(HEAD)


def _heads(qkv: torch.Tensor, norm: QkNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    return norm.query_norm(q), norm.key_norm(k), v


Turn = tuple[torch.Tensor, torch.Tensor]  # cosine and sine of the rotary embedding


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, turn: Turn, mask: torch.Tensor | None) -> torch.Tensor:
    q, k = _turn(q, *turn), _turn(k, *turn)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def _plain_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Mlp(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden))


class Modulation(nn.Module):
    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.lin, self.parts = nn.Linear(hidden, parts * hidden), parts

    def forward(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.lin(F.silu(vector))[:, None].chunk(self.parts, -1)


class StreamAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.norm, self.proj = nn.Linear(hidden, 3 * hidden), QkNorm(), nn.Linear(hidden, hidden)


class DoubleBlock(nn.Module):
    """Picture and text with weights of their own, one attention over both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(hidden, 6), Modulation(hidden, 6)
        self.img_attn, self.txt_attn = StreamAttention(hidden), StreamAttention(hidden)
        self.img_mlp, self.txt_mlp = Mlp(hidden), Mlp(hidden)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, vector: torch.Tensor, turn: Turn, mask: torch.Tensor | None
    ) -> tuple:
        text = txt.shape[1]
        im, tm = self.img_mod(vector), self.txt_mod(vector)
        q, k, v = _heads(self.img_attn.qkv(_plain_norm(img) * (1 + im[1]) + im[0]), self.img_attn.norm)
        tq, tk, tv = _heads(self.txt_attn.qkv(_plain_norm(txt) * (1 + tm[1]) + tm[0]), self.txt_attn.norm)
        out = _attend(torch.cat((tq, q), 2), torch.cat((tk, k), 2), torch.cat((tv, v), 2), turn, mask)
        img = img + im[2] * self.img_attn.proj(out[:, text:])
        img = img + im[5] * self.img_mlp(_plain_norm(img) * (1 + im[4]) + im[3])
        txt = txt + tm[2] * self.txt_attn.proj(out[:, :text])
        return img, txt + tm[5] * self.txt_mlp(_plain_norm(txt) * (1 + tm[4]) + tm[3])


class SingleBlock(nn.Module):
    """Attention and MLP side by side over text and picture together."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(hidden, 7 * hidden), nn.Linear(5 * hidden, hidden)
        self.norm, self.modulation = QkNorm(), Modulation(hidden, 3)

    def forward(self, x: torch.Tensor, vector: torch.Tensor, turn: Turn, mask: torch.Tensor | None) -> torch.Tensor:
        shift, scale, gate = self.modulation(vector)
        hidden = x.shape[-1]
        qkv, inner = self.linear1(_plain_norm(x) * (1 + scale) + shift).split((3 * hidden, 4 * hidden), -1)
        out = _attend(*_heads(qkv, self.norm), turn, mask)
        return x + gate * self.linear2(torch.cat((out, F.gelu(inner, approximate="tanh")), -1))


class TimeIn(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(256, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Final(nn.Module):
    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(vector)[:, None].chunk(2, -1)
        return self.linear(_plain_norm(x) * (1 + scale) + shift)


class Painter(nn.Module):
    """Velocity of the flow from picture to noise."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.img_in, self.txt_in = nn.Linear(4 * shape.channels, hidden), nn.Linear(shape.context, hidden)
        self.time_in = TimeIn(hidden)
        self.double_blocks = nn.ModuleList(DoubleBlock(hidden) for _ in range(shape.double))
        self.single_blocks = nn.ModuleList(SingleBlock(hidden) for _ in range(shape.single))
        self.final_layer = Final(hidden, 4 * shape.channels)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.xavier_uniform_(weight)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        for name, module in self.named_modules():  # every block starts as the identity
            if name.endswith((".lin", "adaLN_modulation.1", "final_layer.linear")) and isinstance(module, nn.Linear):
                nn.init.zeros_(module.weight)

    def forward(
        self, latents: torch.Tensor, time: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """latents [B, 16, H, W], time [B] in 0..1, text [B, T, context], mask [B, T] true where a token is ->
        velocity like latents.
        """
        batch, channels, high, wide = latents.shape
        rows, columns = high // 2, wide // 2
        img = (
            latents.view(batch, channels, rows, 2, columns, 2)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(batch, rows * columns, 4 * channels)
        )
        vector = self.time_in(time_embedding(time))
        img, txt = self.img_in(img), self.txt_in(text)
        turn = positions(text.shape[1], rows, columns, latents.device)
        allowed = None
        if mask is not None:
            allowed = F.pad(mask, (0, rows * columns), value=True)[:, None, None, :].expand(
                -1, -1, turn[0].shape[0], -1
            )
        for block in self.double_blocks:
            img, txt = block(img, txt, vector, turn, allowed)
        x = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            x = block(x, vector, turn, allowed)
        out = self.final_layer(x[:, txt.shape[1] :], vector)
        return (
            out.view(batch, rows, columns, channels, 2, 2)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(batch, channels, high, wide)
        )


def save_painter(
    weights: dict[str, torch.Tensor], mean: torch.Tensor, std: torch.Tensor, path: Path, note: dict[str, str]
) -> None:
    """One FP16 file for UNETLoader. Training sees (text - mean) / std; the file takes the raw states, so txt_in
    absorbs both.
    """
    out = {k: v.detach().float().cpu() for k, v in weights.items()}
    mean, std = mean.float().cpu(), std.float().cpu()
    scaled = out["txt_in.weight"] / std
    out["txt_in.bias"] = out["txt_in.bias"] - scaled @ mean
    out["txt_in.weight"] = scaled
    save_file({k: v.to(torch.float16).contiguous() for k, v in out.items()}, path, metadata={"format": "pt", **note})


def resume(painter: Painter, path: Path, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Load a saved file into a network that sees (text - mean) / std."""
    weights = {k: v.float() for k, v in load_file(path).items()}
    raw = weights["txt_in.weight"]
    weights["txt_in.bias"] = weights["txt_in.bias"] + raw @ mean.float().cpu()
    weights["txt_in.weight"] = raw * std.float().cpu()
    painter.load_state_dict(weights)


def load_painter(path: Path, device: str) -> Painter:
    """The network of a saved file, float32; it takes the writer's raw hidden states."""
    weights = {k: v.float() for k, v in load_file(path).items()}
    counts = {
        kind: 1 + max(int(k.split(".")[1]) for k in weights if k.startswith(kind))
        for kind in ("double_blocks", "single_blocks")
    }
    hidden, context = weights["txt_in.weight"].shape
    painter = Painter(
        Shape(hidden, counts["double_blocks"], counts["single_blocks"], context, weights["img_in.weight"].shape[1] // 4)
    )
    painter.load_state_dict(weights)
    return painter.to(device).eval()


@torch.no_grad()
def sample(
    painter: Painter, text: torch.Tensor, mask: torch.Tensor | None, seeds: list[int], steps: int
) -> torch.Tensor:
    """Euler steps at even times from noise (CPU generator, as ComfyUI draws it) to latents [B, 16, 16, 16]."""
    noise = [torch.randn((1, 16, 16, 16), generator=torch.Generator().manual_seed(s)) for s in seeds]
    x = torch.cat(noise).to(text.device)
    for step in range(steps):
        now, later = 1 - step / steps, 1 - (step + 1) / steps
        velocity = painter(x, torch.full((len(x),), now, device=x.device), text, mask)
        x = x + (later - now) * velocity.float()
    return x
