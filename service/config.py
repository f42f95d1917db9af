"""The one configuration: onedesk.toml of the tree, with defaults for everything. Unknown keys are errors.

    [memory]   budget numbers, shares as fractions of 1; memory/budget.py holds the defaults and the ranges
    [models]   roots = ["models"], default = "NAME", context = 8192; draft = true: multi-token prediction
    [service]  host, port, concurrency, queue, deadline, grace, renew_hours, renew_fragmentation, linger
    [hub]      endpoints, modelscope, order, connections, limit_mb_per_s, stall; for `onedesk pull` alone
    [comfyui]  correct_free_memory = true; nodes/correction.py says what it does
    [peers.NAME]  kind = "openai" | "vllm" | "llama-server"; PeerSettings says what else

Bytes may be written as whole numbers or as text such as "4GiB". Relative roots start at the file's folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from .errors import FileError
from .toml_file import Kind, checked, read_document
from .tree_names import FILE_NAME, TREE_LINK

_PEER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# The type of each key. The keys of [memory] are the fields of memory.MemorySettings; a test compares them.
_TABLES: Mapping[str, Mapping[str, Kind]] = {
    "memory": {
        "limit": "number",
        "limit_bytes": "bytes",
        "kept_back": "number",
        "floor": "bytes",
        "headroom": "number",
        "initial_slab": "bytes",
        "own_slab": "bytes",
        "align": "whole",
        "weight_align": "whole",
        "guard": "whole",
        "shortfall": "number",
        "poll_loading": "number",
        "poll": "number",
        "debug": "flag",
        "lock": "flag",
        "managed": "flag",
        "oversubscribe": "flag",
    },
    "models": {"roots": "texts", "default": "text", "context": "whole", "draft": "flag"},
    "service": {
        "host": "text",
        "port": "whole",
        "concurrency": "whole",
        "queue": "whole",
        "deadline": "number",
        "grace": "number",
        "renew_hours": "number",
        "renew_fragmentation": "number",
        "linger": "number",
    },
    "comfyui": {"correct_free_memory": "flag"},
    "hub": {
        "endpoints": "texts",
        "modelscope": "text",
        "order": "texts",
        "connections": "whole",
        "limit_mb_per_s": "number",
        "stall": "number",
    },
}
_PEER: Mapping[str, Kind] = {
    **dict.fromkeys(("kind", "url", "key_file", "model", "address"), "text"),
    **dict.fromkeys(("models", "command", "options"), "texts"),
    **dict.fromkeys(("context", "sequences", "loaded", "gpus", "nodes", "port"), "whole"),
    **dict.fromkeys(("idle", "start"), "number"),
    "memory": "bytes",
    "sleep": "flag",
}
# Kind -> the keys that it needs, and further keys that it may have.
_CHILD_KEYS = ("command", "options", "context", "sequences", "port", "start")
_PEER_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "openai": (("url",), ("key_file", "model", "context")),
    "vllm": (("model", "memory"), (*_CHILD_KEYS, "gpus", "nodes", "address", "sleep")),
    "llama-server": (("memory",), (*_CHILD_KEYS, "model", "models", "loaded", "idle")),
}
MEMORY_KEYS = tuple(_TABLES["memory"])
HUBS = ("hf", "modelscope")
_RANGES: Mapping[tuple[str, str], tuple[float, float]] = {
    ("models", "context"): (2, 2**31),
    ("peers", "context"): (1, 2**31),
    **dict.fromkeys([("service", "port"), ("peers", "port")], (0, 65535)),
    ("service", "concurrency"): (1, 4096),
    ("service", "queue"): (0, 65536),
    ("hub", "connections"): (1, 16),
    ("hub", "limit_mb_per_s"): (0, 100_000),
    ("hub", "stall"): (0.1, 3600),
    ("service", "deadline"): (0, 7 * 86400),
    ("service", "grace"): (0, 86400),
    ("service", "renew_hours"): (0, 8760),
    ("service", "renew_fragmentation"): (0, 1),
    **dict.fromkeys([("service", "linger"), ("peers", "start")], (1, 86400)),
    ("peers", "memory"): (1, 2**50),
    ("peers", "sequences"): (1, 4096),
    ("peers", "loaded"): (1, 64),
    **dict.fromkeys([("peers", "gpus"), ("peers", "nodes")], (1, 1024)),
    ("peers", "idle"): (1, 7 * 86400),
}


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The service's address and limits.

    `concurrency` answers are written at once, and `queue` requests may wait, each for `deadline` seconds (0: without
    limit). When the service ends, running answers have `grace` seconds to finish. An idle model is reloaded after
    `renew_hours` (0: never), or when the share `renew_fragmentation` of its pool is in unusably small pieces. A service
    started on demand ends after `linger` idle seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8787
    concurrency: int = 4
    queue: int = 64
    deadline: float = 600.0
    grace: float = 10.0
    renew_hours: float = 24.0
    renew_fragmentation: float = 0.5
    linger: float = 60.0


@dataclass(frozen=True, slots=True)
class ComfyUISettings:
    """What is changed in a running ComfyUI: how it reads free memory, on a GPU that shares its memory with the CPU."""

    correct_free_memory: bool = True


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where `onedesk pull` gets models from. `endpoints` speak Hugging Face's protocol and are asked in this order;
    empty, as `modelscope`: the hub's own address. `limit_mb_per_s` 0: no limit. `stall`: seconds after which a silent
    connection is dropped.
    """

    endpoints: tuple[str, ...] = ()
    modelscope: str = ""
    order: tuple[str, ...] = ("hf", "modelscope")
    connections: int = 4
    limit_mb_per_s: float = 0.0
    stall: float = 30.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Another engine, by the name of its table.

    kind "openai": a running server at `url`; `key_file` has its key, `model` is the name to ask for. The other kinds
    are processes that we start and end: `model` is a folder or file on this machine, `memory` the bytes that the
    process may hold (per machine, if there are several), `command` the start of its argv, `options` further arguments
    after ours. `context` 0: the model's own. `port` 0: any free one. `start`: seconds until it must answer. vLLM:
    `gpus` per machine, `nodes` machines, of which this one has `address`; `sleep`: evict by sleeping instead of ending.
    llama-server: `idle` seconds after which it unloads by itself, 0: never; `models` instead of `model` are several
    models, of which `loaded` are in memory at once; `asked` is the one that this entry asks for.
    """

    name: str
    kind: Literal["openai", "vllm", "llama-server"]
    url: str = ""
    key_file: Path | None = None
    model: str = ""
    models: tuple[str, ...] = ()
    loaded: int = 1
    asked: str = ""
    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    context: int = 0
    memory: int = 0
    sequences: int = 1
    gpus: int = 1
    nodes: int = 1
    address: str = ""
    sleep: bool = False
    idle: float = 0.0
    port: int = 0
    start: float = 600.0

    @property
    def ours(self) -> bool:
        """Whether it is a process that we start."""
        return self.kind != "openai"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. `tree`: the folder of the onedesk.toml that was read; None without one, or if it is in the package
    itself. `memory` has only the keys that are set."""

    tree: Path | None = None
    file: Path | None = None
    model_roots: tuple[Path, ...] = ()
    default_model: str | None = None
    context: int | None = None
    draft: bool = True
    memory: Mapping[str, int | float | bool] = field(default_factory=lambda: MappingProxyType({}))
    service: ServiceSettings = field(default_factory=ServiceSettings)
    comfyui: ComfyUISettings = field(default_factory=ComfyUISettings)
    hub: HubSettings = field(default_factory=HubSettings)
    peers: Mapping[str, PeerSettings] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def cache(self) -> Path:
        """The folder for what can be made again: the tree's cache, or .cache of the checkout without a tree."""
        return self.tree / "cache" if self.tree else package_folder() / ".cache"


