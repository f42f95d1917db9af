"""Model names: the content of the model folders, and the only way from a name to a path."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError, ModelError
from .checkpoint import CONFIG
from .files import exists, is_inside, plain_parts, short
from .folder_files import INDEX, PARTIAL_SUFFIXES
from .hub_cache import hub_name, hub_snapshot
from .shards import SHARD, SINGLE

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
IMAGE_MODELS = "comfyui"  # ComfyUI's own kinds are under this folder of the tree
# Folders in which ComfyUI packs keep language models: one of these names, in a root or among ComfyUI's own folders, is
# a root too.
LANGUAGE_MODELS = ("LLM", "llm")
_MODEL_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A selectable model: `name` is unique among all roots, `path` a folder or a lone safetensors file."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class RefusedLink:
    """A link to a folder outside all model folders; it is not offered."""

    name: str
    path: Path

    @property
    def reason(self) -> str:
        """The reason, and the setting that would allow it; names the link's target."""
        target = self.path.resolve()
        return (
            f"it is a link to {short(str(target), 300)}, which is in none of the model folders; {_HELP}:"
            f" {json.dumps(str(target.parent))}"
        )


_HELP = "add the folder that its target lies in to roots under [models] in onedesk.toml"


class ModelRoots:
    """The folders that hold models, searched in order; `targets` are further folders that symlinks may point to."""

    def __init__(self, roots: Sequence[Path], *, targets: Sequence[Path] = ()) -> None:
        self.roots = tuple(
            dict.fromkeys(found for root in roots for found in _with_language_models(Path(root).absolute()))
        )
        # Every folder that a symlink may point to, resolved.
        self.bases = tuple(root.resolve() for root in (*self.roots, *(Path(target) for target in targets)))

    def list(self) -> list[ModelEntry]:
        """Every model folder and lone file, broken ones included, sorted by name within a root; nothing is opened."""
        return [entry for entry, _ in self._entries()]

    def refused_links(self) -> list[RefusedLink]:
        """Links in the roots to folders elsewhere, sorted by name within a root; their targets are not examined."""
        return [
            RefusedLink(path.name, path)
            for root in self.roots
            for path in (root / name for name in _names(root))
            if path.name != IMAGE_MODELS and path.is_symlink() and path.is_dir() and not is_inside(path, self.bases)
        ]

    def resolve(self, name: str) -> Path:
        """The path of a listed name. FileError for a name that could leave the roots, ModelError for an unknown one."""
        parts = plain_parts(name)
        if parts is None:
            raise FileError(
                f"the model name {short(name)} is not allowed; use a name as `onedesk models` lists it, not a path"
            )
        entries = self._entries()
        for entry, qualified in entries:
            if name in (entry.name, qualified):
                return entry.path
        for root in self.roots:
            path = root.joinpath(*parts)
            if parts[0] in LANGUAGE_MODELS and any(
                entry.path == path for entry, _ in entries
            ):  # LLM/NAME, the name in earlier versions
                return path
            if exists(path) and not is_inside(path, self.bases):
                raise FileError(f"the model {short(name)} is a symlink that leaves the model folders; {_HELP}")
            if exists(path):
                raise ModelError(
                    f"{short(name)} is there but is not a model: a folder needs config.json and safetensors files, "
                    "a lone .safetensors file needs config.json beside it"
                )
        raise ModelError(f"there is no model {short(name)}; {_advice(name, [entry.name for entry, _ in entries])}")

    def find(self, name_or_path: str | Path) -> Path:
        """For the command: a listed name, or the path of any folder or file. FileError or ModelError when it is
        neither.
        """
        text = os.fspath(name_or_path)
        if not text or "\0" in text:
            raise FileError(f"{short(text)} is neither a model name nor a path")
        for entry, qualified in self._entries():
            if text in (entry.name, qualified):
                return entry.path
        path = Path(text)
        if text.startswith("~/"):
            path = path.expanduser()
        if exists(path):
            return hub_snapshot(path) or path
        link = next((link for link in self.refused_links() if link.name == text), None)
        if link is not None:
            raise FileError(f"the model {short(text)} cannot be opened: {link.reason}")
        known = [entry.name for entry in self.list()]
        raise ModelError(f"there is no model {short(text)}, and no folder or file of that path; {_advice(text, known)}")

    def _entries(self) -> list[tuple[ModelEntry, str]]:
        """Each entry with its name qualified by its root, which stays valid when another root has the same name."""
        found: list[tuple[ModelEntry, str]] = []
        taken: set[str] = set()
        seen: set[Path] = set()
        for root in self.roots:
            here: list[tuple[ModelEntry, str]] = []
            # A link sorts after its target: the folder's own name counts.
            for name, path in sorted(_scan_root(root, self.bases), key=lambda pair: (_by_link(root, pair[1]), pair[0])):
                real = path.resolve()
                if real in seen:
                    continue
                seen.add(real)
                qualified = _free(f"{name} [{root.name}]", taken)
                unique = name if name not in taken else qualified
                taken.update((unique, qualified))
                here.append((ModelEntry(unique, path), qualified))
            found += sorted(here, key=lambda pair: pair[0].name)
        return found


