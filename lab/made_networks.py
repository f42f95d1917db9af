"""A network of any shape with random weights made on the device itself, to measure shapes whose files are not
available.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.nn.functional import normalize

from ..service.engine.runner import Runner
from ..service.engine.session import ALIGNMENT, Blueprint, Opening, Session, build_runner
from ..service.engine.stepper import Stepper
from ..service.errors import ModelError
from ..service.kernels.choose import choose_kernels
from ..service.kernels.reference import ReferenceKernels
from ..service.loader.checkpoint import Checkpoint
from ..service.loader.files import open_regular
from ..service.loader.header import TensorInfo
from ..service.loader.stream import StreamStats
from ..service.memory.policy import Kind
from ..service.memory.pool import Pool
from ..service.model.arrival import WeightArrival
from ..service.model.draft import with_draft
from ..service.model.families import describe, family_of
from ..service.model.spec import Destination
from ..service.model.tables import PlannedTable
from ..service.model.weights import PlannedTensor, WeightPlan
from ..service.quant.weight import Format, QuantizedWeight, Weight

SPREAD = 0.02  # standard deviation of the weights, as at the start of training


@dataclass(slots=True)
class Made:
    """A network in memory with everything that a step needs; `release` frees it."""

    blueprint: Blueprint
    session: Session
    kernels: ReferenceKernels

    @property
    def runner(self) -> Runner:
        return self.session.runner

    @property
    def stepper(self) -> Stepper:
        return self.session.stepper

    def release(self) -> None:
        del self.kernels  # a device counts the views of a lease, and kernels have some
        self.session.release()


class Filled:
    """The part of a weight loader that a session uses, for weights that are already there."""

    complete = True
    waited = 0.0

    def finish(self) -> StreamStats:
        return StreamStats(0, 0.0)

    def stop(self) -> None: ...


def made_blueprint(
    config: Mapping[str, Any],
    device: torch.device,
    context: int,
    experts: Format | None,
    folder: Path,
    sequences: int,
    *,
    draft: bool,
) -> Blueprint:
    """Experts in the format `experts`, other weights in BF16, norms in FP32; tables are sparse files in `folder` whose
    rows are zeros.

    `draft`: with the multi-token prediction layer.
    """
    family, described = family_of(config), describe(config)
    described = with_draft(described) if draft else described
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
    return Blueprint(
        checkpoint,
        family,
        described,
        WeightPlan(tuple(tensors), None, tuple(tables)),
        context,
        activation,
        device,
        sequences,
    )


def _sparse_table(wanted: Destination, folder: Path) -> PlannedTable:
    """A BF16 file of the table's length that takes no disk space."""
    path, nbytes = folder / "table.bin", 2 * math.prod(wanted.shape)
    with path.open("wb") as file:
        file.truncate(nbytes)
    with open_regular(path, path.name) as (_, source):
        return PlannedTable(wanted, (TensorInfo(wanted.key, "BF16", tuple(wanted.shape), 0, nbytes, source),), None)


def make(blueprint: Blueprint, pool: Pool, cache: Path, seed: int = 0) -> Made:
    """Lease, fill and build the network; one with a draft layer is rigged, see `rig`. Raises MemoryFull."""
    need, device = blueprint.need, blueprint.device
    pool.check("made", need)
    sizes: tuple[tuple[Kind, int], ...] = (
        ("weights", need.weights),
        ("kv", need.kv),
        ("scratch", need.scratch - blueprint.staging_bytes),
    )
    weights, kv, scratch = leases = [pool.lease("made", kind, nbytes, align=ALIGNMENT) for kind, nbytes in sizes]
    random = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[str, Weight] = {}
    for planned in blueprint.plan.tensors:
        tensors[planned.destination.key] = filled(planned.carve(weights.carve), planned.destination, random)
    if blueprint.config.draft:
        rig(tensors, random)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the memory that rigging took is not the network's
    kernels = choose_kernels(device, blueprint.activation, cache)
    runner, stepper = build_runner(blueprint, tensors, kernels, (kv, scratch), Opening(pool, cache))
    arrival = cast(WeightArrival, Filled())
    return Made(blueprint, Session(leases, arrival, runner, kernels, stepper, blueprint), kernels)


# Weights that must add nothing to the residual are zero, by the last part of their key.
SILENT = frozenset(
    "output delta_output down experts_down shared_down ngram_value attn_up mlp_up mixer_up draft_mixer_up".split()  # noqa: SIM905
)


def rig(tensors: Mapping[str, Weight], random: torch.Generator) -> None:
    """Make every text one cycle over all tokens, whatever came before, and let the draft layer know it: all work is
    done, and every draft token is right. Needs an untied head.
    """
    for key, weight in tensors.items():
        if key.rpartition(".")[2] in SILENT:
            for part in (weight.scales, weight.factors) if isinstance(weight, QuantizedWeight) else (weight,):
                if part is not None:
                    part.zero_()
    embedding, head = tensors["embedding"], tensors["head"]
    if not isinstance(embedding, torch.Tensor) or not isinstance(head, torch.Tensor):
        raise ModelError("a network is rigged by its embedding and its head in floats, and these have few bits")
    embedding.copy_(normalize(embedding.float(), dim=1))
    order = torch.randperm(len(embedding), device=embedding.device, generator=random)
    head[order.roll(-1)] = 4 * embedding[order]
    identity = torch.eye(embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
    for key in ("draft_fc", "draft_fc_embedding", "draft_fc_hidden"):
        weight = tensors.get(key)
        if isinstance(weight, torch.Tensor):
            weight.zero_()
            if key != "draft_fc_hidden":
                weight[:, : identity.shape[1]] = identity


def filled(weight: Weight, wanted: Destination, random: torch.Generator) -> Weight:
    """Random numbers with the usual spread of weights; factors of norms and states are close to 1."""
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