def package_folder() -> Path:
    """The folder of this package: the checkout, the pack in custom_nodes, or its folder in site-packages."""
    return Path(__file__).resolve().parent.parent


def own_version() -> str:
    """The version of this package: from its project file in a checkout or a pack, else from the installed
    distribution."""
    with suppress(FileError, KeyError):
        return str(read_document(package_folder() / "pyproject.toml")["project"]["version"])
    try:
        return version("onedesk")
    except PackageNotFoundError:
        return "(not installed)"


def installed_file() -> Path | None:
    """The onedesk.toml of the tree that the running pack or Python belongs to, None for no tree.

    The installer's link in the custom_nodes of an existing ComfyUI points to TREE/envs/pack. A checkout in custom_nodes
    has the link .tree instead, or a file of its own, whichever Python loads it. A tree's own Python is in
    TREE/envs/NAME. The file in the package's folder comes last.
    """
    pack, own, files = Path(__file__).absolute().parent.parent, package_folder() / FILE_NAME, list[Path]()
    if pack.is_symlink() and pack.readlink().parent.parent.name == "envs":
        files.append(pack.readlink().parent.parent.parent / FILE_NAME)
    elif (pack / TREE_LINK).is_symlink():
        files.append((pack / TREE_LINK).readlink() / FILE_NAME)
    if pack.parent.name == "custom_nodes" and not pack.is_symlink():
        files.append(own)
    envs = Path(sys.prefix).absolute().parent
    if envs.name == "envs":
        files.append(envs.parent / FILE_NAME)
    return next((file for file in (*files, own) if file.is_file()), None)


