"""Converted weights in the cache: found by a key of their source, and trusted only while the source is unchanged.

A folder `quantized/KEY` holds weights.safetensors (the planned tensors in their memory layout) and source.json. KEY is
a hash of the source's file names, sizes and headers, and of the first 4 KiB of up to 256 evenly spread tensors. It
costs one megabyte of reading per opening. It distinguishes checkpoints of the same shape, because training changes
every tensor.

KEY alone would miss a change in the middle of a tensor. So source.json records size, modification time and change time
(which no program can set) of every source file, and the hash of all its bytes. `onedesk quantize` compares that hash
when the times differ, and the hash of the converted file on every run. To hash all bytes at every opening would cost
more than the conversion.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import FileError, ModelError, OnedeskError
from ..loader.checkpoint import Checkpoint
from ..loader.dtypes import TORCH_DTYPES
from ..loader.files import exists, open_regular, read_exactly
from ..loader.header import TensorInfo, read_header
from ..loader.json_files import read_json_object
from ..quant.formats import CHOICES, INT8, int4, weight_tensors
from ..quant.published import KEY as PUBLISHED
from ..quant.weight import Format
from .reading import Reading
from .requantize import requantized
from .spec import Destination
from .weights import NAMES, PlannedTensor, WeightPlan, plan_weights

log = logging.getLogger(__name__)

FOLDER = "quantized"
WEIGHTS = "weights.safetensors"
SOURCE = "source.json"
# Version of the file, of its tensor layout and of the source hash: another version gives another key.
VERSION = 1
SAMPLES = 256
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Converted:
    """A folder of converted weights whose header is valid. `aim`: the format of its matrices; `content`: the hash of
    the source.
    """

    path: Path
    aim: Format
    content: str
    tensors: Mapping[str, TensorInfo]


def plan_form(
    wanted: Callable[[], Iterable[Destination]], checkpoint: Checkpoint, quant: str, cache: Path | None
) -> WeightPlan:
    """The plan of `wanted` in the quantization `quant` (none, int8 or int4), read from the cache where it has the
    weights.

    A cache entry that cannot be trusted is skipped with a log line. Raises ModelError, FileError.
    """
    aim = CHOICES.get(quant)
    folder = None if aim is None or cache is None else converted_folder(checkpoint, quant, cache)
    if folder is None or not exists(folder):
        return plan_weights(wanted(), checkpoint, aim)
    try:
        found = open_converted(folder, quant)
        if not unchanged_since(folder, checkpoint):
            raise FileError("a file of the model was changed, copied or touched since it was made")
        return replan(requantized(plan_weights(wanted(), checkpoint, found.aim)), found)
    except OnedeskError as error:
        log.warning(
            "%s: the converted weights in the cache (%s/%s) are not used: %s; onedesk quantize --model %s --quant %s"
            " makes them again",
            *(checkpoint.name, FOLDER, folder.name, error, checkpoint.name, quant),
        )
    return plan_weights(wanted(), checkpoint, aim)


def converted_folder(checkpoint: Checkpoint, quant: str, cache: Path) -> Path:
    """The cache folder of `checkpoint` converted to `quant`, whether or not it exists. Raises FileError."""
    key = hashlib.sha256(json.dumps([VERSION, quant, checkpoint.config.get(PUBLISHED)], sort_keys=True).encode())
    for path, infos in _by_file(checkpoint).items():
        key.update(f"{infos[0].source.shown}\0{infos[0].source.size}\0".encode())
        for info in infos:
            key.update(f"{info.name}\0{info.dtype}\0{info.shape}\0{info.start}\0".encode())
        key.update(_sample(path, infos, max(1, SAMPLES * len(infos) // len(checkpoint.tensors))))
    return cache / FOLDER / key.hexdigest()[:32]


def _by_file(checkpoint: Checkpoint) -> dict[Path, list[TensorInfo]]:
    """The tensors of each file, files and tensors in order."""
    found: dict[Path, list[TensorInfo]] = {}
    for info in sorted(checkpoint.tensors.values(), key=lambda info: (str(info.file), info.start)):
        found.setdefault(info.file, []).append(info)
    return found


def _sample(path: Path, infos: list[TensorInfo], count: int) -> bytes:
    """The first bytes of `count` tensors, evenly spread."""
    chosen = [infos[i * len(infos) // count] for i in range(min(count, len(infos)))]
    with open_regular(path, infos[0].source.shown) as (fd, source):
        return b"".join(read_exactly(fd, min(SAMPLE_BYTES, info.nbytes), info.start, source.shown) for info in chosen)


def open_converted(folder: Path, quant: str) -> Converted:
    """The converted weights in `folder`, their header checked. Raises FileError, ModelError."""
    header = read_header(folder / WEIGHTS, shown=WEIGHTS)
    metadata = header.metadata
    if (metadata.get("format"), metadata.get("version"), metadata.get("quant")) != ("onedesk", str(VERSION), quant):
        raise ModelError(f"{WEIGHTS} does not say that it is version {VERSION} of weights in {quant}")
    aim = INT8
    if quant == "int4":
        group = metadata.get("group", "")
        if not group.isdecimal() or len(group) > 4 or not 32 <= int(group) <= 1024 or int(group) % 32:
            raise ModelError(f"{WEIGHTS} has groups of {group!r} columns")
        aim = int4(int(group), symmetric=metadata.get("symmetric") == "true")
    return Converted(folder / WEIGHTS, aim, metadata.get("content", ""), header.tensors)


def describe(aim: Format, quant: str, content: str) -> dict[str, str]:
    """The header's metadata, as `open_converted` reads it."""
    metadata = {"format": "onedesk", "version": str(VERSION), "quant": quant, "content": content}
    return metadata if aim == INT8 else metadata | {"group": str(aim.group), "symmetric": str(aim.symmetric).lower()}


