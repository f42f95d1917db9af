"""Converts a checkpoint once: reads it tensor by tensor, writes the cache, and hashes both."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..core import CancelCheck, Progress, ProgressReport
from ..errors import Cancelled, FileError, OnedeskError
from ..loader.bounce import StagingBuffer
from ..loader.checkpoint import Checkpoint
from ..loader.chunks import intake_bytes
from ..loader.files import open_regular, read_exactly
from ..loader.header import DTYPE_BITS
from ..loader.json_files import read_json_object
from ..loader.stream import stream_tensors
from ..memory.budget import show
from ..memory.pool import Lease
from ..quant.quantize_weights import Quantizer
from ..quant.weight import QuantizedWeight, Weight
from ..work_folder import work_folder
from .converted import (
    SOURCE,
    WEIGHTS,
    Converted,
    describe,
    open_converted,
    replan,
    source_record,
    stored_pieces,
    unchanged_since,
)
from .partial import PIECE, Partial, partial_folder
from .reading import Reading
from .requantize import StagedTensor
from .weights import ALIGNMENT, PlannedTensor, WeightPlan

CPU = torch.device("cpu")
# The hash of the source is known only at the end: its bytes in the header are reserved.
NO_CONTENT = "0" * 64
# A second writer may publish between our two renames; each retry needs yet another writer.
ATTEMPTS = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert: the plan of `checkpoint` with its target format, the name of the quantization, the target
    folder, and the kernels that quantize faster, if any.
    """

    checkpoint: Checkpoint
    plan: WeightPlan
    quant: str
    folder: Path
    faster: Quantizer | None = None

    @property
    def need(self) -> int:
        """Bytes of memory required: the largest tensor plus the readers' staging buffers."""
        return max(map(_tensor_bytes, self.plan.tensors)) + _staging_bytes(self.plan)


