"""Products with weights on CUDA by fused kernels, which the kernels of whole layers build on.

Products of one row, and of a few rows with small weights, stream the weights (triton_gemv). Up to 16 rows use small
tensor-core tiles (triton_skinny), more use cuBLAS. All run in torch's stream and read no values on the host, so a CUDA
graph can hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...quant.weight import Format, QuantizedWeight, Weight
from ..forward_batch import NormWeight
from .cuda_plan import (
    TILE_ROWS,
    GemvPlan,
    GpuDevice,
    WeightShape,
    gemv_plan,
    on_grid,
    shape_of,
    skinny_plan,
    streams,
)
from .sdpa_kernels import CudaKernels
from .triton_gemv import gemv
from .triton_rows import embed, fixed_point, rms_norm, silu_mul, widen
from .triton_skinny import add_parts, skinny

log = logging.getLogger(__name__)

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Elements of a quantized weight widened at a time for a cuBLAS product.
WIDENED = 1 << 23
# Most picks of a step that share the processors. The programs of further picks wait.
MOST_SHARING = 16


@dataclass(slots=True)
class Workspace:
    """Buffers of the kernels: one row as fixed-point words, with scales and sums; partial sums of products; partial
    results of attention, with their largest scores and sums of weights; a widened tile.
    """

    words: torch.Tensor
    sums: torch.Tensor
    products: torch.Tensor
    heads: torch.Tensor
    heads_scores: torch.Tensor
    widened: torch.Tensor


class FusedProducts(CudaKernels):
    """Embedding, norms and products. Unsupported shapes fall back to plain torch, which is logged once."""

    name = "cuda"

    def __init__(self, activation: torch.dtype, device: GpuDevice, *, asm: bool = True) -> None:
        """`asm` False uses only what Triton's interpreter can run."""
        super().__init__(activation)
        self.device = device
        self.reason = f"Triton kernels in CUDA graphs, activations in {HALVES[activation]}"
        self.half = HALVES[activation]
        self.asm = asm
        self.launch: dict[str, Any] = {"launch_pdl": True} if device.early else {}
        self._reported: set[str] = set()
        self._shapes: dict[tuple[int, int, int, torch.dtype | Format], WeightShape | str] = {}
        self._workspace: Workspace | None = None
        self._static: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        self._workspace = Workspace(*buffers)

    @property
    def workspace(self) -> Workspace:
        """The workspace. Raises ValueError before `reserve`."""
        if self._workspace is None:
            raise ValueError("the kernels have no workspace yet")
        return self._workspace

    def static_buffer(self, name: str, dtype: torch.dtype, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A buffer for a few rows between two kernels of a layer, on the device of `like`. Made once, so its address is
        the same in every step.
        """
        key = name, dtype, shape
        found = self._static.get(key)
        if found is None:
            found = self._static[key] = torch.zeros(shape, dtype=dtype, device=like.device)
        return found

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        shape = self.shape(table)
        if isinstance(shape, str) or shape.form not in ("float", "int8"):
            return super().embed(ids, table, out)
        data, scales, _ = tensors_of(table)
        groups = shape.groups if shape.form == "int8" else 0
        grid = (ids.shape[0], -(-shape.cols // 1024))
        on_grid(embed, grid)(ids, data, scales, out, COLS=shape.cols, GROUPS=groups, GROUP=shape.group, BLOCK=1024)
        return out

    def linear(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        shape = self.shape(weight)
        if isinstance(shape, str):
            return super().linear(x, weight, out)
        if x.shape[0] > TILE_ROWS:
            return self._product(x, weight, shape, out)
        return self.few_rows(x, weight, shape, out)

    def norm_linear(
        self, x: torch.Tensor, norm: NormWeight, weight: Weight, out: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        shape = self.shape(weight)
        if isinstance(shape, str) or not self._norms(x.shape[0], shape):
            return self.linear(self.rms_norm(x, norm, normed), weight, out)
        return self._normed_rows(x, norm, weight, shape, out, gated=False)

    def linear_add(self, x: torch.Tensor, weight: Weight, residual: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        shape = self.shape(weight)
        if isinstance(shape, str):
            return super().linear_add(x, weight, residual, spare)
        if x.shape[0] > TILE_ROWS:
            if isinstance(weight, torch.Tensor):
                return torch.addmm(residual, x, weight.t(), out=residual)
            return residual.add_(self._product(x, weight, shape, spare))
        return self.few_rows(x, weight, shape, residual, add=True)

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm: NormWeight,
        gate_up: Weight,
        out: torch.Tensor,
        normed: torch.Tensor,
        both: torch.Tensor,
    ) -> torch.Tensor:
        shape = self.shape(gate_up)
        if isinstance(shape, str):
            return super().norm_gate_up(x, norm, gate_up, out, normed, both)
        if self._norms(x.shape[0], shape):
            return self._normed_rows(x, norm, gate_up, shape, out, gated=True)
        self.rms_norm(x, norm, normed)
        if x.shape[0] <= TILE_ROWS:
            return self.few_rows(normed, gate_up, shape, out, gated=True)
        return self.silu_mul(self._product(normed, gate_up, shape, both), out)

    def rms_norm(self, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or not x.is_contiguous() or not out.is_contiguous() or out.dtype != self.activation:
            return super().rms_norm(x, norm, out)
        count, cols = x.shape
        block = power(cols)
        on_grid(rms_norm, (count,))(
            x, norm.weight, out, norm.eps, COLS=cols, BLOCK=block, PDL=self.device.early, num_warps=8, **self.launch
        )
        return out

    def gate_up(self, x: torch.Tensor, gate_up: Weight, out: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        shape = self.shape(gate_up)
        if isinstance(shape, str) or x.shape[0] > TILE_ROWS:
            return super().gate_up(x, gate_up, out, both)
        return self.few_rows(x, gate_up, shape, out, gated=True)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        count, cols = out.shape
        on_grid(silu_mul, (count, -(-cols // 1024)))(gate_up, out, COLS=cols, BLOCK=1024)
        return out

    def _norms(self, count: int, shape: WeightShape) -> bool:
        """Whether a product norms this many rows itself. For several fixed-point rows it does not."""
        return count == 1 or (shape.form not in ("int8", "int4") and streams(shape, count, self.device))

    def _normed_rows(
        self, x: torch.Tensor, norm: NormWeight, weight: Weight, shape: WeightShape, out: torch.Tensor, *, gated: bool
    ) -> torch.Tensor:
        """A product of rows normed on the way: by the kernel itself, or before it as fixed-point numbers."""
        words = norm.weight.view(torch.int64)
        if shape.form not in ("int8", "int4"):
            return self.stream_rows(x, words, weight, shape, out, x.shape[0], normed=True, eps=norm.eps, gated=gated)
        unit_words = 8 if shape.form == "int4" else 4
        fixed, sums = self.workspace.words, self.workspace.sums
        on_grid(fixed_point, (1,))(
            x.view(torch.int64), words, fixed, sums, norm.eps, COLS=shape.cols, UNIT_WORDS=unit_words,
            PADDED=power(shape.units), HALF=self.half, ASM=self.asm, PDL=self.device.early, num_warps=8, **self.launch,
        )  # fmt: skip
        return self.stream_rows(fixed, sums, weight, shape, out, 1, held=True, gated=gated)

    def few_rows(
        self,
        x: torch.Tensor,
        weight: Weight,
        shape: WeightShape,
        out: torch.Tensor,
        *,
        add: bool = False,
        gated: bool = False,
        fold: float = 0.0,
    ) -> torch.Tensor:
        """A product of 1 to TILE_ROWS rows. `fold`: apply silu to the result times this. `out` may have another type
        than x.
        """
        if streams(shape, x.shape[0], self.device):
            return self.stream_rows(x, x, weight, shape, out, x.shape[0], add=add, gated=gated, fold=fold)
        rows = shape.rows // 2 if gated else shape.rows
        plan = skinny_plan(shape, gated, self.device)
        data, scales, offsets = tensors_of(weight)
        on_grid(skinny, (-(-rows // plan.rows), plan.split))(
            x, data, scales, offsets, out, self.workspace.products, rows, x.shape[0],
            COLS=shape.cols, FORMAT=shape.form, HALF=self.half, GROUPS=shape.groups, GROUP=shape.group,
            OFFSETS=shape.offsets, BN=plan.rows, BK=plan.cols, SPLIT=plan.split, STAGES=plan.stages, ADD=add,
            GATED=gated, FOLD=fold, ASM=self.asm, PDL=self.device.early, num_warps=plan.warps, **self.launch,
        )  # fmt: skip
        if plan.split > 1:
            on_grid(add_parts, (x.shape[0], -(-rows // 256)))(
                self.workspace.products, out, rows, SPLIT=plan.split, ADD=add, FOLD=fold, BLOCK=256,
                PDL=self.device.early, num_warps=2, **self.launch,
            )  # fmt: skip
        return out

    def stream_rows(
        self, x: torch.Tensor, norm: torch.Tensor, weight: Weight, shape: WeightShape, out: torch.Tensor, count: int, *,
        normed: bool = False, held: bool = False, eps: float = 0.0, add: bool = False, gated: bool = False,
        fold: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        """A product by `gemv` of `count` rows, at most what `streams` allows. `out` may be larger."""
        plan = gemv_plan(shape, gated, self.device)
        grid = (plan.grid,) if count == 1 else (plan.grid, count)
        kind = {"NORM": normed, "HELD": held, "ADD": add, "GATED": gated, "FOLD": fold, "SEVERAL": count > 1}
        self._stream(x, norm, weight, shape, out, plan, grid, eps=eps, **kind)
        return out

    def stream_picks(
        self,
        x: torch.Tensor,
        weight: Weight,
        shape: WeightShape,
        out: torch.Tensor,
        picks: torch.Tensor,
        share: int,
        *,
        gated: bool,
    ) -> torch.Tensor:
        """Row i of out [picks, rows] = row i // share of x times weight picks[i] of the contiguous weights from
        `weight` on.
        """
        plan, count = gemv_plan(shape, gated, self.device), out.shape[0]
        # Most steps have one row, whose picks share the processors.
        grid = max(1, min(plan.grid, -(-plan.most // min(count, MOST_SHARING))))
        self._stream(x, x, weight, shape, out, plan, (grid, count), GATED=gated, PICKED=share, picks=picks)
        return out

    def _stream(
        self, x: torch.Tensor, norm: torch.Tensor, weight: Weight, shape: WeightShape, out: torch.Tensor,
        plan: GemvPlan, grid: tuple[int, ...], *, picks: torch.Tensor | None = None, eps: float = 0.0, **kind: Any,
    ) -> None:  # fmt: skip
        data, scales, offsets = tensors_of(weight)
        if x.dtype == self.activation:
            x = x.view(torch.int32 if shape.form == "float" else torch.int64)
        forms = {
            "NORM": False,
            "HELD": False,
            "ADD": False,
            "GATED": False,
            "FOLD": 0.0,
            "PICKED": 0,
            "SEVERAL": False,
        } | kind
        on_grid(gemv, grid)(
            x, norm, data.view(torch.int32), scales, offsets, out, x if picks is None else picks,
            shape.rows // 2 if forms["GATED"] else shape.rows, eps,
            COLS=shape.cols, FORMAT=shape.form, HALF=self.half, GROUPS=shape.groups, SHARE=shape.share,
            OFFSETS=shape.offsets, BR=plan.rows, RL=plan.lanes, NB=plan.units, ASM=self.asm, PDL=self.device.early,
            num_warps=plan.warps, **forms, **self.launch,
        )  # fmt: skip

    def _product(self, x: torch.Tensor, weight: Weight, shape: WeightShape, out: torch.Tensor) -> torch.Tensor:
        """A product of many rows by cuBLAS. A quantized weight is widened in tiles."""
        if isinstance(weight, torch.Tensor):
            return torch.mm(x, weight.t(), out=out)
        step = max(16, WIDENED // shape.cols)
        data, scales, offsets = tensors_of(weight)
        for row in range(0, shape.rows, step):
            end = min(row + step, shape.rows)
            tile = self.workspace.widened[: (end - row) * shape.cols].view(end - row, shape.cols)
            on_grid(widen, (end - row, -(-shape.cols // 1024)))(
                data[row:end], scales[row:end], offsets[row:end], tile,
                COLS=shape.cols, FORMAT=shape.form, GROUPS=shape.groups, GROUP=shape.group, OFFSETS=shape.offsets,
                BLOCK=1024,
            )  # fmt: skip
            torch.mm(x, tile.t(), out=out[:, row:end])
        return out

    def shape(self, weight: Weight) -> WeightShape | str:
        data, kind = (weight, weight.dtype) if isinstance(weight, torch.Tensor) else (weight.data, weight.format)
        rows, cols = weight.shape
        key = (data.data_ptr(), rows, cols, kind)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = shape_of(weight, self.activation)
            if isinstance(found, str):
                self.tell(found)
        return found

    def tell(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            log.warning("no fused CUDA kernel for %s: plain torch does it, slower", what)


def tensors_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and offsets (nvfp4: pairs of scales as one number, and factors). A missing tensor is replaced by
    another, which is not read.
    """
    if isinstance(weight, QuantizedWeight):
        data = weight.data.view(torch.uint8) if weight.format.name == "fp8" else weight.data
        if weight.factors is not None:
            return data, weight.scales.view(torch.int16), weight.factors
        return data, weight.scales, weight.scales if weight.offsets is None else weight.offsets
    return weight, weight, weight


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
