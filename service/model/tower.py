"""Vision towers: from one picture's patches to rows of the decoder. The families differ in their config; qwen2_5_vl
also differs in its parts.

Sources: the Qwen2.5-VL and Qwen3-VL reports (2025) and transformers' configurations. Attention never makes a patches x
patches matrix (torch's fused attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ..kernels.reference import ReferenceKernels
from ..memory.lease import Lease, carved_bytes
from ..quant.weight import Weight
from .named import NamedWeights
from .spec import FLOATING, Destination, Source
from .tower_layout import PatchLayout, Segments, lay_out, position_weights
from .vision_config import CHANNELS, NORM_EPS, TowerShape

# Rows per step of operations that can be split: this bounds their intermediate values.
ROWS = 1024
# Heads times patches per attention call: this bounds the time until a cancellation is seen.
HEAD_ROWS = 1 << 16

Check = Callable[[], None]
Seen = Callable[[str, torch.Tensor], None]


class Patches(Protocol):
    """A picture as a tower reads it: patch vectors fp32 [rows, patch_width] of the block rows first..last - 1."""

    @property
    def grid(self) -> tuple[int, int]: ...

    def patches(self, first: int = 0, last: int | None = None) -> torch.Tensor: ...


def destinations(shape: TowerShape) -> Iterator[Destination]:
    """Every tensor of a tower, without a name prefix, in order of use; none is quantized unless it is stored
    quantized.
    """
    d, last = shape.hidden, shape.depth + 1
    stored = (d, CHANNELS, shape.frames, shape.patch, shape.patch)
    patch = Source("patch_embed.proj.weight", (d, shape.patch_width), stored)
    yield Destination("patch", (patch,), 1, bits=FLOATING)
    if not shape.gated:
        yield _vector("patch_bias", "patch_embed.proj.bias", d, 1)
    if shape.side:
        yield Destination("positions", (Source("pos_embed.weight", (shape.side**2, d)),), 1, bits=FLOATING)
    for block in range(shape.depth):
        yield from _block(shape, block)
        if block in shape.taps:
            index = shape.taps.index(block)
            yield from _merger(shape, f"tap{index}", f"deepstack_merger_list.{index}", shape.merged, block + 1)
    yield from _merger(shape, "merger", "merger", d, last)


def _block(shape: TowerShape, block: int) -> Iterator[Destination]:
    d, m, part, key, name = shape.hidden, shape.intermediate, block + 1, f"{block}.", f"blocks.{block}."
    for norm in ("norm1", "norm2"):
        yield _vector(key + norm, f"{name}{norm}.weight", d, part)
        if not shape.gated:
            yield _vector(f"{key}{norm}_bias", f"{name}{norm}.bias", d, part)
    linears = [("qkv", "attn.qkv", 3 * d, d), ("proj", "attn.proj", d, d)]
    if shape.gated:
        linears += [("gate", "mlp.gate_proj", m, d), ("up", "mlp.up_proj", m, d), ("fc2", "mlp.down_proj", d, m)]
    else:
        linears += [("fc1", "mlp.linear_fc1", m, d), ("fc2", "mlp.linear_fc2", d, m)]
    for which, stored, rows, columns in linears:
        yield from _linear(key + which, name + stored, rows, columns, part)


def _merger(shape: TowerShape, key: str, name: str, normed: int, part: int) -> Iterator[Destination]:
    norm, first, second = ("ln_q", "mlp.0", "mlp.2") if shape.gated else ("norm", "linear_fc1", "linear_fc2")
    yield _vector(f"{key}.norm", f"{name}.{norm}.weight", normed, part)
    if not shape.gated:
        yield _vector(f"{key}.norm_bias", f"{name}.{norm}.bias", normed, part)
    yield from _linear(f"{key}.fc1", f"{name}.{first}", shape.merged, shape.merged, part)
    yield from _linear(f"{key}.fc2", f"{name}.{second}", shape.out, shape.merged, part)


def _linear(key: str, name: str, rows: int, columns: int, part: int) -> Iterator[Destination]:
    yield Destination(key, (Source(f"{name}.weight", (rows, columns)),), part, bits=FLOATING)
    yield _vector(f"{key}_bias", f"{name}.bias", rows, part)


def _vector(key: str, name: str, width: int, part: int) -> Destination:
    return Destination(key, (Source(name, (width,)),), part)


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x weight^T + bias; weight [rows, columns], bias [rows]."""

    weight: Weight
    bias: torch.Tensor | None

    @classmethod
    def named(cls, at: NamedWeights, key: str) -> Linear:
        return cls(at[key], at.plain(f"{key}_bias"))

    def run(self, x: torch.Tensor, kernels: ReferenceKernels, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self.weight.shape[0])) if out is None else out
        kernels.linear(x, self.weight, out)
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm, or an RMS norm where there is no bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def named(cls, at: NamedWeights, key: str, *, biased: bool) -> Norm:
        return cls(at.plain(key), at.plain(f"{key}_bias") if biased else None)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), NORM_EPS)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return self.weight.to(x.dtype) * scaled.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Merger:
    """merge x merge patches to one row of the decoder: norm (per patch, or with `after` over all together), fc1, GELU,
    fc2.
    """

    norm: Norm
    fc1: Linear
    fc2: Linear
    merged: int
    after: bool

    def run(self, x: torch.Tensor, kernels: ReferenceKernels, out: torch.Tensor) -> None:
        """x [patches, hidden] in merge order into out [patches / merge^2, out]."""
        rows = self.norm.run(x.view(-1, self.merged)) if self.after else self.norm.run(x).view(-1, self.merged)
        self.fc2.run(F.gelu(self.fc1.run(rows, kernels)), kernels, out)


