"""`onedesk doctor --plan`: in which form a model would fit a machine, beside how much memory for image models. From its config alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, load_config
from ..console import UsageError
from ..engine.buffers import MAX_BATCH
from ..engine.drafting import BESIDE, REACH
from ..engine.runner import SCORED_ROWS, chunk_rows
from ..engine.session import DEFAULT_CONTEXT, KEPT_STATES
from ..errors import Field, FileError, ModelError, RequestError
from ..loader.checkpoint import CONFIG, HF_QUANT, modelopt_settings
from ..loader.files import exists, read_json_object
from ..memory.budget import MemorySettings, show
from ..memory.truth import read_truth
from ..model.families import describe
from ..peers.cluster import Share, cluster
from ..quant.published import KEY
from .census import Census, take_census
from .forms import (
    SIZED,
    Engine,
    Form,
    Sized,
    form_of_config,
    forms_of,
)
from .known_configs import PUBLISHED, published_name

STEP = 256  # tokens; contexts are multiples of it
# The most of the n-gram table that stays in memory where its rows are read from the file.
TABLE_CACHE = 512 << 20
# Recurrent states that a session keeps: of all sequences that decode together, and of beginnings to go on behind.
STATES = 1 + MAX_BATCH + KEPT_STATES
# What kernels work in beside the rows of a pass, by device; on the CPU also a layer's keys and values without blocks.
KERNEL_ROOM = {"cuda": 24 << 20, "cpu": 12 << 20}
LARGEST_LIMIT = 0.95  # what [memory] limit may be at most


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for: bytes that can be had, and how they may be used. Each of `nodes` machines is so.

    `images`: bytes that image models have beside; then [memory] limit is set as it suits. None: the settings' limit holds. `draft`: layers
    for multi-token prediction are opened where there is room for them.
    """

    memory: int
    images: int | None
    settings: MemorySettings
    device: str
    nodes: int = 1
    draft: bool = True

    @property
    def largest(self) -> int:
        """Bytes for a model with its headroom, at the largest limit that may be set."""
        most = int(self.memory * LARGEST_LIMIT * (1 - self.settings.kept_back))
        return max(0, min(most, self.memory - self.settings.floor - (self.images or 0)))

    @property
    def room(self) -> int:
        """Bytes for a model with its headroom."""
        if self.images is not None:
            return self.largest
        limit = self.settings.limit_bytes or int(self.memory * self.settings.limit)
        return max(0, min(self.largest, int(min(limit, self.memory - self.settings.floor) * (1 - self.settings.kept_back))))

    def limit_for(self, wanted: int) -> float:
        """The [memory] limit that leaves `wanted` bytes to spend, a little above it."""
        return math.ceil(wanted / (1 - self.settings.kept_back) / self.memory * 100) / 100


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that a form takes of one node: its weights and table, and what grows with the context: so much fixed, so much a token."""

    weights: int
    table: int
    kv_token: int
    states: int
    fixed: int
    token: int

    def kv(self, context: int) -> int:
        """Keys, values, indexer keys and recurrent states."""
        return self.states + context * self.kv_token

    def scratch(self, context: int) -> int:
        """Buffers of a pass, and what kernels work in."""
        return self.fixed + context * self.token

    def wanted(self, context: int, headroom: float) -> int:
        """Everything, with headroom."""
        return math.ceil((self.weights + self.table + self.kv(context) + self.scratch(context)) * (1 + headroom))


def run(args: argparse.Namespace) -> dict[str, Any]:
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
    )


def plan_model(
    name: str,
    config: Config,
    *,
    memory: int | None = None,
    images: int | None = None,
    nodes: int = 1,
    context: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Every form of the model `name` (published, or a folder with a config.json) on a machine of `memory` bytes, this one's by default.

    Another machine is taken to have a GPU unless `device` is cpu. Bytes are integers. Raises ModelError, FileError, RequestError.
    """
    from ..api import pick_device

    title, described = find_config(name, config)
    census = take_census(described)
    values: dict[str, Any] = dict(config.memory)
    place = pick_device(device).type if memory is None else "cpu" if device == "cpu" else "cuda"
    machine = Machine(
        read_truth(place).available if memory is None else memory, images, MemorySettings(**values), place, nodes, config.draft
    )
    if machine.memory < 1:
        raise RequestError("--memory is 0 B; name what the machine can give, such as 24GiB")
    if (images or 0) > machine.memory:
        raise RequestError(f"--images is {show(images or 0)} of {show(machine.memory)}; name less, or a larger --memory")
    if context is not None and context > census.max_position:
        raise RequestError(Field("context"), f" is {context}, but the model's config allows {census.max_position}; use at most that")
    if census.heads % nodes:
        raise RequestError(f"--nodes is {nodes}, and {census.heads} attention heads do not divide by it; use a divisor of {census.heads}")
    rows = [row for form in _forms(title, described, census, nodes) for row in _rows(form, census, machine, context)]
    _tell_refusal(rows, described)
    several = {"cluster": _cluster(title, rows, census, machine)} if nodes > 1 else {}
    return several | {
        "model": title,
        "family": census.family,
        "parameters": census.parameters,
        "active_parameters": census.active,
        "kinds": dict(census.kinds),
        "memory": machine.memory,
        "images": images or 0,
        "room": machine.room,
        "nodes": nodes,
        "device": place,
        "forms": rows,
    }