def source_record(checkpoint: Checkpoint, content: str, made: str) -> dict[str, Any]:
    """The content of source.json: hashes of the source and of the converted tensors, and the current size (bytes) and
    times (nanoseconds) of each source file.
    """
    return {
        "content": content,
        "made": made,
        "files": {source: list(figures) for source, figures in _figures(checkpoint).items()},
    }


def unchanged_since(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether the source's files have the sizes and times that source.json records. Raises FileError, ModelError."""
    record = read_json_object(folder / SOURCE, SOURCE).get("files")
    return record == {source: list(figures) for source, figures in _figures(checkpoint).items()}


def _figures(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for source in {info.source for info in checkpoint.tensors.values()}:
        try:
            now = source.path.stat()
        except OSError as error:
            raise FileError(f"{source.shown} cannot be looked at: {error.strerror}") from None
        found[source.shown] = (now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    return found


def replan(plan: WeightPlan, found: Converted) -> WeightPlan:
    """`plan` with every tensor read from the converted file. Raises ModelError where that file has other tensors."""
    left = dict(found.tensors)
    tensors = tuple(_replanned(tensor, left) for tensor in plan.tensors)
    if left:
        raise ModelError(f"{WEIGHTS} has tensors that the model does not, the first is {min(left)}")
    return replace(plan, tensors=tensors)


def _replanned(tensor: PlannedTensor, left: dict[str, TensorInfo]) -> PlannedTensor:
    readings = []
    for name, piece, shape, dtype in stored_pieces(tensor):
        info = left.pop(name, None)
        if info is None or info.shape != shape or info.dtype != dtype:
            found = "lacks it" if info is None else f"has {info.dtype} {list(info.shape)}"
            raise ModelError(f"{WEIGHTS} is to have {name}, {dtype} {list(shape)}, and {found}")
        readings.append(Reading(info, 0, shape[0], piece))
    return replace(tensor, readings=tuple(readings), settle=None)


def stored_pieces(tensor: PlannedTensor) -> list[tuple[str, str, tuple[int, ...], str]]:
    """The stored parts of a planned tensor, in file order: name, field of the weight, shape, dtype."""
    key, held = tensor.destination.key, tensor.held
    if not isinstance(held, Format):
        return [(key, "", tensor.destination.shape, NAMES[held])]
    rows, cols = tensor.destination.shape
    return [
        (f"{key}.{piece.name}", piece.name, piece.shape, _STORED_NAMES[piece.dtype])
        for piece in weight_tensors(held, rows, cols)
    ]


_STORED_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