def _by_link(root: Path, path: Path) -> bool:
    """Whether the path from the root to a model contains a link; it may point to a model of the root itself."""
    return path.is_symlink() or (path.parent != root and path.parent.is_symlink())


def _free(name: str, taken: set[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name[:-1]} {number}]", number + 1
    return free


def _scan_root(root: Path, bases: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Names and paths in one root: itself, lone files, folders, and folders one level below (org/name)."""
    names = _names(root)
    if CONFIG in names and _whole(names):
        yield root.name, root
    yield from ((name, root / name) for name in _lone(root, names, bases))
    for folder in _folders(root, bases):
        if folder.name != IMAGE_MODELS and not (folder.name in LANGUAGE_MODELS and CONFIG not in _names(folder)):
            yield from _scan_folder(folder, bases)


def _with_language_models(root: Path) -> Iterator[Path]:
    """The root, and its folders that are roots too."""
    yield root
    for folder in (parent / name for parent in (root, root / IMAGE_MODELS) for name in LANGUAGE_MODELS):
        if exists(folder) and folder.is_dir() and not exists(folder / CONFIG):
            yield folder


def _scan_folder(folder: Path, bases: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    snapshot = hub_snapshot(folder)
    if snapshot is not None:
        if is_inside(snapshot, bases):
            yield from _models(hub_name(folder), snapshot, _names(snapshot), bases)
        return
    names = _names(folder)
    if CONFIG in names or INDEX in names:
        yield from _models(folder.name, folder, names, bases)
        return
    for inner in _folders(folder, bases):
        if hub_snapshot(inner) is not None:
            yield from _scan_folder(inner, bases)
            continue
        yield from _models(f"{folder.name}/{inner.name}", inner, _names(inner), bases)
    if any(name.endswith((*_MODEL_SUFFIXES, *PARTIAL_SUFFIXES)) for name in names):
        yield folder.name, folder


def _models(name: str, folder: Path, names: Sequence[str], bases: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """A model folder (broken ones included), or each of its files when several share one configuration."""
    lone = _lone(folder, names, bases)
    if len(lone) > 1 and not _whole(names):
        yield from ((f"{name}/{file}", folder / file) for file in lone)
    elif any(n in (CONFIG, INDEX) or n.endswith((*_MODEL_SUFFIXES, *PARTIAL_SUFFIXES)) for n in names):
        yield name, folder


def _whole(names: Sequence[str]) -> bool:
    """Whether the safetensors files of a folder form one model."""
    return SINGLE in names or INDEX in names or any(SHARD.fullmatch(name) for name in names)


def _lone(folder: Path, names: Sequence[str], bases: Sequence[Path]) -> list[str]:
    """Safetensors files that are one model each: config.json is next to them and they are not shards."""
    if CONFIG not in names:
        return []
    files = [name for name in names if name.endswith(".safetensors") and name != SINGLE and not SHARD.fullmatch(name)]
    return [name for name in files if is_inside(folder / name, bases) and not (folder / name).is_dir()]


def _folders(parent: Path, bases: Sequence[Path]) -> list[Path]:
    return [
        path for name in _names(parent) if exists(path := parent / name) and path.is_dir() and is_inside(path, bases)
    ]


def _names(folder: Path) -> list[str]:
    """The entries of a folder without hidden and unprintable names, sorted; empty when it is absent or unreadable."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        logger.debug("model folder %s is skipped: %s", folder.name, error.strerror)
        return []
    return [name for name in names if plain_parts(name)]


def pull_advice(name: str) -> str:
    """The command that would download a model of this name, ready to copy."""
    fetched = name if _HUB_NAME.fullmatch(name) and ("/" in name or name.lower().startswith("qwen")) else "OWNER/NAME"
    return f"to fetch it: onedesk pull {fetched}"


def _advice(name: str, known: Sequence[str]) -> str:
    fetch = pull_advice(name)
    if not known:
        return (
            "the model folders are empty: put a model folder there (config.json, tokenizer.json, *.safetensors), or"
            f" {fetch}"
        )
    if len(known) == 1:
        return f"the only one is {short(known[0])}; {fetch}"
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:5]
    return f"there are {len(known)}, such as {', '.join(short(n) for n in near)}; {fetch}"
