"""A model in memory: its leases, its network, the runner over them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..cache.kv import KVCache, KVShape
from ..core import CancelCheck, ProgressReport
from ..kernels.choose import choose_kernels
from ..loader.checkpoint import Checkpoint
from ..loader.stream import StreamStats
from ..memory.budget import Need
from ..memory.pool import Lease, Pool, Released
from ..model.families import family_of
from ..model.layers import RotaryTable, Scratch, Widths
from ..model.weights import WeightPlan, load_weights, plan_weights
from .runner import CHUNK, SCORED_ROWS, Runner


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that is known of a model before a byte of its weights is read: family, config, tensors, and what it needs."""

    checkpoint: Checkpoint
    family: ModuleType
    config: Any
    plan: WeightPlan
    context: int
    activation: torch.dtype

    @property
    def widths(self) -> Widths:
        return self.config.widths

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.layers, self.widths.kv_heads, self.widths.head_dim, self.activation)

    @property
    def need(self) -> Need:
        tables = RotaryTable.nbytes(self.context, self.widths.head_dim)
        buffers = Scratch.nbytes(self.widths, self.chunk, SCORED_ROWS, self.activation)
        return Need(self.plan.nbytes, self.kv_shape.nbytes(self.context), tables + buffers)

    @property
    def chunk(self) -> int:
        return min(CHUNK, self.context)


def draw_blueprint(checkpoint: Checkpoint, device: torch.device, context: int) -> Blueprint:
    """Check config and tensors against each other. Raises ModelError; allocates nothing."""
    family = family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    plan = plan_weights(family.destinations(config), checkpoint)
    activation = plan.dtype if device.type == "cuda" else torch.float32
    return Blueprint(checkpoint, family, config, plan, context, activation)


@dataclass(slots=True)
class Session:
    """An open model. `release` returns every lease; the session cannot be used afterwards."""

    runner: Runner
    leases: tuple[Lease, ...]
    loaded: StreamStats
    kernels: str

    def held_bytes(self) -> int:
        return sum(lease.nbytes for lease in self.leases)

    def release(self) -> tuple[Released, ...]:
        return tuple(lease.release() for lease in self.leases)


def open_session(
    owner: str, blueprint: Blueprint, pool: Pool, kernel_cache: Path, progress: ProgressReport | None, cancel: CancelCheck | None
) -> Session:
    """Lease what the model needs, stream its weights, build its network.

    Raises MemoryFull before anything is leased, Cancelled and FileError with every lease returned.
    """
    need = blueprint.need
    pool.check(owner, need)
    with ExitStack() as undo:
        leases = []
        for kind, nbytes in (("weights", need.weights), ("kv", need.kv), ("scratch", need.scratch)):
            lease = pool.lease(owner, kind, nbytes, align=256)
            undo.callback(lease.release)
            leases.append(lease)
        weights, kv, scratch = leases
        tensors, loaded = load_weights(blueprint.plan, weights, progress, cancel)
        device = tensors["embedding"].device
        kernels = choose_kernels(device, blueprint.activation, kernel_cache)
        rotary = RotaryTable.build(scratch, blueprint.context, blueprint.widths.head_dim, blueprint.config.rope_theta)
        network = blueprint.family.build(blueprint.config, tensors, kernels, rotary)
        cache = KVCache(kv, blueprint.kv_shape, blueprint.context)
        buffers = Scratch(scratch, blueprint.widths, blueprint.chunk, SCORED_ROWS, blueprint.activation)
        undo.pop_all()
        return Session(Runner(network, cache, buffers, device), tuple(leases), loaded, f"{kernels.name}: {kernels.reason}")
