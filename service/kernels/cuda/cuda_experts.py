"""Sparse experts on CUDA. The host reads no values, and every shape follows from the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...quant.weight import QuantizedWeight, Weight
from ..operands import ExpertOperands, ExpertWeights, SharedWeights
from .cuda_plan import TILE_ROWS, WeightShape, grouped_plan, on_grid, pick_rows
from .cuda_products import FusedProducts, power, tensors_of
from .triton_experts import combine, grouped, route, sort_picks

# Most experts whose scores one program sorts, and most picks per row.
MOST_EXPERTS, MOST_ACTIVE = 4096, 64
# From this many rows on, nvfp4 uses tiles.
TILED_ROWS = 4
# Picks that a program of `sort_picks` reads at a time.
SORTED = 2048


@dataclass(slots=True)
class PickBuffers:
    """Parts of ExpertOperands.picks.

    table fp32 [T * count]: the scores of few rows, or the tiles of many. Per pick: its expert, its weight, and the
    order by expert [T * active]; gated [T * active, width]; found [T * active, hidden]. shares fp32 [T]. The parts of
    32-bit words may be a few words longer.
    """

    table: torch.Tensor
    picks: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    shares: torch.Tensor
    gated: torch.Tensor
    found: torch.Tensor


class ExpertKernels(FusedProducts):
    """Expert kernels. Up to TILE_ROWS rows stream the weights of each pick. More rows are sorted by expert, and rows
    that share an expert use one tile. Several rows of nvfp4 use tiles of one pick each: nibbles become floats faster
    there.
    """

    def run_experts(self, experts: ExpertWeights, at: ExpertOperands) -> bool:
        if not self.fuses_experts(experts):
            return False
        count, active, shared = at.x.shape[0], experts.active, experts.shared
        gate_up, down = self._shape_of(experts.gate_up), self._shape_of(experts.down)
        buffers = _split_picks(at, experts, down)
        self._route(experts, at, buffers)
        # First, because its intermediate result for many rows lies in the memory of `found`.
        routed = self._shared(shared, at, buffers) if shared is not None else buffers.found
        each = gate_up.form == down.form == "nvfp4" and count >= TILED_ROWS
        if count <= TILE_ROWS and not each:
            self.stream_picks(at.x, experts.gate_up[0], gate_up, buffers.gated, buffers.picks, active, gated=True)
            self.stream_picks(buffers.gated, experts.down[0], down, buffers.found, buffers.picks, 1, gated=False)
        else:
            rows = 16 if count <= TILE_ROWS else pick_rows(count * active, len(experts.gate_up))
            tiles = buffers.picks.view(1, -1) if count <= TILE_ROWS else self._sort(buffers, len(experts.gate_up), rows)
            self._grouped(
                at.x, experts.gate_up[0], gate_up, buffers.gated, tiles, buffers.order, active, rows, gated=True
            )
            self._grouped(
                buffers.gated, experts.down[0], down, buffers.found, tiles, buffers.order, 1, rows, gated=False
            )
        on_grid(combine, (count, -(-down.rows // 1024)))(
            buffers.found, buffers.weights, routed, buffers.shares, at.out, COLS=down.rows, ACTIVE=active,
            SHARED=shared is not None, BLOCK=1024, PDL=self.device.early, num_warps=4, **self.launch,
        )  # fmt: skip
        return True

    def fuses_experts(self, experts: ExpertWeights) -> bool:
        """Whether fused kernels support all of them. What they do not support is logged once."""
        if experts.active > min(MOST_ACTIVE, len(experts.gate_up)) or len(experts.gate_up) > MOST_EXPERTS:
            self.tell(f"{experts.active} of {len(experts.gate_up)} experts")
            return False
        plain = (
            experts.router,
            *((experts.shared.gate, experts.shared.gate_up, experts.shared.down) if experts.shared else ()),
        )
        several = (experts.gate_up, experts.down)
        if any(isinstance(self.shape(weight), str) for weight in (*plain, *(parts[0] for parts in several))):
            return False
        if experts.shared is not None and isinstance(experts.shared.gate, QuantizedWeight):
            self.tell("a quantized gate of a shared expert")
            return False
        if experts.shared is not None and experts.shared.gate_up.shape[0] > experts.active * experts.down[0].shape[0]:
            self.tell("a shared expert wider than all that a token's experts find")
            return False
        if not all(_contiguous(parts) for parts in several):
            self.tell("experts that are not contiguous")
            return False
        return True

    def _shape_of(self, parts: list[Weight]) -> WeightShape:
        shape = self.shape(parts[0])
        if isinstance(shape, str):
            raise ValueError(shape)
        return shape

    def _route(self, experts: ExpertWeights, at: ExpertOperands, buffers: PickBuffers) -> None:
        """Expert and weight of every pick, and the shares of the shared expert."""
        count, cols = at.x.shape
        active, total, shared = experts.active, len(experts.gate_up), experts.shared
        if count <= TILE_ROWS:
            # Scores rounded to 16 bits would select other experts where two are close.
            scores = self.few_rows(at.x, experts.router, self._shape_of([experts.router]), buffers.table)
        else:
            scores = self.linear(at.x, experts.router, at.scores)
        gate = shared.gate if shared is not None and isinstance(shared.gate, torch.Tensor) else at.x
        on_grid(route, (count,))(
            at.x, scores, gate, buffers.picks, buffers.weights, buffers.shares, COUNT=total, PADDED=power(total),
            ACTIVE=active, PICKS=power(active), NORMALIZED=experts.normalized, SHARED=shared is not None, COLS=cols,
            BLOCK=1024, PDL=self.device.early, num_warps=4, **self.launch,
        )  # fmt: skip

    def _shared(self, shared: SharedWeights, at: ExpertOperands, buffers: PickBuffers) -> torch.Tensor:
        """The result of the shared expert before weighting: [T, hidden]."""
        count, wide = at.x.shape[0], shared.gate_up.shape[0]
        both = buffers.found.view(-1)[: count * wide].view(count, wide) if count > TILE_ROWS else at.x
        self.gate_up(at.x, shared.gate_up, at.shared_gated, both)
        return self.linear(at.shared_gated, shared.down, at.routed)

    def _sort(self, buffers: PickBuffers, total: int, rows: int) -> torch.Tensor:
        """The tiles [3, ..] of up to `rows` picks that share an expert. Fills `order`."""
        count = buffers.picks.shape[0]
        most = total + count // rows
        tiles = buffers.table[: 3 * most].view(torch.int32).view(3, most)
        on_grid(sort_picks, (total,))(
            buffers.picks,
            buffers.order,
            tiles,
            count,
            most,
            BM=rows,
            BLOCK=SORTED,
            PDL=self.device.early,
            num_warps=4,
            **self.launch,
        )
        return tiles

    def _grouped(
        self, x: torch.Tensor, weight: Weight, shape: WeightShape, out: torch.Tensor, tiles: torch.Tensor,
        order: torch.Tensor, share: int, rows: int, *, gated: bool,
    ) -> None:  # fmt: skip
        data, scales, offsets = tensors_of(weight)
        plan, outputs = grouped_plan(shape, rows, self.device), out.shape[1]
        on_grid(grouped, (-(-outputs // (plan.rows // 2 if gated else plan.rows)), tiles.shape[1]))(
            x, data, scales, offsets, out, tiles, order, outputs, tiles.shape[1],
            COLS=shape.cols, FORMAT=shape.form, HALF=self.half, GROUPS=shape.groups, GROUP=shape.group,
            OFFSETS=shape.offsets, SHARE=share, SORTED=len(tiles) == 3, BM=rows, BW=plan.rows, BK=plan.cols,
            STAGES=plan.stages, GATED=gated, ASM=self.asm, PDL=self.device.early, num_warps=plan.warps, **self.launch,
        )  # fmt: skip


def _split_picks(at: ExpertOperands, experts: ExpertWeights, down: WeightShape) -> PickBuffers:
    """The parts of `at.picks`, each at a multiple of 16 bytes. Few torch calls, because a pass of many rows waits for
    the host.
    """
    flat, count = at.picks.view(-1), at.x.shape[0]
    picks = count * experts.active
    words = [-(-size // 4) * 8 for size in (count * len(experts.gate_up), picks, picks, picks, count)]
    sizes = [*words, picks * down.cols, picks * down.rows]
    table, which, weights, order, shares, gated, found = flat[: sum(sizes)].split_with_sizes(sizes)
    return PickBuffers(
        table.view(torch.float32), which[: 2 * picks].view(torch.int32), weights.view(torch.float32),
        order.view(torch.int32), shares.view(torch.float32), gated.view(picks, down.cols), found.view(picks, down.rows),
    )  # fmt: skip


def _contiguous(parts: list[Weight]) -> bool:
    """Whether equal weights are contiguous: the distance from the first to the last matches their count."""
    first, last = parts[0], parts[-1]
    if isinstance(first, QuantizedWeight) and isinstance(last, QuantizedWeight):
        pairs = zip(first.tensors, last.tensors, strict=True)
    elif isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        pairs = zip((first,), (last,), strict=True)
    else:
        return False
    return all(b.data_ptr() - a.data_ptr() == (len(parts) - 1) * a.nbytes for a, b in pairs)
