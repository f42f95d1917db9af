"""A network of any shape with random weights made on the device itself, where no files of that size are: for measuring alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..cache.hybrid import HybridKV
from ..cache.paged import PagedKV
from ..cache.recurrent import RecurrentStates
from ..engine.buffers import ChunkBuffers, DecodeBuffers
from ..engine.graph import graph_stepper
from ..engine.runner import SCORED_ROWS, Runner
from ..engine.session import ALIGNMENT, Blueprint
from ..engine.stepper import HostStepper, Stepper
from ..kernels.choose import choose_kernels, row_reader
from ..kernels.reference import ReferenceKernels
from ..kernels.rows import RotaryTable
from ..loader.checkpoint import Checkpoint
from ..loader.files import open_regular
from ..loader.header import TensorInfo
from ..memory.lease import Lease
from ..memory.policy import Kind
from ..memory.pool import Pool
from ..model.families import describe, family_of
from ..model.layers import Scratch
from ..model.spec import Destination
from ..model.tables import PlannedTable, open_tables
from ..model.weights import PlannedTensor, WeightPlan
from ..quant.weight import Format, QuantizedWeight, Weight

SPREAD = 0.02  # standard deviation of the weights, as at the start of training


@dataclass(slots=True)
class Made:
    """A network in memory with all that a step takes; `release` returns it."""

    blueprint: Blueprint
    leases: tuple[Lease, ...]
    runner: Runner
    stepper: Stepper
    kernels: ReferenceKernels

    def release(self) -> None:
        self.stepper.close()
        self.runner.close()
        del self.stepper, self.runner, self.kernels  # a device counts the views of a lease, and these have such
        for lease in self.leases:
            lease.release()


def made_blueprint(
    config: Mapping[str, Any], device: torch.device, context: int, experts: Format | None, folder: Path, sequences: int
) -> Blueprint:
    """Experts held as `experts`, the rest in BF16 and norms in FP32; tables are sparse files in `folder`: their rows are zeros."""
    family, described = family_of(config), describe(config)
    tensors, tables = [], []
    for wanted in family.destinations(described):
        if wanted.in_file:
            tables.append(_sparse_table(wanted, folder))
            continue
        held: torch.dtype | Format = torch.float32 if wanted.wide else torch.bfloat16
        if experts is not None and wanted.key.partition(".")[2].startswith("experts_"):
            held = experts
        tensors.append(PlannedTensor(wanted, held, torch.bfloat16, ()))
    checkpoint = Checkpoint(folder, "made", config, MappingProxyType({}), MappingProxyType({}), 0)
    activation = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Blueprint(checkpoint, family, described, WeightPlan(tuple(tensors), None, tuple(tables)), context, activation, device, sequences)


def _sparse_table(wanted: Destination, folder: Path) -> PlannedTable:
    """One file of the table's length in BF16, of which the disk holds nothing."""
    path, nbytes = folder / "table.bin", 2 * math.prod(wanted.shape)
    with path.open("wb") as file:
        file.truncate(nbytes)
    with open_regular(path, path.name) as (_, source):
        return PlannedTable(wanted, (TensorInfo(wanted.key, "BF16", tuple(wanted.shape), 0, nbytes, source),), None)


def make(blueprint: Blueprint, pool: Pool, cache: Path, seed: int = 0) -> Made:
    """Lease, fill and build. Raises MemoryFull."""
    need, device = blueprint.need, blueprint.device
    pool.check("made", need)
    sizes: tuple[tuple[Kind, int], ...] = (("weights", need.weights), ("kv", need.kv), ("scratch", need.scratch - blueprint.bench_bytes))
    leases = tuple(pool.lease("made", kind, nbytes, align=ALIGNMENT) for kind, nbytes in sizes)
    weights, kv, scratch = leases
    random = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[str, Weight] = {}
    for planned in blueprint.plan.tensors:
        tensors[planned.destination.key] = filled(planned.carve(weights.carve), planned.destination, random)
    kernels = choose_kernels(device, blueprint.activation, cache)
    rotary = RotaryTable.build(scratch, blueprint.context, blueprint.config.rotary_dim, blueprint.config.rope_theta)
    reader = row_reader(cache) if blueprint.plan.tables else None
    tables = open_tables(blueprint.plan.tables, reader)
    network = blueprint.family.build(blueprint.config, tensors, kernels, rotary, tables)
    states = blueprint.state_shape
    parts = kv, blueprint.kv_shape
    pages: PagedKV = (
        PagedKV(*parts, blueprint.context, blueprint.sequences)
        if states is None
        else HybridKV(*parts, RecurrentStates(kv, states), blueprint.context, blueprint.sequences)
    )
    passes = Scratch(scratch, blueprint.widths, blueprint.rows, SCORED_ROWS, blueprint.activation)
    buffers = ChunkBuffers(scratch, pages, blueprint.rows), DecodeBuffers(scratch, network, pages, passes)
    wanted = kernels.workspace(blueprint.widths.shape, blueprint.context, blueprint.activation, blueprint.widths.columns)
    kernels.reserve([scratch.carve(shape, dtype) for shape, dtype in wanted])
    runner = Runner(network, pages, passes, buffers)
    stepper = graph_stepper(runner, scratch, blueprint.widths.vocab)
    return Made(blueprint, leases, runner, stepper or HostStepper(runner), kernels)


def filled(weight: Weight, wanted: Destination, random: torch.Generator) -> Weight:
    """Random numbers of the size that weights have; what norms and states multiply by is near 1."""
    if isinstance(weight, QuantizedWeight):
        weight.data.view(torch.uint8).random_(0, 256, generator=random)
        if weight.factors is not None:
            weight.factors.fill_(SPREAD / 3)
            weight.scales.view(torch.uint8).fill_(0x38)  # 1 in E4M3
        else:
            weight.scales.fill_(SPREAD / 4)
        return weight
    if wanted.turn == "taps_first":
        return weight.normal_(0, 0.3, generator=random)
    if wanted.turn == "minus_exp":
        return weight.fill_(-0.5)
    if wanted.wide:
        return weight.fill_(1.0)
    return weight.normal_(0, SPREAD, generator=random)