@dataclass(frozen=True, slots=True)
class TowerBlock:
    """Attention and feed-forward, each after its norm. fc1: one product and tanh GELU, or two (gate, up) and SiLU."""

    norm1: Norm
    norm2: Norm
    qkv: Linear
    proj: Linear
    fc1: tuple[Linear, ...]
    fc2: Linear

    def forward(self, x: torch.Tensor, kernels: ReferenceKernels) -> None:
        """x [rows, hidden] += its feed-forward."""
        normed = self.norm2.run(x)
        first = self.fc1[0].run(normed, kernels)
        inner = (
            F.silu(first).mul_(self.fc1[1].run(normed, kernels))
            if len(self.fc1) > 1
            else F.gelu(first, approximate="tanh")
        )
        x.add_(self.fc2.run(inner, kernels))


class TowerScratch:
    """The buffers of one picture: x and mixed [patches, hidden], qkv [patches, 3 * hidden], cos and sin [patches,
    head_dim / 2].
    """

    def __init__(self, lease: Lease, shape: TowerShape, patches: int, dtype: torch.dtype) -> None:
        self.x, self.mixed, self.qkv = (lease.carve(size, dtype) for size in _sizes(shape, patches))
        self.cos, self.sin = (lease.carve((patches, shape.head_dim // 2), torch.float32) for _ in range(2))

    @staticmethod
    def nbytes(shape: TowerShape, patches: int, dtype: torch.dtype) -> int:
        """Bytes of the buffers, alignment included."""
        angles = 2 * carved_bytes((patches, shape.head_dim // 2), torch.float32)
        return sum(carved_bytes(size, dtype) for size in _sizes(shape, patches)) + angles


def _sizes(shape: TowerShape, patches: int) -> tuple[tuple[int, int], ...]:
    return (patches, shape.hidden), (patches, shape.hidden), (patches, 3 * shape.hidden)


@dataclass(frozen=True, slots=True)
class Tower:
    """The network over its weights. `run` reads one picture, or one pair of frames, at a time."""

    shape: TowerShape
    kernels: ReferenceKernels
    patch: Linear
    positions: torch.Tensor | None
    blocks: tuple[TowerBlock, ...]
    taps: tuple[Merger, ...]
    merger: Merger

    def run(
        self, picture: Patches, scratch: TowerScratch, out: torch.Tensor, check: Check, seen: Seen | None = None
    ) -> None:
        """The picture into out [1 + taps, rows of the decoder, out]: the rows of its tokens, then what each tap adds.

        `check` is called within every block and may raise to stop. `seen` gets the state after each stage by name.
        """
        try:
            self._run(picture, scratch, out, check, seen)
        finally:
            self.kernels.forget_calls()  # their operands would hold this picture's scratch

    def _run(self, picture: Patches, scratch: TowerScratch, out: torch.Tensor, check: Check, seen: Seen | None) -> None:
        layout = lay_out(self.shape, picture.grid)
        x = scratch.x
        self._embed(picture, layout, x, check)
        for target, angles in zip((scratch.cos, scratch.sin), layout.angles(self.shape.head_dim), strict=True):
            target.copy_(angles)
        _tell(seen, "patches", x)
        for index, block in enumerate(self.blocks):
            windowed = self.shape.window and index not in self.shape.full
            self._attend(block, scratch, layout.windows if windowed else layout.frame, check)
            for rows in _slices(x.shape[0], ROWS):
                check()
                block.forward(x[rows], self.kernels)
            _tell(seen, f"block {index}", x)
            if index in self.shape.taps:
                tap = self.shape.taps.index(index)
                self._merge(self.taps[tap], x, out[1 + tap], check)
        self._merge(self.merger, x, out[0], check)
        if layout.order is not None:
            out[0].index_copy_(0, layout.order.to(out.device), out[0].clone())

    def _embed(self, picture: Patches, layout: PatchLayout, x: torch.Tensor, check: Check) -> None:
        """Patch vectors times the patch weight, plus learned positions; a few block rows at a time."""
        shape, (height, width) = self.shape, picture.grid
        merge, start = shape.merge, 0
        each = max(1, ROWS // (merge * width))
        for first in range(0, height // merge, each):
            check()
            vectors = picture.patches(first, min(first + each, height // merge)).to(x.device, x.dtype)
            self.patch.run(vectors, self.kernels, x[start : start + vectors.shape[0]])
            start += vectors.shape[0]
        if layout.order is not None:
            x.view(-1, merge * merge * shape.hidden).copy_(
                x.view(-1, merge * merge * shape.hidden)[layout.order.to(x.device)]
            )
        if self.positions is None:
            return
        indices, weights = (part.to(x.device) for part in position_weights(shape, picture.grid, layout))
        for rows in _slices(x.shape[0], ROWS):
            check()
            found = self.positions[indices[rows]].float().mul_(weights[rows, :, None]).sum(1)
            x[rows].add_(found.to(x.dtype))

    def _attend(self, block: TowerBlock, scratch: TowerScratch, segments: Segments, check: Check) -> None:
        shape, x, qkv, mixed = self.shape, scratch.x, scratch.qkv, scratch.mixed
        for rows in _slices(x.shape[0], ROWS):
            check()
            block.qkv.run(block.norm1.run(x[rows]), self.kernels, qkv[rows])
            turn(qkv[rows].view(-1, 3, shape.heads, shape.head_dim)[:, :2], scratch.cos[rows], scratch.sin[rows])
        for first, count, length in segments.runs:
            part = slice(first, first + count * length)
            held = qkv[part].view(count, length, 3, shape.heads, shape.head_dim).permute(2, 0, 3, 1, 4)
            target = mixed[part].view(count, length, shape.heads, shape.head_dim).transpose(1, 2)
            for heads in _slices(shape.heads, max(1, HEAD_ROWS // (count * length))):
                check()
                q, k, v = held[:, :, heads]
                target[:, heads].copy_(F.scaled_dot_product_attention(q, k, v))
        for rows in _slices(x.shape[0], ROWS):
            check()
            x[rows].add_(block.proj.run(mixed[rows], self.kernels))

    def _merge(self, merger: Merger, x: torch.Tensor, out: torch.Tensor, check: Check) -> None:
        unit = self.shape.merge**2
        for rows in _slices(out.shape[0], max(1, ROWS // unit)):
            check()
            merger.run(x[rows.start * unit : rows.stop * unit], self.kernels, out[rows])


def build(shape: TowerShape, weights: Mapping[str, Weight], kernels: ReferenceKernels) -> Tower:
    """The tower over weights by the keys of `destinations`."""
    named, biased = NamedWeights(weights, {}), not shape.gated
    first = ("gate", "up") if shape.gated else ("fc1",)

    def merger(key: str, *, after: bool) -> Merger:
        norm = Norm.named(named, f"{key}.norm", biased=biased)
        return Merger(norm, Linear.named(named, f"{key}.fc1"), Linear.named(named, f"{key}.fc2"), shape.merged, after)

    def block(index: int) -> TowerBlock:
        at = named.of(index)
        norm1, norm2 = (Norm.named(at, norm, biased=biased) for norm in ("norm1", "norm2"))
        qkv, proj, fc2 = (Linear.named(at, key) for key in ("qkv", "proj", "fc2"))
        return TowerBlock(norm1, norm2, qkv, proj, tuple(Linear.named(at, key) for key in first), fc2)

    patch = Linear(named["patch"], named.plain("patch_bias") if biased else None)
    taps = tuple(merger(f"tap{index}", after=True) for index in range(len(shape.taps)))
    positions = named.plain("positions") if shape.side else None
    blocks = tuple(block(index) for index in range(shape.depth))
    return Tower(shape, kernels, patch, positions, blocks, taps, merger("merger", after=False))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary embedding in place, in fp32: x [rows, kinds, heads, dim], halves of a head against each other; cos, sin
    [rows, dim / 2].
    """
    half = cos.shape[-1]
    low, high = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = (low * cos - high * sin, high * cos + low * sin)
    x[..., :half].copy_(turned[0])
    x[..., half:].copy_(turned[1])


def _slices(count: int, step: int) -> Iterator[slice]:
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _tell(seen: Seen | None, name: str, state: torch.Tensor) -> None:
    if seen is not None:
        seen(name, state)
