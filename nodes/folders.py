"""The folders in which ComfyUI and the tree keep what the nodes offer by name: language models and the user's
presets.
"""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths

from ..service.config import PeerSettings, load_config, package_folder
from ..service.errors import OnedeskError, RequestError
from ..service.loader.checkpoint import open_checkpoint
from ..service.loader.names import ModelRoots
from .presets import PACK_FOLDER
from .values import HERE, OTHER, SERVICE, ModelChoice

log = logging.getLogger(__name__)

KIND = "llm"
WEIGHTS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
# Earlier packs use both spellings; on Linux they are two folders.
KINDS = (KIND, "LLM")


def offer_folders() -> None:
    """Register models/llm and the pack's own demo image models with ComfyUI, after existing folders of the same
    kind.
    """
    folder_paths.add_model_folder_path(KIND, str(Path(folder_paths.models_dir) / KIND))
    for kind in ("diffusion_models", "vae"):
        demo = package_folder() / "models" / "comfyui" / kind
        if demo.is_dir():
            folder_paths.add_model_folder_path(kind, str(demo))


def model_roots() -> ModelRoots:
    """Every folder that holds language models: ComfyUI's, then those of onedesk.toml. A broken onedesk.toml costs only
    its own folders.
    """
    roots = [
        Path(path)
        for kind in KINDS
        if kind in folder_paths.folder_names_and_paths
        for path in folder_paths.get_folder_paths(kind)
    ]
    targets: list[Path] = []
    try:
        config = load_config()
        roots += config.model_roots
        targets.append(config.cache)
    except OnedeskError as error:
        log.warning("only ComfyUI's model folders are offered: %s", error)
    return ModelRoots(list(dict.fromkeys(roots)), targets=targets)


def preset_folders() -> tuple[Path, Path]:
    """The pack's presets, then the user's: onedesk/presets in ComfyUI's user folder."""
    return PACK_FOLDER, Path(folder_paths.get_user_directory()) / "onedesk" / "presets"


def where_choices() -> list[str]:
    """Where a model may run. A broken onedesk.toml costs only its servers."""
    try:
        peers = load_config().peers
    except OnedeskError as error:
        log.warning("no other servers are offered: %s", error)
        peers = {}
    return [HERE, SERVICE, *(OTHER + name for name in peers)]


def peer_settings(where: str) -> PeerSettings:
    """The onedesk.toml entry that a choice of `where` names. Raises RequestError for an unknown name, FileError for a
    broken file.
    """
    peers = load_config().peers
    name = where.removeprefix(OTHER)
    if not where.startswith(OTHER) or name not in peers:
        known = ", ".join([HERE, SERVICE, *(OTHER + known for known in peers)])
        raise RequestError(
            f"`where` is {where[:80]!r}; use one of {known}; write others as [peers.NAME] into onedesk.toml"
        )
    return peers[name]


def check_where(where: str) -> None:
    """Refuse an unknown choice of `where`. Raises as `peer_settings`."""
    if where not in (HERE, SERVICE):
        peer_settings(where)


def check_model(choice: ModelChoice) -> None:
    """Read a model's headers, so that the loader node reports a missing shard. Raises FileError, ModelError."""
    if choice.where not in (HERE, SERVICE):
        return
    roots = model_roots()
    open_checkpoint(roots.resolve(choice.name), roots=roots.bases)


def config_stamp(where: str) -> list[list[str | int]]:
    """[path, nanoseconds] of the entry's file: a changed entry is another model. Contains nothing of the entry
    itself.
    """
    file = load_config().file
    return [[where, file.stat().st_mtime_ns if file else 0]]


def file_stamps(name: str) -> list[list[str | int]]:
    """[name, bytes, nanoseconds] of each file of a model, sorted. Raises FileError, ModelError for an unknown name."""
    path = model_roots().resolve(name)
    files = path.iterdir() if path.is_dir() else (path, path.with_name("config.json"))
    states = ((file.name, file.stat()) for file in sorted(files) if file.is_file())
    return [[file, state.st_size, state.st_mtime_ns] for file, state in states]


def model_file_bytes(name: str) -> int:
    """Bytes of the file that an input of one of ComfyUI's loaders names; 0 if the text names none."""
    if not name.lower().endswith(WEIGHTS):
        return 0
    paths = (folder_paths.get_full_path(kind, name) for kind in list(folder_paths.folder_names_and_paths))
    return max((Path(path).stat().st_size for path in paths if path), default=0)
