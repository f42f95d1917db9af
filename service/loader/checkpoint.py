"""A checkpoint on disk: its configuration and where each tensor lies. Nothing but headers and small JSON files is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import FileError, ModelError
from .files import (
    SourceFile,
    Stamps,
    exists,
    is_inside,
    plain_parts,
    read_json_object,
    short,
    stamps,
)
from .header import TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
# Where exports of ModelOpt before 0.35 say how they are quantized.
HF_QUANT = "hf_quant_config.json"
# What says how the tensors are to be taken, and out of which files. Read once, with the headers.
SETTINGS = (CONFIG, GENERATION, HF_QUANT, INDEX, SINGLE)
# Read later, by the text room; where their links lead is checked here, with all the others.
LANGUAGE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".tmp", ".crdownload", ".aria2", ".download")
_CONTROL = ".aria2"  # beside a file that has its full size from the start and is not complete while this is there
_HUB_PARTS = Path(".cache", "huggingface", "download")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
_FOREIGN = (
    ("GGUF", (".gguf",)),
    ("pickle", (".bin", ".pt", ".pth", ".ckpt", ".pkl")),
    ("ONNX", (".onnx",)),
)
_TELL = 8  # names that a message lists before it says "and N more"


@dataclass(frozen=True, slots=True)
class Census:
    """What a checkpoint holds: numbers in total, and bytes by the dtype they are stored in."""

    parameters: int
    bytes_by_dtype: Mapping[str, int]
    files: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint. `folder` holds config.json and the tokenizer; `weight_bytes` is the sum over all tensors.

    `settings`: the files of SETTINGS as they were when they were read; None where there are none, as of a network that is made up.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    weight_bytes: int
    settings: Stamps | None = None
    # The files of the tensors, found once: whether they have changed is asked before each first token of the service.
    sources: frozenset[SourceFile] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", frozenset(info.source for info in self.tensors.values()))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({info.file for info in self.tensors.values()}))

    def changed(self) -> bool:
        """Whether a file with tensors or settings is another one than when it was read, gone, or new."""
        if self.settings is not None and self.settings != stamps(self.folder, SETTINGS):
            return True
        return any(not source.unchanged() for source in self.sources)

    def census(self) -> Census:
        """Count numbers and bytes from the headers; packed formats count one number per stored element."""
        by_dtype: Counter[str] = Counter()
        for info in self.tensors.values():
            by_dtype[info.dtype] += info.nbytes
        parameters = sum(info.elements for info in self.tensors.values())
        return Census(parameters, MappingProxyType(dict(by_dtype.most_common())), len(self.files))


def open_checkpoint(path: Path, *, roots: Sequence[Path] = ()) -> Checkpoint:
    """Validate a folder (single or sharded) or a lone safetensors file with config.json beside it.

    Symlinks inside are followed only to files in the folder itself or under one of `roots`.
    Raises FileError for what is missing, cut short or unreadable, ModelError for what is there but is no usable checkpoint.
    """
    path = path.absolute()
    if not exists(path):
        raise FileError(f"{short(path.name)} does not exist or may not be read; `onedesk models` lists what there is")
    lone = None if path.is_dir() else path
    folder = path if lone is None else path.parent
    bases = (folder.resolve(), *(root.resolve() for root in roots))
    files = _Files(folder, bases)
    settings = stamps(folder, SETTINGS)
    # A lone file is looked at first: whoever chose a GGUF file must hear that, not that its config.json is missing.
    tensors = {} if lone is None else _read_tensors(files, [lone.name])
    config = _read_config(files, lone)
    generation = read_json_object(files.path(GENERATION), GENERATION) if files.has(GENERATION) else {}
    if lone is None:
        tensors = _read_folder(files)
    if not tensors:
        raise ModelError(f"{folder.name} holds no tensor at all; download it again")
    for name in filter(files.has, LANGUAGE):
        files.path(name)
    weight_bytes = sum(info.nbytes for info in tensors.values())
    name = lone.stem if lone is not None else folder.resolve().name
    documents = MappingProxyType(config), MappingProxyType(generation)
    return Checkpoint(folder, name, *documents, MappingProxyType(tensors), weight_bytes, settings)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one model folder, by their name in it; none may lead out of `bases`."""

    folder: Path
    bases: tuple[Path, ...]

    def has(self, name: str) -> bool:
        path = self.folder / name
        return exists(path) or path.is_symlink()

    def path(self, name: str) -> Path:
        if plain_parts(name) is None:
            raise FileError(f"{short(name)} is not the name of a file inside the model folder {short(self.folder.name)}")
        path = self.folder / name
        if path.is_symlink() and not exists(path):
            raise FileError(f"{short(name)} is a symlink to a file that does not exist; download it again")
        if not is_inside(path, self.bases):
            raise FileError(
                f"{short(name)} is a symlink that leaves the model folders; put the file itself there, or add its folder as a root"
            )
        return path

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith(".") and not entry.is_dir())
        except OSError as error:
            raise FileError(f"the folder {short(self.folder.name)} cannot be read: {error.strerror}") from None


