"""`onedesk doctor --plan`: in which quantization a model would fit a machine, and how much memory is left for image
models. It reads the config alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..config import Config, load_config
from ..console import UsageError
from ..engine.session import DEFAULT_CONTEXT, Blueprint, sketch
from ..errors import Field, FileError, ModelError, RequestError
from ..loader.checkpoint import CONFIG, HF_QUANT, modelopt_settings
from ..loader.files import exists
from ..loader.json_files import read_json_object
from ..memory.budget import MemorySettings, show
from ..memory.truth import read_truth
from ..model.draft import with_draft
from ..peers.cluster import Share, cluster
from ..quant.published import KEY
from .composition import Composition, compose
from .decode_speed import DecodeSpeed
from .footprint import longest
from .forms import SIZED, Engine, Form, Sized, form_of_config, forms_of
from .known_configs import PUBLISHED, published_name

# The most memory that cached rows of the n-gram table take where they are read from the file.
TABLE_CACHE = 512 << 20
# A GPU of another machine is assumed to support the fused kernels.
ASSUMED_CAPABILITY = (8, 0)
STEP = 256  # tokens; a shorter context is not worth naming
LARGEST_LIMIT = 0.95  # what [memory] limit may be at most


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """The machine that a plan is made for: its available bytes and the rules for using them. Each of `nodes` machines
    is the same.

    `images`: bytes reserved for image models; [memory] limit is then chosen to suit. None: the configured limit holds.
    `draft`: draft layers are opened where they fit. `speed`: for the decode speed to expect; None: no estimate.
    """

    memory: int
    images: int | None
    settings: MemorySettings
    device: str
    nodes: int = 1
    draft: bool = True
    speed: DecodeSpeed | None = None

    @property
    def largest(self) -> int:
        """Bytes for a model with its headroom, at the highest limit that may be set."""
        most = int(self.memory * LARGEST_LIMIT * (1 - self.settings.kept_back))
        return max(0, min(most, self.memory - self.settings.floor - (self.images or 0)))

    @property
    def room(self) -> int:
        """Bytes for a model with its headroom."""
        if self.images is not None:
            return self.largest
        limit = self.settings.limit_bytes or int(self.memory * self.settings.limit)
        return max(
            0, min(self.largest, int(min(limit, self.memory - self.settings.floor) * (1 - self.settings.kept_back)))
        )

    def limit_for(self, wanted: int) -> float:
        """The [memory] limit that leaves `wanted` bytes to spend, rounded up to 0.01."""
        return math.ceil(wanted / (1 - self.settings.kept_back) / self.memory * 100) / 100


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Bytes that a form takes on one node: weights and table as counted, the rest as the `blueprint` states for
    opening.
    """

    weights: int
    table: int
    blueprint: Blueprint
    nodes: int = 1

    @property
    def kv_token(self) -> int:
        """KV cache bytes per token on a node. Where the key heads are not divisible, every node keeps all of them."""
        return self.blueprint.kv_shape.token_bytes // math.gcd(self.blueprint.widths.kv_heads, self.nodes)

    def kv(self, context: int) -> int:
        """Bytes of keys, values, indexer keys and recurrent states."""
        if self.nodes == 1:
            return replace(self.blueprint, context=context).need.kv
        states = self.blueprint.state_shape
        return context * self.kv_token + (-(-states.nbytes // self.nodes) if states else 0)

    def scratch(self, context: int) -> int:
        """Bytes of a pass's buffers and the kernels' workspace."""
        return replace(self.blueprint, context=context).need.scratch

    def wanted(self, context: int, headroom: float) -> int:
        """All bytes, headroom included."""
        return math.ceil((self.weights + self.table + self.kv(context) + self.scratch(context)) * (1 + headroom))


def run(args: argparse.Namespace, speed: DecodeSpeed | None) -> dict[str, Any]:
    """The document for the command line. Raises UsageError, ModelError, FileError, RequestError."""
    if args.check is not None:
        raise UsageError("--check and --plan exclude each other; give one of them")
    return plan_model(
        args.plan,
        load_config(args.config),
        memory=args.memory,
        images=args.images,
        nodes=args.nodes,
        context=args.context,
        device=args.device,
        speed=speed,
    )


def planned_device(memory: int | None, device: str) -> str:
    """cpu or cuda: this machine's device, or another machine's, which has a GPU unless `device` is cpu."""
    from ..api import pick_device

    return pick_device(device).type if memory is None else "cpu" if device == "cpu" else "cuda"


def plan_model(
    name: str,
    config: Config,
    *,
    memory: int | None = None,
    images: int | None = None,
    nodes: int = 1,
    context: int | None = None,
    device: str = "auto",
    speed: DecodeSpeed | None = None,
) -> dict[str, Any]:
    """Every form of the model `name` (published, or a folder with a config.json) on a machine of `memory` bytes, by
    default this one.

    Another machine is assumed to have a GPU unless `device` is cpu. Bytes are integers. Raises ModelError, FileError,
    RequestError.
    """
    title, described = find_config(name, config)
    network = compose(described)
    values: dict[str, Any] = dict(config.memory)
    kind = planned_device(memory, device)
    machine = PlannedMachine(
        read_truth(kind).available if memory is None else memory,
        images,
        MemorySettings(**values),
        kind,
        nodes,
        config.draft,
        speed,
    )
    if machine.memory < 1:
        raise RequestError("--memory is 0 B; name what the machine can give, such as 24GiB")
    if (images or 0) > machine.memory:
        raise RequestError(
            f"--images is {show(images or 0)} of {show(machine.memory)}; name less, or a larger --memory"
        )
    allowed, heads = network.config.max_position, network.config.widths.heads
    if context is not None and context > allowed:
        raise RequestError(
            Field("context"), f" is {context}, but the model's config allows {allowed}; use at most that"
        )
    if heads % nodes:
        raise RequestError(
            f"--nodes is {nodes}, and {heads} attention heads do not divide by it; use a divisor of {heads}"
        )
    rows = [row for form in _forms(title, described, network, nodes) for row in _rows(form, network, machine, context)]
    several = {"cluster": _cluster(title, rows, network, machine)} if nodes > 1 else {}
    return several | {
        "model": title,
        "family": network.family,
        "parameters": network.parameters,
        "active_parameters": network.active,
        "kinds": dict(network.kinds),
        "memory": machine.memory,
        "images": images or 0,
        "room": machine.room,
        "nodes": nodes,
        "device": kind,
        "read_bytes_per_second": speed.bandwidth if speed else None,
        "forms": rows,
    }


def find_config(name: str, config: Config) -> tuple[str, dict[str, Any]]:
    """The name and config.json of a published model, of a listed one, or of a folder. Raises ModelError, FileError."""
    from .inventory import model_roots

    if not name.strip():
        raise ModelError(
            f"the name of a model is empty; known are {', '.join(PUBLISHED)}, or name a folder with a config.json"
        )
    folder = Path(name).expanduser()
    listed = {entry.name: entry.path for entry in model_roots(config).list()}
    if name in listed and listed[name].is_dir():
        folder = listed[name]
    if folder.is_dir():
        if not exists(folder / CONFIG):
            raise FileError(
                f"the folder {folder.resolve().name!r} has no config.json; name a model's own folder, or a published"
                " model"
            )
        described = read_json_object(folder / CONFIG, CONFIG)
        if described.get(KEY) is None and exists(folder / HF_QUANT):
            described[KEY] = modelopt_settings(read_json_object(folder / HF_QUANT, HF_QUANT))
        return folder.resolve().name, described
    known = published_name(name)
    if known is None:
        raise ModelError(
            f"there is no model folder {name!r}, and no published model of that name is known; known are"
            f" {', '.join(PUBLISHED)}; a folder with the model's config.json alone is enough"
        )
    return known, dict(PUBLISHED[known])


def _forms(title: str, described: dict[str, Any], network: Composition, nodes: int) -> tuple[Form | Sized, ...]:
    """All forms of a model; for a folder with quantized files, only that one."""
    if described.get(KEY) is not None:
        return (form_of_config(described, network.config.layers),)
    known = published_name(title)
    forms = (*forms_of(network), *(SIZED.get(known, ()) if known else ()))
    if nodes == 1:
        return forms
    # Several machines need vLLM: it neither quantizes BF16 files nor reads GGUF.
    return tuple(form for form in forms if (form.engine == "vllm" if isinstance(form, Sized) else not form.made))


def _rows(
    form: Form | Sized, network: Composition, machine: PlannedMachine, context: int | None
) -> list[dict[str, Any]]:
    """The form with its table left in the file first, then with all of it in memory."""
    table = form.table if isinstance(form, Sized) else form.table_bytes(network, machine.nodes)
    if not table:
        return [_row(form, form.title, 0, network, machine, context)]
    held = -(-table // machine.nodes) if isinstance(form, Sized) else table
    return [
        _row(form, f"{form.title}; table in its file", min(TABLE_CACHE, held), network, machine, context),
        _row(form, f"{form.title}; table in memory", held, network, machine, context, resident=True),
    ]


def _row(
    form: Form | Sized,
    title: str,
    table: int,
    network: Composition,
    machine: PlannedMachine,
    context: int | None,
    *,
    resident: bool = False,
) -> dict[str, Any]:
    """`resident`: all of the n-gram table is in memory."""
    weights = (
        -(-(form.file - form.table) // machine.nodes)
        if isinstance(form, Sized)
        else form.held_bytes(network, machine.nodes)
    )
    headroom, least = machine.settings.headroom, min(DEFAULT_CONTEXT, network.config.max_position)
    draft = _draft_bytes(form, network, machine)
    load, reached = _loaded(weights, table, 0, network, machine)
    if draft:  # it is left out where it does not fit, or where it would shorten the longest context
        other, with_it = _loaded(weights, table, draft, network, machine)
        draft = draft if with_it >= (max(1, reached) if context is None else context) else 0
        load, reached = (other, with_it) if draft else (load, reached)
    fits = reached >= (least if context is None else context)
    shown = context or (reached if fits else least)
    wanted = load.wanted(shown, headroom)
    engine = _engine(form, machine)
    opens = engine != "onedesk" or (_opens(form) and not resident)
    file = form.file if isinstance(form, Sized) else form.file_bytes(network)
    return {
        "format": title,
        "engine": engine,
        "bytes": {
            "weights": load.weights,
            "table": load.table,
            "kv": load.kv(shown),
            "scratch": load.scratch(shown),
            "file": file,
            "draft": draft,
        },
        "kv_per_1k": 1000 * load.kv_token,
        **_speed(form, network, machine, opens=opens),
        "fits": fits,
        "context": shown if fits else reached,
        "needs": wanted,
        "images": max(0, machine.memory - machine.settings.floor - load.wanted(context or least, headroom)),
        "opens": opens,
        "why": _why(shown, reached, wanted, machine) + _run_by(form, machine, resident),
    }


def _speed(form: Form | Sized, network: Composition, machine: PlannedMachine, *, opens: bool) -> dict[str, Any]:
    """Bytes that a token reads, and the decode speed to expect where this engine runs the form on one machine."""
    if isinstance(form, Sized) or machine.nodes > 1 or not opens:
        return {"read_per_token": None, "expected_tokens_per_second": None}
    reads = form.token_reads(network)
    expected = machine.speed.tokens_per_second(reads) if machine.speed else None
    return {"read_per_token": reads.nbytes, "expected_tokens_per_second": expected}


def _loaded(
    weights: int, table: int, draft: int, network: Composition, machine: PlannedMachine
) -> tuple[NodeLoad, int]:
    """What a form takes with `draft` bytes of a draft layer (0: without it), and the longest context that then fits."""
    config = with_draft(network.config) if draft else network.config
    blueprint = sketch(network.module, config, torch.device(machine.device), ASSUMED_CAPABILITY)
    load = NodeLoad(weights + draft, table, blueprint, machine.nodes)
    headroom = machine.settings.headroom
    return load, longest(lambda context: load.wanted(context, headroom) <= machine.room, config.max_position)


def _draft_bytes(form: Form | Sized, network: Composition, machine: PlannedMachine) -> int:
    """Bytes of the multi-token prediction layer, if it is opened."""
    return form.draft_bytes(network) if isinstance(form, Form) and machine.draft and machine.nodes == 1 else 0


def _cluster(
    title: str, rows: Sequence[dict[str, Any]], network: Composition, machine: PlannedMachine
) -> dict[str, Any] | None:
    """vLLM's command line per machine, for the first form that fits; None where none fits."""
    best = next((row for row in rows if row["fits"] and row["engine"] == "vllm"), None)
    if best is None:
        return None
    share = Share(machine.memory, best["needs"], best["bytes"]["kv"], best["context"])
    return {"format": best["format"]} | cluster(
        f"models/{title}", share, nodes=machine.nodes, heads=network.config.widths.heads
    )


def _engine(form: Form | Sized, machine: PlannedMachine) -> Engine:
    if isinstance(form, Sized):
        return form.engine
    return "vllm" if machine.nodes > 1 else "onedesk"


def _why(shown: int, reached: int, wanted: int, machine: PlannedMachine) -> str:
    """One line: the figures, and what would change the result."""
    needs = f"{show(wanted)} with headroom for {shown:,} tokens"
    limit = machine.limit_for(wanted)
    raised = (
        f"; set [memory] limit = {limit:.2f}, now {machine.settings.limit:.2f}"
        if limit > machine.settings.limit
        else ""
    )
    if wanted > machine.room:
        lacking = f"needs {needs}, {show(machine.room)} can be had: {show(wanted - machine.room)} lacking"
        if wanted <= machine.largest:
            return lacking + raised
        return f"{lacking}; {reached:,} tokens would fit" if reached >= STEP else lacking
    left = machine.memory - machine.settings.floor - wanted
    return f"{needs} leave {show(left)} for images" + raised


def _opens(form: Form | Sized) -> bool:
    return isinstance(form, Form) and form.readable()


def _run_by(form: Form | Sized, machine: PlannedMachine, resident: bool) -> str:
    """The engine that runs it, where this version cannot."""
    engine = _engine(form, machine)
    share = f", a node's share of {machine.nodes}" if machine.nodes > 1 else ""
    if engine != "onedesk":
        return f"; by {engine}{share}"
    if not _opens(form):
        return "; this version does not open it yet"
    return "; this version reads the table from its file" if resident else ""