def find_config(name: str, config: Config) -> tuple[str, dict[str, Any]]:
    """The name and config.json of a published model, of a listed one, or of a folder. Raises ModelError, FileError."""
    from .inventory import model_roots

    if not name.strip():
        raise ModelError(f"the name of a model is empty; known are {', '.join(PUBLISHED)}, or name a folder with a config.json")
    folder = Path(name).expanduser()
    listed = {entry.name: entry.path for entry in model_roots(config).list()}
    if name in listed and listed[name].is_dir():
        folder = listed[name]
    if folder.is_dir():
        if not exists(folder / CONFIG):
            raise FileError(f"the folder {folder.resolve().name!r} has no config.json; name a model's own folder, or a published model")
        described = read_json_object(folder / CONFIG, CONFIG)
        if described.get(KEY) is None and exists(folder / HF_QUANT):
            described[KEY] = modelopt_settings(read_json_object(folder / HF_QUANT, HF_QUANT))
        return folder.resolve().name, described
    known = published_name(name)
    if known is None:
        raise ModelError(
            f"there is no model folder {name!r}, and no published model of that name is known; known are {', '.join(PUBLISHED)}; "
            "a folder with the model's config.json alone is enough"
        )
    return known, dict(PUBLISHED[known])


def _forms(title: str, described: dict[str, Any], census: Census, nodes: int) -> tuple[Form | Sized, ...]:
    """All forms of a model; of a folder whose files are quantized already, only what it is."""
    if described.get(KEY) is not None:
        return (form_of_config(described, census.layers),)
    known = published_name(title)
    forms = (*forms_of(census), *(SIZED.get(known, ()) if known else ()))
    if nodes == 1:
        return forms
    # Several machines are vLLM's: it makes no weights of BF16 files, and reads no GGUF.
    return tuple(form for form in forms if (form.engine == "vllm" if isinstance(form, Sized) else not form.made))


def _tell_refusal(rows: Sequence[dict[str, Any]], described: dict[str, Any]) -> None:
    """What can be counted need not be what this version computes: say of each form that it would open itself what the family refuses."""
    try:
        describe(described)
    except ModelError as error:
        for row in rows:
            if row["opens"] and row["engine"] == "onedesk":
                row["opens"] = False
                row["why"] += f"; this version does not open it: {error}"


