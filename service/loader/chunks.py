"""The units of reading: adjacent bytes of several tensors, or some rows of one tensor that are converted on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from .dtypes import torch_dtype
from .files import SourceFile, short
from .header import TensorInfo

# Measured cold on a virtual disk of 1.8 GB/s: chunks of 2 and 4 MiB read 256 MiB in 0.20 s, of 8 MiB in 0.33 s.
# WILLNEED ahead of the readers took 0.60 instead of 0.30 s for 512 MiB: the kernel's own read-ahead, doubled by
# SEQUENTIAL, is better.
CHUNK_BYTES = 4 << 20
PIECES_LIMIT = 1024  # IOV_MAX of Linux


class ChunkIntake(Protocol):
    """A destination that receives a tensor's rows as they arrive, and converts them."""

    @property
    def device(self) -> torch.device: ...

    @property
    def step(self) -> int:
        """Rows that must be passed together; the last group may be smaller."""
        ...

    @property
    def most(self) -> int:
        """Upper bound in bytes of one `take`, unless a single step is larger."""
        ...

    def take(self, values: torch.Tensor, first: int, work: torch.Tensor) -> None:
        """Convert the rows from `first` on. `values` [n, ...], of the file's type and on the device, is valid until the
        return.

        Called on the reader threads, each with its own `work` buffer: flat fp32, uninitialized.
        """
        ...


Destination: TypeAlias = torch.Tensor | ChunkIntake
Job: TypeAlias = tuple[TensorInfo, Destination]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, first + shape[0]) of a tensor, for `intake`."""

    intake: ChunkIntake
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Chunk:
    """Adjacent bytes of one file, from `offset` on: they fill `views` (flat uint8, one device) in order, or are `rows`.

    `jobs`: the job index of each view.
    """

    source: SourceFile
    device: torch.device
    offset: int
    nbytes: int = 0
    views: list[torch.Tensor] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    rows: Rows | None = None


def plan_chunks(jobs: Sequence[Job], *, in_file_order: bool) -> list[Chunk]:
    """Cut the jobs into chunks. A tensor's chunks end at multiples of CHUNK_BYTES in their file; row chunks end at
    whole steps.

    Raises ValueError for a tensor that does not fit.
    """
    chunks: list[Chunk] = []
    order = (
        sorted(range(len(jobs)), key=lambda i: (str(jobs[i][0].file), jobs[i][0].start))
        if in_file_order
        else range(len(jobs))
    )
    for index in order:
        info, target = jobs[index]
        if isinstance(target, torch.Tensor):
            _add_bytes(chunks, info, _flat(info, target), index)
        else:
            _add_rows(chunks, info, target, index)
    return chunks


def intake_bytes(info: TensorInfo, step: int, most: int) -> int:
    """Bytes of the largest chunk of `info` for an intake of this `step` and `most`."""
    return min(info.nbytes, _rows_together(info, step, most) * _row_bytes(info))


def _rows_together(info: TensorInfo, step: int, most: int) -> int:
    return max(1, most // max(1, _row_bytes(info) * step)) * step


def _row_bytes(info: TensorInfo) -> int:
    return info.nbytes // max(1, _stored_shape(info)[0])


def _stored_shape(info: TensorInfo) -> tuple[int, ...]:
    """A scalar counts as one row."""
    return info.shape or (1,)


def _add_rows(chunks: list[Chunk], info: TensorInfo, intake: ChunkIntake, index: int) -> None:
    shape, width, together = _stored_shape(info), _row_bytes(info), _rows_together(info, intake.step, intake.most)
    for first in range(0, shape[0] if info.nbytes else 0, together):
        count = min(together, shape[0] - first)
        rows = Rows(intake, first, (count, *shape[1:]), torch_dtype(info.dtype))
        chunks.append(
            Chunk(info.source, intake.device, info.start + first * width, count * width, jobs=[index], rows=rows)
        )


def _add_bytes(chunks: list[Chunk], info: TensorInfo, view: torch.Tensor, index: int) -> None:
    done = 0
    while done < info.nbytes:
        at = info.start + done
        last = chunks[-1] if chunks else None
        if last is None or not _continues(last, info.source, view.device, at):
            last = Chunk(info.source, view.device, at)
            chunks.append(last)
        take = min(info.nbytes - done, CHUNK_BYTES - at % CHUNK_BYTES)
        last.views.append(view[done : done + take])
        last.jobs.append(index)
        last.nbytes += take
        done += take


def _continues(chunk: Chunk, source: SourceFile, device: torch.device, at: int) -> bool:
    follows = (
        chunk.rows is None and chunk.source == source and chunk.device == device and chunk.offset + chunk.nbytes == at
    )
    return follows and at % CHUNK_BYTES != 0 and len(chunk.views) < PIECES_LIMIT


def _flat(info: TensorInfo, target: torch.Tensor) -> torch.Tensor:
    """The destination as flat uint8 over the same memory, [info.nbytes]."""
    where = f"the destination of {short(info.name)}"
    if target.dtype not in (torch_dtype(info.dtype), torch.uint8):
        raise ValueError(f"{where} is {target.dtype}, the file has {info.dtype}; nothing is converted while reading")
    if target.nbytes != info.nbytes:
        raise ValueError(f"{where} has {target.nbytes} bytes, the file has {info.nbytes}")
    if not target.is_contiguous():
        raise ValueError(f"{where} is not contiguous (shape {tuple(target.shape)}, strides {target.stride()})")
    return target.detach().reshape(-1).view(torch.uint8)
