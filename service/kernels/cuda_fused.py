"""Fused kernels for CUDA, written in Triton: a decode step of one row runs six of them a layer, eight where weights have few bits.

Products of one row stream the weights (triton_gemv), of up to 16 rows go through small tensor-core tiles (triton_skinny), of more rows
through cuBLAS. All run in the stream of torch, allocate nothing and look at no value, so that a CUDA graph can hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..quant.weight import Format, QuantizedWeight, Weight
from .cuda import CudaKernels
from .cuda_plan import SPLIT, TILE_ROWS, Device, Shape, gemv_plan, on_grid, shape_of, skinny_plan
from .reference import Buffer
from .rows import HeadShape, NormWeight, RotaryTable, Rows
from .triton_attend import attend_chunk, attend_step, join_splits
from .triton_gemv import gemv
from .triton_rows import embed, fixed_point, place_heads, rms_norm, silu_mul, widen
from .triton_skinny import add_parts, skinny

log = logging.getLogger(__name__)

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Elements of a quantized weight that are widened at a time for a cuBLAS product.
WIDENED = 1 << 23
# Programs that share the positions of a sequence, by the batch: so many that all processors of a large GPU have some.
SPLITS = {1: 16, 2: 16, 4: 8, 8: 8}
# Largest group of queries that share a key/value head.
GROUP = 16


@dataclass(slots=True)
class _Room:
    """The workspace: one row as fixed-point words, its scales and sums; partial sums of products; partial results of attention, their
    largest scores and sums of weights; a widened tile.
    """

    words: torch.Tensor
    sums: torch.Tensor
    products: torch.Tensor
    heads: torch.Tensor
    heads_scores: torch.Tensor
    widened: torch.Tensor


class FusedCudaKernels(CudaKernels):
    """See the module. What a shape does not suit falls back to plain torch, and the log says so once."""

    name = "cuda"

    def __init__(self, activation: torch.dtype, device: Device, *, asm: bool = True) -> None:
        """`asm` false keeps to what Triton's interpreter can run."""
        super().__init__(activation)
        self.device = device
        self.reason = f"Triton kernels in CUDA graphs, activations in {HALVES[activation]}"
        self._half = HALVES[activation]
        self._asm = asm
        self._launch = {"launch_pdl": True} if device.early else {}
        self._told: set[str] = set()
        self._shapes: dict[tuple[int, int, int, torch.dtype | Format], Shape | str] = {}
        self._room: _Room | None = None

    @classmethod
    def for_device(cls, activation: torch.dtype) -> FusedCudaKernels:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        shared = getattr(found, "shared_memory_per_block_optin", 101376)
        return cls(activation, Device(found.multi_processor_count, shared, found.major >= 9))

    def captures(self, heads: HeadShape, weights: Iterable[Weight]) -> bool:
        return self._attends(heads) and not any(isinstance(self._shape(weight), str) for weight in weights)

    @staticmethod
    def _attends(heads: HeadShape) -> bool:
        return heads.head_dim in (64, 128, 256) and heads.heads // heads.kv_heads <= GROUP

    @classmethod
    def workspace(cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int) -> tuple[Buffer, ...]:
        group = -(-heads.heads // heads.kv_heads)
        units = max(batch * splits for batch, splits in SPLITS.items()) * heads.kv_heads * _power(group)
        return (
            ((columns // 2,), torch.int32),
            ((columns // 8 + 2,), torch.float32),
            ((SPLIT * TILE_ROWS * 2 * columns,), torch.float32),
            ((units * heads.head_dim,), torch.float32),
            ((2, units), torch.float32),
            ((WIDENED + 16 * columns,), activation),
        )

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        self._room = _Room(*buffers)

    @property
    def room(self) -> _Room:
        """The workspace. ValueError before it was reserved."""
        if self._room is None:
            raise ValueError("the kernels have no workspace yet")
        return self._room

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        shape = self._shape(table)
        if isinstance(shape, str) or shape.form not in ("float", "int8"):
            return super().embed(ids, table, out)
        data, scales, _ = _tensors(table)
        groups = shape.groups if shape.form == "int8" else 0
        grid = (ids.shape[0], -(-shape.cols // 1024))
        on_grid(embed, grid)(ids, data, scales, out, COLS=shape.cols, GROUPS=groups, GROUP=shape.group, BLOCK=1024)
        return out

    def linear(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        shape = self._shape(weight)
        if isinstance(shape, str):
            return super().linear(x, weight, out)
        if x.shape[0] > TILE_ROWS:
            return self._product(x, weight, shape, out)
        return self._few(x, weight, shape, out)

    def norm_linear(self, x: torch.Tensor, norm: NormWeight, weight: Weight, out: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        shape = self._shape(weight)
        if x.shape[0] > 1 or isinstance(shape, str):
            return self.linear(self.rms_norm(x, norm, normed), weight, out)
        return self._normed_row(x, norm, weight, shape, out, gated=False)

    def linear_add(self, x: torch.Tensor, weight: Weight, residual: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        shape = self._shape(weight)
        if isinstance(shape, str):
            return super().linear_add(x, weight, residual, spare)
        if x.shape[0] > TILE_ROWS:
            if isinstance(weight, torch.Tensor):
                return torch.addmm(residual, x, weight.t(), out=residual)
            return residual.add_(self._product(x, weight, shape, spare))
        return self._few(x, weight, shape, residual, add=True)

    def norm_gate_up(
        self, x: torch.Tensor, norm: NormWeight, gate_up: Weight, out: torch.Tensor, normed: torch.Tensor, both: torch.Tensor
    ) -> torch.Tensor:
        shape = self._shape(gate_up)
        if isinstance(shape, str):
            return super().norm_gate_up(x, norm, gate_up, out, normed, both)
        if x.shape[0] == 1:
            return self._normed_row(x, norm, gate_up, shape, out, gated=True)
        self.rms_norm(x, norm, normed)
        if x.shape[0] <= TILE_ROWS:
            return self._few(normed, gate_up, shape, out, gated=True)
        return self.silu_mul(self._product(normed, gate_up, shape, both), out)

    def rms_norm(self, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or not x.is_contiguous() or not out.is_contiguous() or out.dtype != self.activation:
            return super().rms_norm(x, norm, out)
        count, cols = x.shape
        block = _power(cols)
        on_grid(rms_norm, (count,))(
            x, norm.weight, out, norm.eps, COLS=cols, BLOCK=block, PDL=self.device.early, num_warps=8, **self._launch
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        count, cols = out.shape
        on_grid(silu_mul, (count, -(-cols // 1024)))(gate_up, out, COLS=cols, BLOCK=1024)
        return out

    def attend(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        q_norm: NormWeight,
        k_norm: NormWeight,
        rotary: RotaryTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
    ) -> torch.Tensor:
        group = heads.heads // heads.kv_heads
        if not self._attends(heads) or 2 * rotary.cos.shape[1] != heads.head_dim:
            self._tell(f"attention with {group} queries of {heads.head_dim} ({2 * rotary.cos.shape[1]} rotated) to a key")
            return super().attend(qkv, heads, q_norm, k_norm, rotary, keys, values, rows, out)
        forms: dict[str, Any] = {"HEADS": heads.heads, "KV": heads.kv_heads, "D": heads.head_dim, "GP": _power(group)}
        count, tables, room = qkv.shape[0], rows.tables, self.room
        if rows.start is None:
            splits = SPLITS[_power(count)]
            on_grid(attend_step, (count, heads.kv_heads, splits))(
                qkv, q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps, rotary.cos, rotary.sin, keys, values, rows.positions, tables,
                tables.stride(0), room.heads, *room.heads_scores, out, SPLITS=splits, PDL=self.device.early, num_warps=4,
                **forms, **self._launch,
            )  # fmt: skip
            on_grid(join_splits, (count, heads.kv_heads))(
                rows.positions, room.heads, *room.heads_scores, out, SPLITS=splits, PDL=self.device.early, num_warps=4,
                **forms, **self._launch,
            )  # fmt: skip
            return out
        on_grid(place_heads, (count,))(
            qkv, q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps, rotary.cos, rotary.sin, keys, values, rows.positions, tables,
            HEADS=heads.heads, KV=heads.kv_heads, D=heads.head_dim, ROOM=_power(heads.heads + 2 * heads.kv_heads), num_warps=8,
        )  # fmt: skip
        tile = 128 if count * forms["GP"] > 64 and heads.head_dim <= 128 else 64
        grid = (-(-count * forms["GP"] // tile), heads.kv_heads)
        on_grid(attend_chunk, grid)(
            qkv,
            keys,
            values,
            tables,
            out,
            rows.start,
            count,
            BM=tile,
            BN=64 if heads.head_dim <= 128 else 32,
            STAGES=2,
            num_warps=tile // 16,
            **forms,
        )
        return out

    def _normed_row(
        self, x: torch.Tensor, norm: NormWeight, weight: Weight, shape: Shape, out: torch.Tensor, *, gated: bool
    ) -> torch.Tensor:
        """A product of one row that is normed on the way: by the kernel itself, or before it, as fixed-point numbers."""
        words = norm.weight.view(torch.int64)
        if shape.form in ("float", "fp8"):
            return self._row(x, words, weight, shape, out, normed=True, eps=norm.eps, gated=gated)
        unit_words = 8 if shape.form == "int4" else 4
        fixed, sums = self.room.words, self.room.sums
        on_grid(fixed_point, (1,))(
            x.view(torch.int64), words, fixed, sums, norm.eps, COLS=shape.cols, UNIT_WORDS=unit_words, ROOM=_power(shape.units),
            HALF=self._half, ASM=self._asm, PDL=self.device.early, num_warps=8, **self._launch,
        )  # fmt: skip
        return self._row(fixed, sums, weight, shape, out, held=True, gated=gated)

    def _few(
        self, x: torch.Tensor, weight: Weight, shape: Shape, out: torch.Tensor, *, add: bool = False, gated: bool = False
    ) -> torch.Tensor:
        """A product of 1 to TILE_ROWS rows."""
        if x.shape[0] == 1 and not gated:
            words = x.view(torch.int32 if shape.form == "float" else torch.int64)
            return self._row(words, words, weight, shape, out, add=add)
        rows = shape.rows // 2 if gated else shape.rows
        plan = skinny_plan(shape, gated, self.device)
        data, scales, offsets = _tensors(weight)
        on_grid(skinny, (-(-rows // plan.rows), plan.split))(
            x, data, scales, offsets, out, self.room.products, rows, x.shape[0],
            COLS=shape.cols, FORMAT=shape.form, HALF=self._half, GROUPS=shape.groups, GROUP=shape.group, OFFSETS=shape.offsets,
            BN=plan.rows, BK=plan.cols, SPLIT=plan.split, STAGES=plan.stages, ADD=add, GATED=gated, ASM=self._asm,
            PDL=self.device.early, num_warps=plan.warps, **self._launch,
        )  # fmt: skip
        if plan.split > 1:
            sums = on_grid(add_parts, (x.shape[0], -(-rows // 256)))
            sums(self.room.products, out, rows, SPLIT=plan.split, ADD=add, BLOCK=256, PDL=self.device.early, num_warps=2, **self._launch)
        return out

    def _row(
        self, x: torch.Tensor, norm: torch.Tensor, weight: Weight, shape: Shape, out: torch.Tensor, *,
        normed: bool = False, held: bool = False, eps: float = 0.0, add: bool = False, gated: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """A product of one row, by `gemv`."""
        plan = gemv_plan(shape, gated, self.device)
        data, scales, offsets = _tensors(weight)
        if x.dtype == self.activation:
            x = x.view(torch.int32 if shape.form == "float" else torch.int64)
        on_grid(gemv, (plan.grid,))(
            x, norm, data.view(torch.int32), scales, offsets, out, shape.rows // 2 if gated else shape.rows, eps,
            COLS=shape.cols, FORMAT=shape.form, HALF=self._half, GROUPS=shape.groups, SHARE=shape.share, OFFSETS=shape.offsets,
            BR=plan.rows, RL=plan.lanes, NB=plan.units, NORM=normed, HELD=held, ADD=add, GATED=gated, ASM=self._asm,
            PDL=self.device.early, num_warps=plan.warps, **self._launch,
        )  # fmt: skip
        return out

    def _product(self, x: torch.Tensor, weight: Weight, shape: Shape, out: torch.Tensor) -> torch.Tensor:
        """Many rows, by cuBLAS; a quantized weight is widened in tiles."""
        if isinstance(weight, torch.Tensor):
            return torch.mm(x, weight.t(), out=out)
        step = max(16, WIDENED // shape.cols)
        data, scales, offsets = _tensors(weight)
        for row in range(0, shape.rows, step):
            end = min(row + step, shape.rows)
            tile = self.room.widened[: (end - row) * shape.cols].view(end - row, shape.cols)
            on_grid(widen, (end - row, -(-shape.cols // 1024)))(
                data[row:end], scales[row:end], offsets[row:end], tile,
                COLS=shape.cols, FORMAT=shape.form, GROUPS=shape.groups, GROUP=shape.group, OFFSETS=shape.offsets, BLOCK=1024,
            )  # fmt: skip
            torch.mm(x, tile.t(), out=out[:, row:end])
        return out

    def _shape(self, weight: Weight) -> Shape | str:
        data, kind = (weight, weight.dtype) if isinstance(weight, torch.Tensor) else (weight.data, weight.format)
        rows, cols = weight.shape
        key = (data.data_ptr(), rows, cols, kind)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = shape_of(weight, self.activation)
            if isinstance(found, str):
                self._tell(found)
        return found

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("no fused CUDA kernel for %s: plain torch does it, slower", what)


def _tensors(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and offsets; what there is not is the numbers again, and not read."""
    if isinstance(weight, QuantizedWeight):
        data = weight.data.view(torch.uint8) if weight.format.name == "fp8" else weight.data
        return data, weight.scales, weight.scales if weight.offsets is None else weight.offsets
    return weight, weight, weight


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