def _rows(form: Form | Sized, census: Census, machine: Machine, context: int | None) -> list[dict[str, Any]]:
    """The form with its table left in the file first, then with all of it in memory."""
    table = form.table if isinstance(form, Sized) else form.table_bytes(census, machine.nodes)
    if not table:
        return [_row(form, form.title, 0, census, machine, context)]
    held = -(-table // machine.nodes) if isinstance(form, Sized) else table
    return [
        _row(form, f"{form.title}; table in its file", min(TABLE_CACHE, held), census, machine, context),
        _row(form, f"{form.title}; table in memory", held, census, machine, context, resident=True),
    ]


def _row(
    form: Form | Sized, title: str, table: int, census: Census, machine: Machine, context: int | None, *, resident: bool = False
) -> dict[str, Any]:
    """`resident`: all of the n-gram table is in memory."""
    weights = -(-(form.file - form.table) // machine.nodes) if isinstance(form, Sized) else form.held_bytes(census, machine.nodes)
    headroom, least = machine.settings.headroom, min(DEFAULT_CONTEXT, census.max_position)
    draft = _draft_bytes(form, census, machine)
    load, reached = _loaded(weights, table, 0, census, machine)
    if draft:  # it is left out where there is no room for it, or where it would take some of the longest context
        other, with_it = _loaded(weights, table, draft, census, machine)
        draft = draft if with_it >= (max(1, reached) if context is None else context) else 0
        load, reached = (other, with_it) if draft else (load, reached)
    fits = reached >= (least if context is None else context)
    shown = context or (reached if fits else least)
    wanted = load.wanted(shown, headroom)
    engine = _engine(form, machine)
    file = form.file if isinstance(form, Sized) else form.file_bytes(census)
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
        "fits": fits,
        "context": shown if fits else reached,
        "needs": wanted,
        "images": max(0, machine.memory - machine.settings.floor - load.wanted(context or least, headroom)),
        "opens": engine != "onedesk" or (_opens(form) and not resident),
        "why": _why(shown, reached, wanted, machine) + _run_by(form, machine, resident),
    }


def _loaded(weights: int, table: int, draft: int, census: Census, machine: Machine) -> tuple[Load, int]:
    """What a form takes with so many bytes of a layer that drafts, and the longest context that then fits."""
    load = load_of(weights + draft, table, census, machine, draft=draft > 0)
    return load, longest_context(load, census.max_position, machine.settings.headroom, machine.room)


def _draft_bytes(form: Form | Sized, census: Census, machine: Machine) -> int:
    """Bytes of a layer for multi-token prediction that is opened."""
    return form.draft_bytes(census) if isinstance(form, Form) and machine.draft and machine.nodes == 1 else 0


def load_of(weights: int, table: int, census: Census, machine: Machine, *, draft: bool = False) -> Load:
    """What a model takes of one node's memory with so many bytes of weights and n-gram table there.

    `draft`: the weights have a layer for multi-token prediction, which has keys and values of its own.
    """
    nodes, cuda = machine.nodes, machine.device == "cuda"
    number = 2 if cuda else 4
    # Key heads that do not divide are kept by every node.
    share = math.gcd(census.kv_heads, nodes)
    kv = census.kv_token * number // share + 4 * census.indexer_token
    sparse = any(tensors.kind == "experts" for tensors in census.tensors)
    rows = max(MAX_BATCH, chunk_rows(_device(machine.device), sparse=sparse))
    fixed = rows * (census.row + (census.picks if cuda else 0)) * number + SCORED_ROWS * census.vocab * number + KERNEL_ROOM[machine.device]
    token = 4 * census.head_dim + 8  # both rotary tables, fp32; places in the chunk
    if not cuda:
        token += 2 * census.kv_heads * census.head_dim * number
    # Of every sequence that decodes the states of one layer are worked on beside those that are kept.
    states = STATES * census.state + MAX_BATCH * census.state // max(1, census.layers - census.full)
    own = (REACH + BESIDE) * kv // census.full if draft else 0  # the keys and values of that layer
    return Load(weights, table, kv, own - (-states // nodes), fixed, token)


def _cluster(title: str, rows: Sequence[dict[str, Any]], census: Census, machine: Machine) -> dict[str, Any] | None:
    """vLLM's words for each machine, for the first form that fits; None where none does."""
    best = next((row for row in rows if row["fits"] and row["engine"] == "vllm"), None)
    if best is None:
        return None
    share = Share(machine.memory, best["needs"], best["bytes"]["kv"], best["context"])
    return {"format": best["format"]} | cluster(f"models/{title}", share, nodes=machine.nodes, heads=census.heads)


def _device(kind: str) -> Any:
    import torch

    return torch.device(kind)


def longest_context(load: Load, allowed: int, headroom: float, room: int) -> int:
    """The longest context that fits, at most `allowed`; 0 where none does."""
    spare = math.floor(room / (1 + headroom)) - load.wanted(0, 0.0)
    tokens = min(allowed, max(0, spare // max(1, load.kv_token + load.token)))
    return tokens if tokens == allowed else tokens // STEP * STEP


def _engine(form: Form | Sized, machine: Machine) -> Engine:
    if isinstance(form, Sized):
        return form.engine
    return "vllm" if machine.nodes > 1 else "onedesk"


def _why(shown: int, reached: int, wanted: int, machine: Machine) -> str:
    """One line: the figures, and what would change the answer."""
    needs = f"{show(wanted)} with headroom for {shown:,} tokens"
    limit = machine.limit_for(wanted)
    raised = f"; set [memory] limit = {limit:.2f}, now {machine.settings.limit:.2f}" if limit > machine.settings.limit else ""
    if wanted > machine.room:
        lacking = f"needs {needs}, {show(machine.room)} can be had: {show(wanted - machine.room)} lacking"
        if wanted <= machine.largest:
            return lacking + raised
        return f"{lacking}; {reached:,} tokens would fit" if reached >= STEP else lacking
    left = machine.memory - machine.settings.floor - wanted
    return f"{needs} leave {show(left)} for images" + raised


def _opens(form: Form | Sized) -> bool:
    return isinstance(form, Form) and form.readable()


def _run_by(form: Form | Sized, machine: Machine, resident: bool) -> str:
    """Who runs it, where that is not this version."""
    engine = _engine(form, machine)
    share = f", a node's share of {machine.nodes}" if machine.nodes > 1 else ""
    if engine != "onedesk":
        return f"; by {engine}{share}"
    if not _opens(form):
        return "; this version does not open it yet"
    return "; this version reads the table from its file" if resident else ""
