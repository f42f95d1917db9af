"""A checkpoint on disk: its configuration and the location of each tensor. Only headers and small JSON files
are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import FileError, ModelError, brief
from .files import SourceFile, Stamps, exists, short, stamps
from .folder_files import INDEX, FolderFiles, refuse_foreign, unfinished
from .header import TensorInfo
from .hub_cache import BLOBS, repository_of
from .json_files import read_json_object
from .shards import SINGLE, FolderTensors, read_folder, read_tensors

CONFIG = "config.json"
GENERATION = "generation_config.json"
# Where ModelOpt exports before 0.35 keep their quantization settings.
HF_QUANT = "hf_quant_config.json"
# The files that determine how tensors are read, and from where. Read once, with the headers.
SETTINGS = (CONFIG, GENERATION, HF_QUANT, INDEX, SINGLE)
# Read later, by service/text; their link targets are checked here, with all the others.
LANGUAGE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
LANGUAGE += ("preprocessor_config.json", "processor_config.json")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
END_IDS, LARGEST_ID = 256, 2**31 - 1


@dataclass(frozen=True, slots=True)
class Census:
    """A checkpoint's total of numbers, and its bytes by stored dtype."""

    parameters: int
    bytes_by_dtype: Mapping[str, int]
    files: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint. `folder` holds config.json and the tokenizer; `weight_bytes` is the sum over all tensors.

    `generation` is empty without generation_config.json, see `has_generation`. `settings`: the stamps of the SETTINGS
    files when they were read; None where there are no files, as for a generated network. `notes`: one sentence per file
    that was ignored.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    weight_bytes: int
    settings: Stamps | None = None
    has_generation: bool = False
    notes: tuple[str, ...] = ()
    # The tensors' files, collected once: the service checks them for changes before each first token.
    sources: frozenset[SourceFile] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", frozenset(info.source for info in self.tensors.values()))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({info.file for info in self.tensors.values()}))

    def changed(self) -> bool:
        """Whether a file with tensors or settings was changed, deleted or added since it was read."""
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
    """Validate a folder (single file or shards), or a lone safetensors file with config.json next to it.

    Symlinks are followed only to files in the folder itself or under one of `roots`. Raises FileError for a missing,
    truncated or unreadable file, ModelError for files that are no usable checkpoint.
    """
    path = path.absolute()
    if not exists(path):
        raise FileError(f"{short(path.name)} does not exist or may not be read; `onedesk models` lists what there is")
    lone = None if path.is_dir() else path
    folder = path if lone is None else path.parent
    repository = repository_of(folder.resolve())
    own = (folder.resolve(), *((repository / BLOBS,) if repository is not None else ()))
    bases = (*own, *(root.resolve() for root in roots))
    files = FolderFiles(folder, bases)
    settings = stamps(folder, SETTINGS)
    # A lone file is checked first: for a GGUF file the error must say so, not that config.json is missing.
    found = FolderTensors({} if lone is None else read_tensors(files, [lone.name]))
    config = _read_config(files, lone)
    generation = read_json_object(files.path(GENERATION), GENERATION) if files.has(GENERATION) else {}
    if lone is None:
        found = read_folder(files)
    tensors = found.tensors
    if not tensors:
        raise ModelError(f"{folder.name} holds no tensor at all; download it again")
    for name in filter(files.has, LANGUAGE):
        files.path(name)
    weight_bytes = sum(info.nbytes for info in tensors.values())
    name = lone.stem if lone is not None else (repository or folder.resolve()).name
    documents = MappingProxyType(config), MappingProxyType(generation)
    return Checkpoint(
        folder, name, *documents, MappingProxyType(tensors), weight_bytes, settings, files.has(GENERATION), found.notes
    )


def _read_config(files: FolderFiles, lone: Path | None) -> dict[str, Any]:
    if not files.has(CONFIG):
        if lone is not None:
            raise FileError(
                f"there is no config.json beside {short(lone.name)}; put the model's config.json and tokenizer.json"
                " next to it"
            )
        refuse_foreign(files)
        raise FileError(
            f"there is no config.json in {short(files.folder.name)}; {unfinished(files) or 'download the whole folder'}"
        )
    config = read_json_object(files.path(CONFIG), CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise ModelError(
            "config.json does not say the model_type (a name such as qwen3); get the config.json that belongs to the"
            " weights"
        )
    if config.get("quantization_config") is None and files.has(HF_QUANT):
        config["quantization_config"] = modelopt_settings(read_json_object(files.path(HF_QUANT), HF_QUANT))
    return config


def end_ids(document: Mapping[str, Any], shown: str) -> frozenset[int]:
    """The ids of eos_token_id in config.json or generation_config.json; empty where it is absent. Raises ModelError."""
    value = document.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > END_IDS or not all(type(item) is int and 0 <= item <= LARGEST_ID for item in values):
        raise ModelError(
            f"{shown} has eos_token_id = {brief(value)}; a whole number from 0 is needed, or a list of at most"
            f" {END_IDS}"
        )
    return frozenset(values)


def modelopt_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in HF_QUANT as a quantization_config. Raises ModelError."""
    settings = document.get("quantization")
    if not isinstance(settings, dict):
        raise ModelError(f"{HF_QUANT} has quantization = {brief(settings)}; an object is needed, get the file again")
    return {"quant_method": "modelopt", **settings}