def load_config(path: Path | None = None) -> Config:
    """Read `path`, or the tree's onedesk.toml if None; without a file, return the defaults.

    Raises FileError for a file that is absent, unreadable or not TOML, an unknown table or key, a wrong type, or a
    value out of range.
    """
    path = path or installed_file()
    if path is None:
        return Config(model_roots=_with_toys([]))
    document = read_document(path)
    tables = {name: _table(path, name, document.get(name, {})) for name in _TABLES}
    unknown = sorted(set(document) - {*_TABLES, "peers"})
    if unknown:
        raise FileError(f"{path.name}: unknown table or key {unknown[0]!r}; known tables: {', '.join(_TABLES)}, peers")
    tree = path.resolve().parent
    models = tables["models"]
    return Config(
        tree=None if tree == package_folder() else tree,
        file=path.resolve(),
        model_roots=_with_toys(
            [_path(f"{path.name}: roots in [models]", tree, root) for root in models.get("roots", ["models"])]
        ),
        default_model=models.get("default"),
        context=models.get("context"),
        draft=models.get("draft", True),
        memory=MappingProxyType(tables["memory"]),
        service=ServiceSettings(**tables["service"]),
        comfyui=ComfyUISettings(**tables["comfyui"]),
        hub=_hub(path, tables["hub"]),
        peers=MappingProxyType(_peers(path, tree, document.get("peers", {}))),
    )


