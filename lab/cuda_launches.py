"""Records every kernel launch of the host code for published shapes, on a CUDA device that need not exist.

Weights, cache and rows are on torch's "meta" device, which has shapes and addresses but no memory. Networks, plans and
sampler are those of a session. Triton calls a hook before it compiles a new variant of a kernel: ours records the
variant and reports it as handled.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from ..service.cache.hybrid_kv import HybridKV
from ..service.cache.paged import PagedKV
from ..service.cache.recurrent import RecurrentStates
from ..service.catalog.known_configs import PUBLISHED
from ..service.engine.buffers import MAX_BATCH, ChunkBuffers, DecodeBuffers, FewRows
from ..service.engine.device_plan import PLAN_ROWS, Needs
from ..service.engine.device_sampler import DeviceSampler
from ..service.engine.runner import SCORED_ROWS
from ..service.engine.session import Blueprint
from ..service.errors import RequestError
from ..service.kernels import cuda as fused
from ..service.kernels.cuda.cuda_plan import GpuDevice
from ..service.kernels.forward_batch import FEW_ROWS, RotaryTable
from ..service.loader.checkpoint import Checkpoint
from ..service.model.decoder import build_draft
from ..service.model.draft import COUNTS, with_draft
from ..service.model.families import describe, family_of, text_config
from ..service.model.layers import Decoder, Scratch
from ..service.model.spec import Destination
from ..service.model.weights import PlannedTensor, WeightPlan, turned_into
from ..service.quant.formats import FP8_BLOCKS, INT8, NVFP4, int4
from ..service.quant.weight import Format

Held: TypeAlias = Callable[[Destination], Format | None]
# The default context, and one whose key blocks fill several tiles of an indexer.
CONTEXTS = (4096, 32768)
# Rows of a prompt's passes besides the longest: a few more than a step's, and more than a tile of any kernel.
SHORT, MIDDLE = 24, 300
# One layer of each kind is enough, and an n-gram table whose primes are found quickly.
FEWER: Mapping[str, int] = {"num_hidden_layers": 2, "full_attention_interval": 2, "ngram_vocab_size_base": 1009}


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A variant of a kernel as Triton distinguishes it: types of arguments, constants, specializations of arguments,
    options.

    `first`: the pass that launched it first. `part`: the module of the kernel, without `triton_`.
    """

    kernel: Any
    part: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    first: str

    @property
    def form(self) -> str:
        """Its constants and options, as far as they distinguish variants."""
        names = list(self.signature)
        said = [f"{names[at[0]]}={value}" for at, value in self.constants.items() if len(at) == 1]
        given = {"num_warps": "warps", "num_stages": "stages", "maxnreg": "maxnreg"}
        return " ".join([*said, *(f"{word}={self.options[key]}" for key, word in given.items() if self.options[key])])


def _whole(aim: Format) -> Held:
    return lambda wanted: turned_into(wanted, aim)


def _layers(held: Format) -> Held:
    """As published checkpoints have them: the matrices of the layers, not their routers, embedding and head."""
    return lambda wanted: held if not wanted.wide and len(wanted.shape) == 2 and wanted.bits <= 4 else None


def _experts(held: Format) -> Held:
    return lambda wanted: held if ".experts_" in wanted.key else None


# Weight formats, and the activation type if it is not BF16.
FORMS: Mapping[str, tuple[Held, torch.dtype]] = {
    "bf16": (lambda _: None, torch.bfloat16),
    "fp16": (lambda _: None, torch.float16),
    "int8": (_whole(INT8), torch.bfloat16),
    "int4": (_whole(int4()), torch.bfloat16),
    "fp8": (_layers(FP8_BLOCKS), torch.bfloat16),
    "nvfp4": (_layers(NVFP4), torch.bfloat16),
    "awq": (_layers(int4(symmetric=False)), torch.float16),
    "gptq-g32": (_layers(int4(32)), torch.float16),
    "experts-int4": (_experts(int4()), torch.bfloat16),
    "experts-fp8": (_experts(FP8_BLOCKS), torch.bfloat16),
    "experts-nvfp4": (_experts(NVFP4), torch.bfloat16),
}
# The formats in which each shape is opened.
SHAPES: Mapping[str, Sequence[str]] = {
    "Qwen3-0.6B": ("bf16", "int8", "int4"),
    "Qwen3-4B": ("bf16", "fp16", "int8", "int4", "fp8", "nvfp4", "awq", "gptq-g32"),
    "Qwen3.5-4B": ("bf16", "int8", "int4", "fp8", "nvfp4"),
    "Qwen3-30B-A3B": ("bf16", "int8", "int4", "fp8", "nvfp4"),
    "Qwen3.8-Flash-Next": ("bf16", "int8", "int4", "experts-int4", "experts-fp8", "experts-nvfp4"),
}


