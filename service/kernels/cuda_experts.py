"""Sparse experts on CUDA: nothing is looked at on the host, and every shape follows from the number of rows."""

from __future__ import annotations

import torch

from ..quant.weight import QuantizedWeight, Weight
from .cuda_plan import TILE_ROWS, Shape, grouped_plan, on_grid
from .cuda_products import FusedProducts, power, tensors_of
from .parts import ExpertRows, ExpertWeights, SharedWeights
from .triton_experts import combine, grouped, lay_out, route

# Experts whose scores one program sorts, and picks of a row.
MOST_EXPERTS, MOST_ACTIVE = 4096, 64


class ExpertKernels(FusedProducts):
    """Up to TILE_ROWS rows stream the weights of each pick; more are sorted by expert, and rows that share one go through tiles."""

    def run_experts(self, experts: ExpertWeights, at: ExpertRows) -> bool:
        if not self.fuses_experts(experts):
            return False
        count, active, total = at.x.shape[0], experts.active, len(experts.gate_up)
        few = count <= TILE_ROWS
        shared = experts.shared
        picks, weights, shares = self._routed(experts, at, few=few)
        gate_up, down = self._shape_of(experts.gate_up), self._shape_of(experts.down)
        width, hidden = down.cols, down.rows
        if few:
            gated = self.kept("experts gated", self.activation, at.x, count * active, width)
            found = self.kept("experts found", self.activation, at.x, count * active, hidden)
            self.picked(at.x, experts.gate_up[0], gate_up, gated, picks, active, gated=True)
            self.picked(gated, experts.down[0], down, found, picks, 1, gated=False)
        else:
            gated = torch.empty((count * active, width), dtype=self.activation, device=at.x.device)
            found = torch.empty((count * active, hidden), dtype=self.activation, device=at.x.device)
            chosen, order = picks.sort(stable=True)
            rows = grouped_plan(count * active, total)
            most = min(total, count * active) + count * active // rows
            tiles = torch.empty((3, most), dtype=torch.int32, device=at.x.device)
            on_grid(lay_out, (1,))(
                chosen, tiles, count * active, most, COUNT=total, ROOM=power(total), LOG=(count * active).bit_length(), BM=rows, num_warps=8
            )
            self._grouped(at.x, experts.gate_up[0], gate_up, gated, tiles, order, active, rows, gated=True)
            self._grouped(gated, experts.down[0], down, found, tiles, order, 1, rows, gated=False)
        routed = self._shared(shared, at) if shared is not None else found
        on_grid(combine, (count, -(-hidden // 1024)))(
            found, weights, routed, shares, at.out, COLS=hidden, ACTIVE=active, SHARED=shared is not None, BLOCK=1024,
            PDL=self.device.early, num_warps=4, **self.launch,
        )  # fmt: skip
        return True

    def fuses_experts(self, experts: ExpertWeights) -> bool:
        """Whether all of them run in fused kernels; what does not is told of once."""
        if experts.active > min(MOST_ACTIVE, len(experts.gate_up)) or len(experts.gate_up) > MOST_EXPERTS:
            self.tell(f"{experts.active} of {len(experts.gate_up)} experts")
            return False
        plain = (experts.router, *((experts.shared.gate, experts.shared.gate_up, experts.shared.down) if experts.shared else ()))
        several = (experts.gate_up, experts.down)
        if any(isinstance(self.shape(weight), str) for weight in (*plain, *(parts[0] for parts in several))):
            return False
        if experts.shared is not None and isinstance(experts.shared.gate, QuantizedWeight):
            self.tell("a quantized gate of a shared expert")
            return False
        if not all(_behind_each_other(parts) for parts in several):
            self.tell("experts that do not lie one behind the other")
            return False
        return True

    def _shape_of(self, parts: list[Weight]) -> Shape:
        shape = self.shape(parts[0])
        if isinstance(shape, str):
            raise ValueError(shape)
        return shape

    def _routed(self, experts: ExpertWeights, at: ExpertRows, *, few: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Experts int32 and weights fp32 of all rows [T * active], and the shared one's weights [T]."""
        (count, cols), active, total, shared = at.x.shape, experts.active, len(experts.gate_up), experts.shared
        router = self._shape_of([experts.router])
        if few:
            # Scores that are rounded to 16 bits choose others where two are close.
            scores = self.few(at.x, experts.router, router, self.kept("experts scores", torch.float32, at.x, count, total))
            picks = self.kept("experts picks", torch.int32, at.x, count * active)
            weights = self.kept("experts weights", torch.float32, at.x, count * active)
            shares = self.kept("experts shares", torch.float32, at.x, count)
        else:
            scores = self.linear(at.x, experts.router, at.scores)
            picks = torch.empty(count * active, dtype=torch.int32, device=at.x.device)
            weights = torch.empty(count * active, dtype=torch.float32, device=at.x.device)
            shares = torch.empty(count, dtype=torch.float32, device=at.x.device)
        gate = shared.gate if shared is not None and isinstance(shared.gate, torch.Tensor) else at.x
        on_grid(route, (count,))(
            at.x, scores, gate, picks, weights, shares, COUNT=total, ROOM=power(total), ACTIVE=active, PICKS=power(active),
            NORMALIZED=experts.normalized, SHARED=shared is not None, COLS=cols, BLOCK=1024, PDL=self.device.early, num_warps=4,
            **self.launch,
        )  # fmt: skip
        return picks, weights, shares

    def _shared(self, shared: SharedWeights, at: ExpertRows) -> torch.Tensor:
        """What the shared expert found, not weighed yet: [T, hidden]."""
        many = at.x.shape[0] > TILE_ROWS
        both = torch.empty((at.x.shape[0], shared.gate_up.shape[0]), dtype=self.activation, device=at.x.device) if many else at.x
        self.gate_up(at.x, shared.gate_up, at.shared_gated, both)
        return self.linear(at.shared_gated, shared.down, at.routed)

    def _grouped(
        self, x: torch.Tensor, weight: Weight, shape: Shape, out: torch.Tensor, tiles: torch.Tensor, order: torch.Tensor, share: int,
        rows: int, *, gated: bool,
    ) -> None:  # fmt: skip
        data, scales, offsets = tensors_of(weight)
        outputs = out.shape[1]
        step = shape.group if shape.form in ("int4", "fp8", "int8") and shape.groups > 1 else 128
        step = 64 if shape.form == "float" else min(128, step)
        on_grid(grouped, (-(-outputs // 64), tiles.shape[1]))(
            x, data, scales, offsets, out, tiles, order, outputs, tiles.shape[1],
            COLS=shape.cols, FORMAT=shape.form, HALF=self.half, GROUPS=shape.groups, GROUP=shape.group, OFFSETS=shape.offsets,
            SHARE=share, BM=rows, BN=64, BK=step, STAGES=3, GATED=gated, ASM=self.asm, num_warps=4,
        )  # fmt: skip


def _behind_each_other(parts: list[Weight]) -> bool:
    """Whether the first and the last of equal weights have as many rows between them as there are weights."""
    first, last = parts[0], parts[-1]
    if isinstance(first, QuantizedWeight) and isinstance(last, QuantizedWeight):
        pairs = zip(first.tensors, last.tensors, strict=True)
    elif isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        pairs = zip((first,), (last,), strict=True)
    else:
        return False
    return all(b.data_ptr() - a.data_ptr() == (len(parts) - 1) * a.nbytes for a, b in pairs)