def _hub(path: Path, table: Mapping[str, Any]) -> HubSettings:
    """The settings of [hub]; its addresses are checked when they are used."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    order = values.get("order", HubSettings().order)
    if not order or len(set(order)) < len(order) or not set(order) <= set(HUBS):
        raise FileError(
            f"{path.name}: order in [hub] is {list(order)!r}; use one or both of {', '.join(HUBS)}, each once"
        )
    return HubSettings(**values)


def _path(where: str, tree: Path, text: str) -> Path:
    """`text` as a path; a relative one starts at the tree."""
    if "\0" in text:
        raise FileError(f"{where} has {text!r}, which is not a path; write a folder's path")
    try:
        return tree / Path(text).expanduser()
    except RuntimeError as error:
        raise FileError(f"{where} has {text!r}, whose home folder is not known; write the whole path") from error


def _peers(path: Path, tree: Path, tables: Any) -> dict[str, PeerSettings]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise FileError(f"{path.name}: peers is not a table of tables; write each as [peers.NAME]")
    return {
        key: settings
        for name, table in tables.items()
        for key, settings in _entries(path, _peer(path, tree, name, table))
    }


def _entries(path: Path, settings: PeerSettings) -> Iterator[tuple[str, PeerSettings]]:
    """The entries of a table by their names: one, or one for each of its models, NAME/MODEL."""
    if not settings.models:
        yield settings.name, settings
    names = [model_name(model) for model in settings.models]
    for name in names:
        if not _PEER_NAME.fullmatch(name) or names.count(name) > 1:
            raise FileError(
                f"{path.name}: models in [peers.{settings.name}] has {name!r} twice or with characters that a name "
                "cannot have; rename it"
            )
        yield f"{settings.name}/{name}", replace(settings, asked=name)


def model_name(file: str) -> str:
    """The name of one of several models: its file or folder without ".gguf" and the number of a first part."""
    return Path(file).name.removesuffix(".gguf").partition("-00001-of-")[0]


def _peer(path: Path, tree: Path, name: str, table: Mapping[str, Any]) -> PeerSettings:
    title = f"[peers.{name}]"
    if not _PEER_NAME.fullmatch(name):
        raise FileError(
            f"{path.name}: a peer is called {name!r}; use up to 64 letters, digits, dots, dashes and underscores"
        )
    for key in table:
        if key not in _PEER:
            raise FileError(f"{path.name}: unknown key {key!r} in {title}; known keys: {', '.join(_PEER)}")
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _PEER_KINDS:
        raise FileError(f"{path.name}: kind in {title} is {kind!r}; use one of {', '.join(_PEER_KINDS)}")
    needed, allowed = _PEER_KINDS[kind]
    for key in (key for key in needed if not table.get(key)):
        raise FileError(f"{path.name}: {title} is of kind {kind} and lacks {key}; write {key} = ...")
    for key in (key for key in table if key not in ("kind", *needed, *allowed)):
        raise FileError(
            f"{path.name}: {key} in {title} does not belong to kind {kind}; "
            f"its keys are {', '.join((*needed, *allowed))}"
        )
    if kind == "llama-server" and bool(table.get("model")) == bool(table.get("models")):
        raise FileError(
            f"{path.name}: {title} needs either model or models; models are several that it loads on demand"
        )
    values = {
        key: checked(f"{path.name}: {key} in {title}", _PEER[key], item, _RANGES.get(("peers", key)))
        for key, item in table.items()
    }
    if values.get("nodes", 1) > 1 and not values.get("address"):
        raise FileError(
            f"{path.name}: {title} has nodes = {values['nodes']} and lacks address; "
            "write this machine's address on their network"
        )
    values |= {key: tuple(values[key]) for key in ("command", "options", "models") if key in values}
    if "key_file" in values:
        values["key_file"] = _path(f"{path.name}: key_file in {title}", tree, values["key_file"])
    if kind != "openai" and "model" in values:
        values["model"] = str(_path(f"{path.name}: model in {title}", tree, values["model"]))
    values["models"] = tuple(
        str(_path(f"{path.name}: models in {title}", tree, one)) for one in values.get("models", ())
    )
    return PeerSettings(name=name, **values)


def _with_toys(roots: list[Path]) -> tuple[Path, ...]:
    """The user's roots, then the package's toy models: the installer's links to them then point into a root."""
    toys = package_folder() / "models"
    return tuple(dict.fromkeys([*roots, toys] if toys.is_dir() else roots))


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    known = _TABLES[name]
    if not isinstance(value, dict):
        raise FileError(f"{path.name}: {name} is {value!r}; write it as a table, [{name}]")
    for key in value:
        if key not in known:
            raise FileError(f"{path.name}: unknown key {key!r} in [{name}]; known keys: {', '.join(known)}")
    return {
        key: checked(f"{path.name}: {key} in [{name}]", known[key], item, _RANGES.get((name, key)))
        for key, item in value.items()
    }
