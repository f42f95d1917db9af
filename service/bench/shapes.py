"""Random checkpoints with the shapes of published models, for measuring where no weights are at hand."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..catalog.known_configs import PUBLISHED, qwen3
from ..errors import FileError
from ..model.draft import with_draft
from ..model.families import family_of, text_config
from ..model.spec import Source
from ..work_folder import work_folder

log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 4 << 20  # 8 MiB of BF16 and 16 MiB of FP32 at a time, whatever the model's size
_SPREAD = 0.02  # standard deviation of the weights, as at the start of training
_NAMES: Mapping[torch.dtype, str] = {torch.bfloat16: "BF16", torch.float32: "F32"}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-toy": qwen3(256, 4, 4, 2, 768, True),  # 0.09 GB, for frequent runs
    **{name.lower(): PUBLISHED[name] for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")},
    # with its layer for multi-token prediction
    "qwen3.5-toy": {**text_config(PUBLISHED["Qwen3.5-0.8B"]), "num_hidden_layers": 8, "vocab_size": 32768},  # 0.3 GB
    "qwen3.5-0.8b": text_config(PUBLISHED["Qwen3.5-0.8B"]),
    "qwen3.5-4b": text_config(PUBLISHED["Qwen3.5-4B"]),
}


def random_checkpoint(name: str, cache: Path) -> Path:
    """The folder of a random BF16 checkpoint with the shape `name` of SHAPES, written on first use under cache/bench.

    No tokenizer, no end token: it is driven with token ids. Writing holds a few MiB, never a tensor as a whole. Raises
    FileError when the disk is full or cannot be written.
    """
    folder = cache / "bench" / name
    if folder.is_dir():
        return folder
    try:
        with work_folder(folder.parent, name) as started:
            whole = started / name
            whole.mkdir()
            write_random(whole, SHAPES[name])
            whole.rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise FileError(
            f"cannot write the random checkpoint {name} into the cache: {error.strerror}; free disk space there"
        ) from error
    return folder


def write_random(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors with random weights (normal; norms are 1) of `dtype` into an existing
    folder.
    """
    family = family_of(config)
    described = family.read_config(config)
    described = with_draft(described) if config.get("mtp_num_hidden_layers") else described
    sources = [source for wanted in family.destinations(described) for source in wanted.sources]
    header = _header(sources, dtype)
    needed = len(header) + sum(dtype.itemsize * math.prod(source.shape) for source in sources)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FileError(
            f"the random checkpoint needs {needed:,} bytes and the disk of the cache has {free:,} free; free disk space"
            " there"
        )
    log.info("writing a random checkpoint of %.2f GB", needed / 1e9)
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for source in sources:
            for chunk in _values(source, generator, dtype):
                _write(file, chunk)
        file.flush()
        os.fsync(file.fileno())
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")


def _header(sources: list[Source], dtype: torch.dtype) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for source in sources:
        end = at + dtype.itemsize * math.prod(source.shape)
        entries[source.name] = {"dtype": _NAMES[dtype], "shape": list(source.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(source: Source, generator: torch.Generator, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    left = math.prod(source.shape)
    while left:
        size = min(left, _CHUNK_ELEMENTS)
        wide = torch.ones(size) if len(source.shape) == 1 else torch.randn(size, generator=generator).mul_(_SPREAD)
        yield wide.to(dtype)
        left -= size


def _write(file: BinaryIO, values: torch.Tensor) -> None:
    file.write(values.view(torch.uint8).numpy().data)