@dataclass(slots=True)
class _Hashed:
    """An intake that hashes its input and passes it to `target` as `reading` says, or drops it (None)."""

    reading: Reading
    target: Weight | None
    faster: Quantizer | None
    digests: dict[int, bytes] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return CPU

    @property
    def step(self) -> int:
        return self.reading.step

    @property
    def most(self) -> int:
        return self.reading.most

    def take(self, values: torch.Tensor, first: int, work: torch.Tensor) -> None:
        octets = values.reshape(-1).view(torch.uint8)
        self.digests[first] = hashlib.sha256(octets.numpy().data).digest()
        if self.target is None:
            return
        part = self.reading.destination(self.target, self.faster)
        if not isinstance(part, torch.Tensor):
            part.take(values, first, work)
            return
        start = first * (octets.numel() // values.shape[0])
        part.reshape(-1).view(torch.uint8)[start : start + octets.numel()] = octets

    def digest(self) -> bytes:
        """The hash of the tensor's name, type, shape and bytes."""
        info = self.reading.info
        whole = hashlib.sha256(f"{info.name}\0{info.dtype}\0{info.shape}\0".encode())
        for first in sorted(self.digests):
            whole.update(self.digests[first])
        return whole.digest()


def is_current(
    conversion: Conversion, lease: Lease, progress: ProgressReport | None, cancel: CancelCheck | None
) -> bool:
    """Whether the folder already holds this conversion. All its bytes are hashed and compared; where the source's times
    differ, the source is hashed too.

    `lease` has conversion.need bytes. Raises Cancelled, FileError of the source.
    """
    folder, plan = conversion.folder, conversion.plan
    try:
        found = open_converted(folder, conversion.quant)
        replan(plan, found)
        if found.aim != plan.aim:
            return False
        made = str(read_json_object(folder / SOURCE, SOURCE).get("made"))
        if _hash_of_tensors(found, progress, cancel) != made:
            log.warning("the converted weights in the cache are not those that were written there: they are made again")
            return False
        if unchanged_since(folder, conversion.checkpoint):
            return True
    except Cancelled:
        raise
    except OnedeskError:
        return False
    content = hashlib.sha256()
    for hashes in _read(conversion, lease, progress, cancel):
        content.update(b"".join(hashes))
    if content.hexdigest() != found.content:
        return False
    _write_text(folder / SOURCE, json.dumps(source_record(conversion.checkpoint, found.content, made)))
    return True


def _hash_of_tensors(found: Converted, progress: ProgressReport | None, cancel: CancelCheck | None) -> str:
    """The hash of the tensors' bytes in the converted file. Raises Cancelled, FileError."""
    start = min(info.start for info in found.tensors.values())
    digest = hashlib.sha256()
    with open_regular(found.path, WEIGHTS) as (fd, source):
        total = source.size - start
        for done in range(0, total, PIECE):
            if cancel is not None and cancel():
                raise Cancelled("converting was stopped")
            digest.update(read_exactly(fd, min(PIECE, total - done), start + done, WEIGHTS))
            if progress is not None:
                progress(Progress("load", min(total, done + PIECE), total))
    return digest.hexdigest()


def convert(conversion: Conversion, lease: Lease, progress: ProgressReport | None, cancel: CancelCheck | None) -> str:
    """Write the folder completely or not at all; return the hash of the source's bytes. At most one tensor is in
    memory, in `lease`.

    An attempt that was stopped is resumed if neither its files nor the source have changed. Two processes that write
    the same folder at once both succeed, and a reader always sees one complete version. Raises Cancelled, FileError,
    ModelError.
    """
    parent, record = conversion.folder.parent, source_record(conversion.checkpoint, "", "")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # Both first remove what other attempts left.
        with (
            work_folder(parent, "unfinished") as work,
            partial_folder(parent, conversion.folder.name, work / "partial") as begun,
        ):
            _check_room(begun, conversion.plan)
            made = work / "made"
            made.mkdir()
            partial = Partial(begun, WEIGHTS, {"files": record["files"]}, _header(conversion, NO_CONTENT))
            hashes = _write_weights(partial, conversion, lease, progress, cancel)
            partial.path.rename(made / WEIGHTS)
            _write_text(made / SOURCE, json.dumps(record | hashes))
            _publish(made, conversion.folder, work / "old")
    except OSError as error:
        raise FileError(
            f"the converted weights cannot be kept in the cache: {error.strerror}; make room there, or make it writable"
        ) from None
    return hashes["content"]


def _write_weights(
    partial: Partial, conversion: Conversion, lease: Lease, progress: ProgressReport | None, cancel: CancelCheck | None
) -> dict[str, str]:
    """Return the hashes of the bytes read (`content`) and of the bytes written (`made`)."""
    written = partial.begin(cancel)
    with partial.path.open("r+b") as file:
        file.seek(0, os.SEEK_END)

        def keep(parts: Iterator[torch.Tensor]) -> None:
            for part in parts:
                octets = part.reshape(-1).view(torch.uint8).numpy().data
                file.write(octets)
                written.digest.update(octets)

        for hashes in _read(conversion, lease, progress, cancel, first=written.tensors, keep=keep):
            file.flush()  # before the journal records it
            written.end, written.tensors = file.tell(), written.tensors + 1
            written.content += hashes
            partial.note(written, hashes)
        content = hashlib.sha256(b"".join(written.content)).hexdigest()
        file.seek(0)
        file.write(_header(conversion, content))
        _sync(file)
    return {"content": content, "made": written.digest.hexdigest()}


def _read(
    conversion: Conversion,
    lease: Lease,
    progress: ProgressReport | None,
    cancel: CancelCheck | None,
    *,
    first: int = 0,
    keep: Callable[[Iterator[torch.Tensor]], None] | None = None,
) -> Iterator[list[bytes]]:
    """Read every tensor from `first` on, and convert those whose parts `keep` accepts; yield the source hashes
    of each.
    """
    plan = conversion.plan
    sizes = [sum(info.nbytes for info in tensor.parts) for tensor in plan.tensors]
    total, done = sum(sizes), sum(sizes[:first])
    for tensor in plan.tensors[first:]:
        room = _ConversionBuffers(lease)
        staging = _staging_buffers(plan, room)
        target = None
        if keep is not None:
            target = tensor.carve_staged(room.carve) if isinstance(tensor, StagedTensor) else tensor.carve(room.carve)
        hashed = [_Hashed(reading, target, conversion.faster) for reading in tensor.readings]
        before = done

        def report(here: Progress, before: int = before) -> None:
            if progress is not None:
                progress(Progress("load", before + here.done, total))

        stats = stream_tensors(
            [(one.reading.info, one) for one in hashed], progress=report, cancel=cancel, staging=staging
        )
        done += stats.bytes
        if target is not None and keep is not None:
            if tensor.settle is not None:
                tensor.settle(target)
            if isinstance(tensor, StagedTensor):
                target = _turned(tensor, target, room, staging[0], conversion.faster)
            keep(iter(target.tensors if isinstance(target, QuantizedWeight) else (target,)))
        yield [one.digest() for one in hashed]
    if cancel is not None and cancel():
        raise Cancelled("converting was stopped")


def _turned(
    tensor: StagedTensor, read: Weight, room: _ConversionBuffers, staging: StagingBuffer, faster: Quantizer | None
) -> Weight:
    """The tensor in its target format, made of the format that was read."""
    target = tensor.carve(room.carve)
    if isinstance(read, QuantizedWeight) and isinstance(target, QuantizedWeight):
        tensor.turn(read, target, staging.work, faster)
    return target


def _tensor_bytes(tensor: PlannedTensor) -> int:
    return tensor.nbytes + (tensor.staged_bytes if isinstance(tensor, StagedTensor) else 0)


def _header(conversion: Conversion, content: str) -> bytes:
    """The safetensors header, padded so that the tensors start at a multiple of ALIGNMENT."""
    aim = conversion.plan.aim
    if aim is None:
        raise ValueError("there is nothing to convert to")
    entries: dict[str, Any] = {"__metadata__": describe(aim, conversion.quant, content)}
    at = 0
    for name, shape, dtype, nbytes in _layout(conversion.plan):
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _layout(plan: WeightPlan) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Name, shape, dtype and bytes of every tensor of the file, in order."""
    for tensor in plan.tensors:
        yield from _layout_of(tensor)


def _layout_of(tensor: PlannedTensor) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    for name, _, shape, dtype in stored_pieces(tensor):
        yield name, shape, dtype, math.prod(shape) * DTYPE_BITS[dtype] // 8


def file_bytes(plan: WeightPlan) -> int:
    """Bytes of the tensors in the converted file."""
    return sum(nbytes for _, _, _, nbytes in _layout(plan))


def _check_room(begun: Path, plan: WeightPlan) -> None:
    """Raise an error if the disk is too full; `begun`: the folder with the part that is already written."""
    there = sum(path.stat().st_size for path in begun.iterdir())
    needed, free = max(0, file_bytes(plan) - there), shutil.disk_usage(begun).free
    if needed > free:
        raise FileError(
            f"the converted weights take {show(needed)} and the cache's disk has {show(free)} left; make room there"
        )


def _staging_bytes(plan: WeightPlan) -> int:
    """As plan.staging_bytes, but every tensor is staged in rows, because it is hashed."""
    count, raw, work = _bench(plan)
    return count * (raw + work)


def _bench(plan: WeightPlan) -> tuple[int, int, int]:
    count, _, work = plan.staging(CPU)
    raw = max(
        intake_bytes(reading.info, reading.step, reading.most) for tensor in plan.tensors for reading in tensor.readings
    )
    return max(1, count), -(-raw // ALIGNMENT) * ALIGNMENT, work


class _ConversionBuffers:
    """The bytes of a lease, reused for each tensor."""

    def __init__(self, lease: Lease) -> None:
        self._bytes, self._cursor = lease.tensor, 0

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._cursor
        self._cursor += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._bytes[start : start + nbytes].view(dtype).view(shape)


def _staging_buffers(plan: WeightPlan, room: _ConversionBuffers) -> list[StagingBuffer]:
    count, raw, work = _bench(plan)
    return [
        StagingBuffer(room.carve((raw,), torch.uint8), room.carve((work // 4,), torch.float32)) for _ in range(count)
    ]


def _publish(made: Path, folder: Path, aside: Path) -> None:
    """Move `made` to `folder` in one step; an existing folder first moves to `aside`. Raises OSError."""
    for attempt in range(ATTEMPTS):
        try:
            made.rename(folder)
        except OSError:
            if attempt + 1 == ATTEMPTS or not folder.exists():
                raise
            _set_aside(folder, aside / str(attempt))
        else:
            return


def _set_aside(folder: Path, aside: Path) -> None:
    aside.parent.mkdir(exist_ok=True)
    try:
        folder.rename(aside)
    except FileNotFoundError:  # another writer was faster
        time.sleep(0.001)


def _write_text(path: Path, text: str) -> None:
    """Replace a small file in one step. Raises OSError."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    with fresh.open("wb") as file:
        file.write(text.encode())
        _sync(file)
    fresh.replace(path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