def _read_config(files: _Files, lone: Path | None) -> dict[str, Any]:
    if not files.has(CONFIG):
        if lone is not None:
            raise FileError(f"there is no config.json beside {short(lone.name)}; put the model's config.json and tokenizer.json next to it")
        _refuse_foreign(files)
        raise FileError(f"there is no config.json in {short(files.folder.name)}; {_unfinished(files) or 'download the whole folder'}")
    config = read_json_object(files.path(CONFIG), CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise ModelError("config.json does not say the model_type (a name such as qwen3); get the config.json that belongs to the weights")
    if config.get("quantization_config") is None and files.has(HF_QUANT):
        config["quantization_config"] = modelopt_settings(read_json_object(files.path(HF_QUANT), HF_QUANT))
    return config


def modelopt_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What HF_QUANT says, as a quantization_config. Raises ModelError."""
    settings = document.get("quantization")
    if not isinstance(settings, dict):
        raise ModelError(f"{HF_QUANT} has quantization = {settings!r}; an object is needed, get the file again")
    return {"quant_method": "modelopt", **settings}


def _read_folder(files: _Files) -> dict[str, TensorInfo]:
    if files.has(SINGLE):
        return _read_tensors(files, [SINGLE])
    if files.has(INDEX):
        return _read_indexed(files)
    names = files.names()
    weights = [name for name in names if name.endswith(".safetensors")]
    shards = [(name, match) for name in weights if (match := SHARD.fullmatch(name))]
    if shards:
        return _read_numbered(files, shards)
    if len(weights) == 1:
        return _read_tensors(files, weights)
    if weights:
        raise ModelError(
            f"{short(files.folder.name)} has {len(weights)} safetensors files and no {INDEX}: {_listing(weights)}; "
            "choose one of the files, or add the index"
        )
    _refuse_foreign(files)
    raise FileError(f"there is no safetensors file in {short(files.folder.name)}; {_unfinished(files) or 'download the whole folder'}")


def _refuse_foreign(files: _Files) -> None:
    """ModelError when a folder without safetensors holds another format."""
    names = files.names()
    if any(name.endswith(".safetensors") for name in names) or files.has(INDEX):
        return
    for kind, suffixes in _FOREIGN:
        found = [name for name in names if name.lower().endswith(suffixes)]
        if found:
            never = " (which can run code and is never read)" if kind == "pickle" else ""
            raise ModelError(
                f"{short(files.folder.name)} holds {kind} files{never}, no safetensors: {_listing(found)}; "
                "get the safetensors form of this model"
            )


def _read_tensors(files: _Files, names: Iterable[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        if files.has(name + _CONTROL):
            raise FileError(f"the download of {name} was not finished ({short(name + _CONTROL)} is beside it): resume it")
        for info in read_header(files.path(name), shown=name).tensors.values():
            if info.name in tensors:
                raise ModelError(
                    f"tensor {short(info.name)} is in {tensors[info.name].source.shown} and in {name}; download the folder again"
                )
            tensors[info.name] = info
    return tensors


def _read_numbered(files: _Files, shards: list[tuple[str, re.Match[str]]]) -> dict[str, TensorInfo]:
    """Shards that lack their index: their names say how many there must be."""
    stems = sorted({(match["stem"], match["count"]) for _, match in shards})
    if len(stems) > 1:
        raise ModelError(
            f"{short(files.folder.name)} holds shards of several checkpoints: {_listing([n for n, _ in shards])}; keep one of them"
        )
    stem, count = stems[0]
    wanted = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    _require(files, wanted)
    return _read_tensors(files, wanted)


def _read_indexed(files: _Files) -> dict[str, TensorInfo]:
    weight_map = read_json_object(files.path(INDEX), INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX} has no weight_map (tensor names with their files); download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or plain_parts(name) is None:
            raise FileError(
                f"{INDEX} puts tensor {short(tensor)} into {short(str(name))}, which is not a file inside the folder; download it again"
            )
    wanted = sorted(set(weight_map.values()))
    _require(files, wanted)
    tensors = _read_tensors(files, wanted)
    lacking = [tensor for tensor, name in weight_map.items() if tensor not in tensors or tensors[tensor].source.shown != name]
    if lacking:
        where = weight_map[lacking[0]]
        raise ModelError(
            f"{INDEX} names {len(lacking)} tensors that their files do not hold: {_listing(lacking)} (first in {where}); download again"
        )
    unnamed = [tensor for tensor in tensors if tensor not in weight_map]
    if unnamed:
        where = tensors[unnamed[0]].source.shown
        raise ModelError(
            f"{len(unnamed)} tensors are in the files but not in {INDEX}: {_listing(unnamed)} (first in {where}); download again"
        )
    return tensors


def _require(files: _Files, wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if not files.has(name)]
    if missing:
        unfinished = _unfinished(files)
        raise FileError(
            f"{len(missing)} of {len(wanted)} shards are missing in {short(files.folder.name)}: {_listing(missing)}; "
            f"{unfinished or 'download them'}"
        )


def _unfinished(files: _Files) -> str | None:
    """What a download has left, beside the files or where the hub's client keeps its parts."""
    partial = [name for name in files.names() if name.endswith(PARTIAL_SUFFIXES)]
    if not partial and exists(files.folder / _HUB_PARTS):
        partial = sorted(path.name for path in (files.folder / _HUB_PARTS).glob("*.incomplete"))
    return f"a download was not finished ({_listing(partial)}): resume it" if partial else None


def _listing(names: Sequence[str]) -> str:
    told = ", ".join(short(name) for name in names[:_TELL])
    return told if len(names) <= _TELL else f"{told} and {len(names) - _TELL} more"