def launches_of(arch: int, device: GpuDevice, shapes: Mapping[str, Sequence[str]]) -> list[KernelVariant]:
    """All variants that `shapes` (names of PUBLISHED, each in formats of FORMS) use on a device of compute capability
    arch / 10.

    Raises RequestError if Triton is missing, or interprets.
    """
    found: dict[tuple[str, str], KernelVariant] = {}
    with recording(arch, found) as at:
        for name, forms in shapes.items():
            for form in forms:
                session = _PassRecorder(name, form, device, CONTEXTS[0])
                session.run(at)
                if session.chooses:
                    _PassRecorder(name, form, device, CONTEXTS[1]).run(at)
    return list(found.values())


class LaunchLabel:
    """What is launched now, in words."""

    def __init__(self) -> None:
        self.words = ""


@contextmanager
def recording(arch: int, found: dict[tuple[str, str], KernelVariant]) -> Iterator[LaunchLabel]:
    """Within the block, launches of Triton kernels do not compile and do nothing. Each new
    variant goes into `found`.
    """
    try:
        from triton import knobs
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise RequestError(f"Triton does not load ({error}); install triton for this torch") from error
    label, before = LaunchLabel(), driver._active

    def note(*, key: str, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        if (fn.name, key) not in found:
            options = json.loads(compile["specialization_data"])["options"]
            parts = compile["signature"], compile["constants"], compile["configs"][0], _frozen(options)
            found[fn.name, key] = KernelVariant(kernel, part_of(kernel), kernel.fn.__name__, *parts, label.words)
        kernel.device_caches[arch][0][key] = _Known()
        return True

    if not all(isinstance(kernel, JITFunction) for kernel in kernels_of_tree().values()):
        raise RequestError("Triton interprets its kernels here; unset TRITON_INTERPRET")
    driver.set_active(_Absent(arch))  # pyright: ignore[reportArgumentType] - as far as the hook is asked
    try:
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = note
            yield label
    finally:
        driver._active = before
        for launch in found.values():
            launch.kernel.device_caches.pop(arch, None)


def _frozen(value: Any) -> Any:
    """Lists from JSON as the tuples that they were."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class _Known:
    """Stands in for a compiled kernel, as far as Triton looks at it, so that it reports no variant twice."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


class _Absent:
    """As much of a Triton driver as a launch needs before it compiles. The device number is the architecture."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        return target_of(self._arch)

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, _: int) -> int:
        return 0


def target_of(arch: int) -> Any:
    """The target that Triton compiles for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


def part_of(kernel: Any) -> str:
    """The module name of a kernel without `triton_`."""
    return kernel.module.rsplit(".", 1)[-1].removeprefix("triton_")


def parts_of_tree() -> list[str]:
    """The names of all kernel modules without `triton_`."""
    return sorted(path.stem.removeprefix("triton_") for path in Path(fused.__path__[0]).glob("triton_*.py"))


def kernels_of_tree() -> dict[str, Any]:
    """All functions in the triton_* modules that Triton compiles and no other one calls, by name."""
    modules = [import_module(f"{fused.__name__}.triton_{part}") for part in parts_of_tree()]
    own = {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if getattr(each, "module", None) == module.__name__
    }
    called = {name for each in own.values() for name in _called(each.src)}
    return {name: each for name, each in own.items() if name not in called}


def _called(source: str) -> set[str]:
    """Names of the functions that a function calls."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


class _Nowhere:
    """A lease, and a table in files, without any content."""

    @staticmethod
    def carve(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def announce(self, rows: Sequence[int]) -> None:
        pass

    def read(self, rows: Sequence[int], out: torch.Tensor) -> None:
        pass


def _nowhere() -> Any:
    """Typed as Any, it serves as a lease or a table."""
    return _Nowhere()


class _PassRecorder:
    """A network of one period of layers on no device, with the passes of a session."""

    def __init__(self, name: str, form: str, device: GpuDevice, context: int) -> None:
        from ..service.kernels.cuda.cuda_fused import FusedCudaKernels

        self._title = f"{name} {form}"
        nowhere = _nowhere()
        blueprint = _blueprint(name, form, context)
        config, widths = blueprint.config, blueprint.widths
        tensors = {planned.destination.key: planned.carve(nowhere.carve) for planned in blueprint.plan.tensors}
        kernels = FusedCudaKernels(blueprint.activation, device)
        kernels.reserve(
            [
                nowhere.carve(*buffer)
                for buffer in kernels.workspace_spec(widths.shape, context, blueprint.activation, widths.columns)
            ]
        )
        rotary = RotaryTable.build(nowhere, context, config.rotary_dim, config.rope_theta, config.yarn)
        tables = {wanted.key: nowhere for wanted in blueprint.family.destinations(config) if wanted.in_file}
        self._blueprint = blueprint
        self._network: Decoder = blueprint.family.build(config, tensors, kernels, rotary, tables)
        if not self._network.captured:
            raise RequestError(
                f"{self._title}: a step is no graph on this device; see the log for what has no fused kernel"
            )
        states, kv = blueprint.state_shape, (nowhere, blueprint.kv_shape)
        paged = (context, blueprint.sequences)
        self._cache = (
            PagedKV(*kv, *paged) if states is None else HybridKV(*kv, RecurrentStates(nowhere, states), *paged)
        )
        self._scratch = Scratch(nowhere, widths, blueprint.rows, SCORED_ROWS, blueprint.activation)
        self._chunk = ChunkBuffers(nowhere, self._cache, blueprint.rows)
        self._step = DecodeBuffers(nowhere, self._network, self._cache, self._scratch)
        self._sampler = DeviceSampler(nowhere, MAX_BATCH, widths.vocab, kernels.half, early=device.early)
        self._draft = build_draft(config, tensors, self._network, rotary) if config.draft else None

    @property
    def chooses(self) -> bool:
        """Whether attention selects key blocks, whose kernels depend on the context."""
        return self._blueprint.config.indexer is not None

    def run(self, at: LaunchLabel) -> None:
        """Every kind of pass."""
        for batch in range(1, MAX_BATCH + 1):
            at.words = f"{self._title}, a step of {batch}"
            self._decode(batch)
            at.words = f"{self._title}, a check of {batch}"
            self._check(batch)
        longest, context = self._blueprint.rows, self._blueprint.context
        few = [(0, count) for count in range(1, FEW_ROWS + 1)]
        for start, count in (
            *few,
            (0, SHORT),
            (0, MIDDLE),
            (0, longest),
            (context - longest, longest),
            (context - MIDDLE, MIDDLE),
        ):
            at.words = f"{self._title}, {count} rows after {start}"
            self._prefill(start, count)
        for count in range(1, FEW_ROWS + 1):
            at.words = f"{self._title}, a draft after {count}"
            self._guess(count)

    def _decode(self, batch: int) -> None:
        sequences = [self._cache.open(FEW_ROWS) for _ in range(batch)]
        self._step.fill(sequences, [5] * batch)
        self._choose(batch, self._step.step(batch, self._blueprint.context, prepared=True))
        for sequence in sequences:
            sequence.close()

    def _check(self, count: int) -> None:
        """Verify passes are for networks with recurrent states only, see GraphStepper."""
        if self._cache.states is None:
            return
        with self._cache.open(FEW_ROWS) as sequence:
            self._step.fill_verify(sequence, [5] * count)
            self._choose(count, self._step.step(count, self._blueprint.context, prepared=True, verify=True))

    def _choose(self, batch: int, scores: torch.Tensor) -> None:
        plan = self._sampler.plan.view(-1)[: PLAN_ROWS * batch].view(PLAN_ROWS, batch)
        self._sampler.feed(plan, self._step.ids, self._step.positions)
        for needs in (Needs(), Needs(draws=True), Needs(draws=True, adjusts=True, measures=True)):
            self._sampler.choose(scores, plan, needs)

    def _prefill(self, start: int, count: int) -> None:
        with self._cache.open(start + count) as sequence:
            sequence.ensure(start)
            sequence.advance(start)
            ids, rows = self._chunk.fill(sequence, [5] * count, [5] * FEW_ROWS)
            state = self._network.forward(ids, rows, self._cache, self._scratch)
            for scored in (1, SCORED_ROWS):
                self._network.logits(state[:scored], self._scratch)

    def _guess(self, count: int) -> None:
        shape, lease = self._blueprint.draft_shape, _nowhere()
        if self._draft is None or shape is None:
            return
        cache = shape.cache(lease)
        few = FewRows(lease, cache)
        with cache.open(count) as sequence:
            few.fill(sequence, count, [5] * count)
            self._draft.last(self._draft.forward(few.ids[:count], few.rows[count], cache, self._scratch), self._scratch)


def _blueprint(name: str, form: str, context: int) -> Blueprint:
    """The shape with fewer layers, otherwise as published."""
    config = dict(text_config(PUBLISHED[name]))
    config |= {key: value for key, value in FEWER.items() if key in config}
    family, described = family_of(config), describe(config)
    if any(config.get(key) for key in COUNTS):
        described = with_draft(described)
    held, activation = FORMS[form]
    tensors = [
        PlannedTensor(wanted, held(wanted) or (torch.float32 if wanted.wide else activation), activation, ())
        for wanted in family.destinations(described)
        if not wanted.in_file
    ]
    checkpoint = Checkpoint(Path(), name, config, MappingProxyType({}), MappingProxyType({}), 0)
    return Blueprint(
        checkpoint, family, described, WeightPlan(tuple(tensors)), context, activation, torch.device("cuda"), MAX_BATCH
    )
