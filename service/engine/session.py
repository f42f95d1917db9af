"""An open model: its leases, its network, and the runner over them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import torch

from ..cache.hybrid_kv import HybridKV
from ..cache.paged import KVShape, PagedKV
from ..cache.recurrent import RecurrentStates, StateShape
from ..core import CancelCheck, ProgressReport
from ..errors import Field, RequestError
from ..kernels.choose import choose_kernels, row_reader, workspace_bytes
from ..kernels.forward_batch import BLOCK, RotaryTable
from ..kernels.reference import ReferenceKernels
from ..loader.checkpoint import Checkpoint
from ..loader.stream import StreamStats
from ..memory.budget import Need, show
from ..memory.lease import GiveWay
from ..memory.policy import Kind, Policy
from ..memory.pool import Lease, Pool, Released
from ..model.arrival import WeightArrival
from ..model.converted import plan_form
from ..model.decoder import build_draft
from ..model.draft import carried_width, draft_part, without_draft
from ..model.families import read_family
from ..model.layers import Scratch, Widths
from ..model.positions import BEFORE
from ..model.shape import DecoderConfig
from ..model.tables import open_tables
from ..model.weights import WeightPlan
from ..quant.weight import QuantizedWeight, Weight
from .buffers import MAX_BATCH, ChunkBuffers, DecodeBuffers
from .cuda_graphs import Graphs
from .drafting import DRAFT_CONTEXT, FORK_TOKENS, Drafting, DraftShape
from .graph_stepper import graph_stepper, graph_stepper_bytes
from .prefix import PrefixIndex
from .runner import SCORED_ROWS, Runner, chunk_rows
from .short_passes import ShortPasses, short_passes
from .speculate import PassCosts
from .stepper import HostStepper, Stepper

log = logging.getLogger(__name__)

ALIGNMENT = 256
DEFAULT_CONTEXT = 4096
# Recurrent states besides those of sequences that decode together: of a shared prompt, and of cached prefixes. A
# sequence that decodes alone uses the others' states for its draft tokens.
KEPT_STATES = 4


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model before its weights are read: family, config, tensors, and the bytes that it needs.

    Its KV cache has blocks for `sequences` of `context` tokens; more and shorter ones may share them.
    """

    checkpoint: Checkpoint
    family: ModuleType
    config: DecoderConfig
    plan: WeightPlan
    context: int
    activation: torch.dtype
    device: torch.device
    sequences: int = 1
    capability: tuple[int, int] | None = None  # of another machine's GPU; None: of this one's

    @property
    def widths(self) -> Widths:
        return self.config.widths

    @property
    def kv_shape(self) -> KVShape:
        indexer = self.config.indexer
        pooled = (BLOCK // indexer.ratio, indexer.dim) if indexer else (0, 0)
        return KVShape(
            self.config.attention_layers, self.widths.kv_heads, self.widths.head_dim, self.activation, pooled
        )

    @property
    def state_shape(self) -> StateShape | None:
        """The recurrent states of sequences; None where the network has no such layers."""
        layers = self.config.states
        return StateShape(layers, 1 + MAX_BATCH + KEPT_STATES, MAX_BATCH) if layers else None

    @property
    def draft_shape(self) -> DraftShape | None:
        """What drafting takes besides the weights of the layer for multi-token prediction; None without it."""
        if not self.config.draft:
            return None
        tail, whole = self.config.indexer.state if self.config.indexer else (), self.kv_shape
        context = min(self.context, DRAFT_CONTEXT) + FORK_TOKENS
        return DraftShape(replace(whole, layers=1), tail, context, carried_width(self.config), self.rows)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the layer for multi-token prediction in the weights lease."""
        return sum(tensor.nbytes for tensor in self.plan.tensors if tensor.destination.part == draft_part(self.config))

    def without_draft(self) -> Blueprint:
        """The same without the layer for multi-token prediction."""
        tensors = tuple(tensor for tensor in self.plan.tensors if tensor.destination.part != draft_part(self.config))
        return replace(self, config=without_draft(self.config), plan=replace(self.plan, tensors=tensors))

    def fitted(self, pool: Pool) -> Blueprint:
        """Cut to the budget: fewer sequences, then no layer for multi-token prediction. It may still not fit."""
        if self.need.with_headroom(pool.settings.headroom) <= pool.budget.spendable:
            return self
        if self.sequences > 1:
            return replace(self, sequences=self.sequences - 1).fitted(pool)
        if not self.config.draft:
            return self
        log.info("%s: no memory for multi-token prediction (%s)", self.checkpoint.name, show(self.draft_bytes))
        return self.without_draft()

    @property
    def need(self) -> Need:
        widths, context, states, draft = self.widths, self.context, self.state_shape, self.draft_shape
        parts = (
            RotaryTable.nbytes(context, self.config.rotary_dim, self.turned_rows),
            Scratch.nbytes(widths, self.rows, SCORED_ROWS, self.activation),
            ChunkBuffers.nbytes(context, self.rows, recurrent=states is not None),
            DecodeBuffers.nbytes(context, recurrent=states is not None, turned=bool(self.config.axes)),
            workspace_bytes(self.device, widths.shape, context, self.activation, widths.columns, self.capability),
            graph_stepper_bytes(self.device, widths.vocab),
            ShortPasses.nbytes(context) if self.device.type == "cuda" else 0,
            draft.scratch_bytes if draft else 0,
        )
        kv = self.kv_shape.nbytes(context, self.sequences)
        kv += (states.nbytes if states else 0) + (draft.kv_bytes if draft else 0)
        scratch = sum(parts) + self.staging_bytes
        return Need(self.plan.nbytes, kv, scratch, context=context, weights_of=self.plan.weights_of)

    @property
    def staging_bytes(self) -> int:
        """Bytes of scratch for converting weights while they are read; they are returned after it."""
        return self.plan.staging_bytes(self.device)

    @property
    def rows(self) -> int:
        """Rows of the largest pass: a prefill chunk, or a step of all sequences that can decode together."""
        chunk = chunk_rows(self.device, sparse=self.config.experts is not None)
        return max(MAX_BATCH, min(chunk, self.context * self.sequences))

    @property
    def turned_rows(self) -> int:
        """Extra rows of the rotary table for a chunk with pictures; 0 for a model that reads none."""
        return self.rows + BEFORE if self.config.axes else 0

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads: only chosen experts; the embedding only if it is the head."""
        every = self.without_draft().plan.tensors
        keys = {tensor.destination.key for tensor in every}
        read = (tensor for tensor in every if tensor.destination.key != "embedding" or "head" not in keys)
        return sum(round(tensor.nbytes * tensor.destination.used) for tensor in read)

    @property
    def draft_token_bytes(self) -> int:
        """Bytes of weights that drafting one token reads, the head included; 0 without the draft layer."""
        head = "head" if any(tensor.destination.key == "head" for tensor in self.plan.tensors) else "embedding"
        part = draft_part(self.config)
        own = (t for t in self.plan.tensors if t.destination.part == part or t.destination.key == head)
        return sum(round(tensor.nbytes * tensor.destination.used) for tensor in own) if self.config.draft else 0


def pick_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda". Raises RequestError for one that does not exist."""
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(Field("device"), f" is {device!r}; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError(Field("device"), " is cuda, but torch sees no CUDA device here; use auto or cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def pick_context(context: int | None, allowed: int) -> int:
    """The context to open with: as asked, or 4,096 if the model allows it. Raises RequestError with both numbers."""
    if context is None:
        return min(DEFAULT_CONTEXT, allowed)
    if isinstance(context, bool) or not isinstance(context, int) or context < 2:
        raise RequestError(Field("context"), f" is {context!r}; use a whole number from 2")
    if context > allowed:
        raise RequestError(
            Field("context"), f" is {context}, but the model's config allows {allowed}; use at most that"
        )
    return context


def draw_blueprint(
    checkpoint: Checkpoint,
    device: torch.device,
    context: int,
    quant: str = "none",
    cache: Path | None = None,
    *,
    draft: bool = True,
) -> Blueprint:
    """Check config and tensors against each other, for weights held as `quant`; `cache` may have converted weights.

    With the layer for multi-token prediction where there is one and tokens are drafted, unless `draft` is false. Raises
    ModelError; allocates nothing.
    """
    family, config, checkpoint = read_family(checkpoint, draft=draft)
    plan = plan_form(lambda: family.destinations(config), checkpoint, quant, cache)
    activation = plan.dtype if device.type == "cuda" else torch.float32
    return Blueprint(checkpoint, family, config, plan, context, activation, device)


def sketch(
    family: ModuleType, config: DecoderConfig, device: torch.device, capability: tuple[int, int] | None = None
) -> Blueprint:
    """A blueprint without files and weights, for the bytes of all else: KV cache, states, scratch."""
    checkpoint = Checkpoint(Path(), "", MappingProxyType({}), MappingProxyType({}), MappingProxyType({}), 0)
    activation = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Blueprint(
        checkpoint, family, config, WeightPlan(()), DEFAULT_CONTEXT, activation, device, capability=capability
    )


class Session:
    """An open model: its leases, weights that may still be loading, and the runner over them.

    The runner may prefill at once: each layer waits for its own weights. `settle` must be called before decode.
    """

    def __init__(
        self,
        leases: Sequence[Lease],
        arrival: WeightArrival,
        runner: Runner,
        kernels: ReferenceKernels,
        stepper: Stepper,
        blueprint: Blueprint,
    ) -> None:
        self.runner = runner
        # The prefix cache; it is evicted block by block.
        self.prefix = PrefixIndex(runner.kv)
        runner.kv.evictor = self.prefix
        self.stepper = stepper
        # Bytes that a pass reads, and a draft token: computed once, for it takes longer than anything else before a
        # first token.
        self.pass_bytes, self.draft_token_bytes = blueprint.pass_bytes, blueprint.draft_token_bytes
        self.costs = PassCosts(draft_share=self.draft_token_bytes / max(1, self.pass_bytes))
        self.kernels = f"{kernels.name}: {kernels.reason}"
        self.leases = tuple(leases)
        self._arrival = arrival
        self.settled = False  # whether `settle` was called, and so the cost of loading counted

    @property
    def arrived(self) -> bool:
        """Whether all weights are in memory; `settle` need not wait then."""
        return self._arrival.complete

    def settle(self) -> StreamStats:
        """Wait until all weights are in memory; returns the cost of reading them. Raises Cancelled, FileError."""
        stats = self._arrival.finish()
        self.runner.gate = None
        if not self.settled:
            self.leases[0].seal()  # in debug mode: weights must not change from here on
        self.settled = True
        return stats

    @property
    def waited(self) -> float:
        """Seconds that the computation waited for weights."""
        return self._arrival.waited

    def held_bytes(self) -> int:
        """Bytes of all leases."""
        return sum(lease.nbytes for lease in self.leases if not lease.released)

    def checksums(self, plan: WeightPlan) -> dict[str, int]:
        """A CRC-32 of each tensor of `plan` in memory, by the name of its first part in the checkpoint."""
        named = {tensor.parts[0].name: self._arrival.tensors[tensor.destination.key] for tensor in plan.tensors}
        return {
            name: _checksum(weight.tensors if isinstance(weight, QuantizedWeight) else (weight,))
            for name, weight in named.items()
        }

    def offer(self, policy: Policy, give_way: GiveWay) -> None:
        """Set the policy of all leases; `give_way` returns all of them."""
        for lease in self.leases:
            lease.offer(policy=policy, give_way=give_way)

    @contextmanager
    def using(self) -> Iterator[None]:
        """Mark every lease as in use: none is returned until the code block ends."""
        with ExitStack() as held:
            for lease in self.leases:
                held.enter_context(lease.using())
            yield

    def release(self) -> tuple[Released, ...]:
        """Return every lease. Loading stops, and every tensor is dropped first: a device counts views of its memory."""
        self._arrival.stop()
        self.stepper.close()
        self.runner.kv.evictor = None  # index and cache refer to each other
        del self.stepper, self.prefix
        self.runner.close()
        return tuple(lease.release() for lease in self.leases)


def _make_cache(lease: Lease, blueprint: Blueprint) -> PagedKV:
    """The cache of a session in its KV lease."""
    states = blueprint.state_shape
    if states is None:
        return PagedKV(lease, blueprint.kv_shape, blueprint.context, blueprint.sequences)
    return HybridKV(lease, blueprint.kv_shape, RecurrentStates(lease, states), blueprint.context, blueprint.sequences)


def _checksum(tensors: Sequence[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.cpu().view(-1).view(torch.uint8).numpy().data, value)
    return value


@dataclass(frozen=True, slots=True)
class Opening:
    """The pool of a session's bytes, the folder of compiled kernels, and the callbacks of the load."""

    pool: Pool
    kernel_cache: Path
    progress: ProgressReport | None = None
    cancel: CancelCheck | None = None


def open_session(owner: str, blueprint: Blueprint, opening: Opening) -> Session:
    """Lease what the model needs, start loading its weights, and build its network over them.

    One owner opens at a time. Raises MemoryFull before anything is leased, Cancelled and FileError with every lease
    returned.
    """
    need, pool = blueprint.need, opening.pool
    read = (reading.info.file for tensor in blueprint.plan.tensors for reading in tensor.readings)
    with pool.loads(owner, opening.cancel), pool.files.reading(read), ExitStack() as undo:
        pool.check(owner, need)
        leases: list[Lease] = []
        kinds: tuple[tuple[Kind, int], ...] = (
            ("weights", need.weights),
            ("kv", need.kv),
            ("scratch", need.scratch - blueprint.staging_bytes),
        )
        for kind, nbytes in kinds:
            lease = pool.lease(owner, kind, nbytes, align=ALIGNMENT)
            undo.callback(lease.release)
            leases.append(lease)
        weights, kv, scratch = leases
        staging = (
            pool.lease(owner, "scratch", blueprint.staging_bytes, align=ALIGNMENT) if blueprint.staging_bytes else None
        )
        if staging is not None:
            undo.callback(lambda: None if staging.released else staging.release())  # the reader returns it too
        # Kernels are imported, and in a new cache compiled, while weights are read; to convert weights they are needed.
        kernels = _kernels(blueprint, opening) if staging is not None else None
        faster = kernels.quantize if kernels is not None else None
        arrival = WeightArrival(
            blueprint.plan, weights, opening.progress, opening.cancel, staging, faster, pool.files
        ).start()
        undo.callback(arrival.stop)  # first: it reads while the rest is built
        kernels = kernels or _kernels(blueprint, opening)
        runner, stepper = build_runner(blueprint, arrival.tensors, kernels, (kv, scratch), opening, arrival)
        undo.pop_all()
        return Session(leases, arrival, runner, kernels, stepper, blueprint)


def _kernels(blueprint: Blueprint, opening: Opening) -> ReferenceKernels:
    return choose_kernels(blueprint.device, blueprint.activation, opening.kernel_cache, opening.cancel)


def build_runner(
    blueprint: Blueprint,
    tensors: Mapping[str, Weight],
    kernels: ReferenceKernels,
    leases: tuple[Lease, Lease],
    opening: Opening,
    gate: WeightArrival | None = None,
) -> tuple[Runner, Stepper]:
    """The network over `tensors` (keys of the plan's destinations) and its runner, in the `leases` of caches and of
    scratch.

    `gate`: see Runner. Raises FileError for tables that cannot be read, Cancelled.
    """
    kv, scratch = leases
    config, widths, context = blueprint.config, blueprint.widths, blueprint.context
    turned = config.axes, blueprint.turned_rows
    rotary = RotaryTable.build(scratch, context, config.rotary_dim, config.rope_theta, config.yarn, *turned)
    reader = row_reader(opening.kernel_cache, opening.cancel) if blueprint.plan.tables else None
    network = blueprint.family.build(config, tensors, kernels, rotary, open_tables(blueprint.plan.tables, reader))
    pages, draft_shape = _make_cache(kv, blueprint), blueprint.draft_shape
    passes = Scratch(scratch, widths, blueprint.rows, SCORED_ROWS, blueprint.activation)
    steps = DecodeBuffers(scratch, network, pages, passes, turned=bool(config.axes))
    buffers = ChunkBuffers(scratch, pages, blueprint.rows), steps
    wanted = kernels.workspace_spec(widths.shape, context, blueprint.activation, widths.columns)
    kernels.reserve([scratch.carve(shape, dtype) for shape, dtype in wanted])
    graphs, drafting = Graphs(), None
    if draft_shape is not None:
        layer = build_draft(config, tensors, network, rotary)
        drafting = Drafting(layer, draft_shape, passes, (kv, scratch), graphs)
    dense = blueprint.device.type == "cuda" and config.experts is None  # with experts it was not measured yet
    short = short_passes(scratch, network, pages, passes, graphs) if dense else None
    runner = Runner(network, pages, passes, buffers, gate, drafting, rotary, short)
    return runner, graph_stepper(runner, scratch, widths.vocab, graphs) or HostStepper(runner)
