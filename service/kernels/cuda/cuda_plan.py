"""Chooses the variant of a fused CUDA kernel for a weight, from its shape and the device alone. Nothing is tried at run
time.

The rules come from timing about 4,000 variants inside CUDA graphs on an H200, with the shapes of Qwen3-0.6B and 4B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...quant.weight import QuantizedWeight, Weight

WeightForm = Literal["float", "int8", "int4", "fp8", "nvfp4"]
# Rows of a tensor-core tile of activations, and most rows of the skinny kernel.
TILE_ROWS = 16
# Programs that share a row of weights if there are few rows.
SPLIT = 4
# Up to STREAMING_ROWS rows stream the weight once each, from the second on out of the L2 cache, if that holds CACHED
# times the weight. In tiles the norm, the product and the sum of its parts are three kernels. Verify passes of 2, 3 and
# 4 rows of Qwen3.8-Flash-Next take 5.6, 6.4 and 7.4 ms streaming on an H200, and 6.8, 7.3 and 7.9 in tiles; 6 rows take
# 9.0 both ways, 8 rows 10.7 and 10.1. Larger weights lose.
STREAMING_ROWS, CACHED = 4, 5


@dataclass(frozen=True, slots=True)
class WeightShape:
    """A weight as the kernels see it. `group`: columns under one scale. `share`: units of 16 bytes under one scale, 0
    for one scale per row.

    nvfp4 has two scales per unit of 32 columns. They are read as one number, so `groups` counts units.
    """

    form: WeightForm
    rows: int
    cols: int
    groups: int
    group: int
    share: int
    offsets: bool

    @property
    def bits(self) -> int:
        return {"float": 16, "int8": 8, "fp8": 8}.get(self.form, 4)

    @property
    def units(self) -> int:
        """Units of 16 bytes per row."""
        return self.cols * self.bits // 128


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """What the plans need to know of a GPU. `shared`: bytes of shared memory per program; `cache`: bytes of L2."""

    processors: int
    shared: int
    cache: int
    early: bool  # programmatic dependent launch


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Tiles of `lanes` rows times `units` units, `rows` of them at once; `grid` programs of `warps` warps; `most`
    programs run at once.
    """

    rows: int
    lanes: int
    units: int
    warps: int
    grid: int
    most: int


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """Tiles of `rows` weight rows in steps of `cols` columns, `stages` steps in flight, each row shared by `split`
    programs.
    """

    rows: int
    cols: int
    split: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Tiles of `rows` weight rows times `picks` activation rows in steps of `cols` columns,
    `stages` steps in flight.
    """

    picks: int
    rows: int
    cols: int
    stages: int
    warps: int


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Any:
    """A Triton kernel for a grid. Only Triton knows the types of its arguments."""
    return kernel[grid]


def shape_of(weight: Weight, activation: torch.dtype) -> WeightShape | str:
    """The weight as the fused kernels see it, or why they cannot read it."""
    if isinstance(weight, torch.Tensor):
        if weight.dtype != activation:
            return f"weights in {weight.dtype} with activations in {activation}"
        rows, cols = weight.shape
        return _aligned(WeightShape("float", rows, cols, 1, cols, 0, False), weight)
    return _quantized_shape(weight)


def _quantized_shape(weight: QuantizedWeight) -> WeightShape | str:
    name, cols, group = weight.format.name, weight.cols, weight.group
    if name == "nvfp4" and group == 16 and weight.factors is not None and cols % 32 == 0:
        return _aligned(WeightShape("nvfp4", weight.rows, cols, cols // 32, 32, 1, False), weight.data)
    if name not in ("int8", "int4", "fp8"):
        return f"weights in {name}"
    groups = weight.scales.shape[1]
    unit = 32 if name == "int4" else 16
    if groups > 1 and (group % unit or group & (group - 1)):
        return f"{name} with groups of {group} columns"
    share = group // unit if groups > 1 else -(-cols // unit) if name == "int4" else 0
    form: WeightForm = name  # pyright: ignore[reportAssignmentType] - it is one of them
    return _aligned(WeightShape(form, weight.rows, cols, groups, group, share, weight.offsets is not None), weight.data)


def _aligned(shape: WeightShape, data: torch.Tensor) -> WeightShape | str:
    columns = 128 // shape.bits
    if shape.cols % columns or shape.cols < columns * 2:
        return f"{shape.form} rows of {shape.cols} columns, no multiple of {columns}"
    if not data.is_contiguous() or data.data_ptr() % 16:
        return f"{shape.form} weights that do not begin at a multiple of 16 bytes"
    return shape


def streams(shape: WeightShape, rows: int, device: GpuDevice) -> bool:
    """Whether this many activation rows stream the weight one by one."""
    return rows == 1 or (rows <= STREAMING_ROWS and shape.rows * shape.cols * shape.bits // 8 * CACHED <= device.cache)


def gemv_plan(shape: WeightShape, gated: bool, device: GpuDevice) -> GemvPlan:
    """The plan for one activation row."""
    tiles = 5 if shape.form == "float" else 3
    units = next((u for u in (32, 64, 128, 256) if -(-shape.units // u) <= tiles), 256)
    count = -(-shape.units // units)
    warps = units // 16 if units < 256 else 8
    lanes = 32 * warps // units
    # The words of two groups and x must fit in registers.
    held = count * (2 if gated else 1)
    # Nibbles of nvfp4 become floats one by one. Twelve tiles of them compile for 15 s and fill the registers.
    limit = {"int4": 8 if count > 2 else 16, "nvfp4": 4}.get(shape.form, 12)
    rows = next((r for r in (8, 4, 2) if r * held <= limit and r * lanes <= 16), 1)
    groups = -(-(shape.rows // 2 if gated else shape.rows) // (rows * lanes))
    # All programs run at once, and leave registers for the first programs of the next kernel.
    most = device.processors * {2: 6, 4: 3 if shape.form == "float" else 4, 8: 2}[warps]
    return GemvPlan(rows, lanes, units, warps, min(most, groups), most)


def skinny_plan(shape: WeightShape, gated: bool, device: GpuDevice) -> SkinnyPlan:
    """The plan for 2 to TILE_ROWS activation rows."""
    few = shape.rows < 32 * device.processors and not gated
    split = SPLIT if few and shape.rows <= shape.cols * 2 else 1
    grouped = shape.groups > 1
    if shape.form == "float":
        rows, cols, warps = (16, 128, 2) if few else (64, 128, 4)
    elif shape.bits == 4:
        step = 128 if shape.form == "nvfp4" else _step(shape.group)
        rows, cols, warps = (32, step, 2) if few else (64, step, 4)
    else:
        rows, cols, warps = 32, _step(shape.group) if grouped else 256, 2 if few else 4
    size = rows * cols * shape.bits // 8 + TILE_ROWS * cols * 2
    stages = max(2, min(6 if shape.form == "float" else 4, device.shared * 9 // 10 // size))
    return SkinnyPlan(rows, cols, split, stages, warps)


def pick_rows(picks: int, count: int) -> int:
    """Picks per tile if `picks` are spread over `count` weights: usually one tile per weight."""
    return 16 if picks <= 12 * count else 32 if picks <= 24 * count else 64


def grouped_plan(shape: WeightShape, picks: int, device: GpuDevice) -> GroupedPlan:
    """The plan for tiles of `picks` activation rows.

    From 83 variants on an H200 with 2,048 rows and 512 experts of INT4: gates take 657 us and down 409. With 8 warps
    and 128 rows they take 699 and 444, with steps of 128 columns 726 and 460. NVFP4 takes 752 and 440, with 8 warps 908
    and 527. Up to 32 picks 128 rows are faster everywhere.
    """
    step = min(64, _step(shape.group)) if shape.groups > 1 and shape.form != "nvfp4" else 64
    rows = 64 if shape.form == "int4" and picks > 32 else 128
    size = rows * step * shape.bits // 8 + picks * step * 2
    return GroupedPlan(picks, rows, step, max(2, min(4, device.shared * 9 // 10 // size)), 4)


def _step(group: int) -> int:
    """Columns per step under one scale: a power of two from 32 to 128."""
    return 128 if group >= 128 else group if group & (group - 1) == 0 else 32
