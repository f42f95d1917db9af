"""Single rows of a matrix in a checkpoint, read before the whole matrix has arrived."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .dtypes import torch_dtype
from .files import open_regular, read_exactly
from .header import TensorInfo
from .readers import advise_file, check_unchanged

PART_BYTES = 1 << 20
_RANDOM: int | None = getattr(os, "POSIX_FADV_RANDOM", None)
_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)


def _announce(fd: int, info: TensorInfo, width: int, rows: Sequence[int]) -> None:
    advise_file(fd, 0, 0, _RANDOM)  # no read-ahead around a row of a few KiB
    for row in rows:
        advise_file(fd, info.start + row * width, width, _WILLNEED)


def read_rows(info: TensorInfo, rows: Sequence[int]) -> torch.Tensor:
    """`rows` of the matrix `info`, in this order: [len(rows), ...] of its dtype, on the CPU.

    All reads are announced before the first one blocks. Raises FileError as stream_tensors does.
    """
    width = info.nbytes // info.shape[0]
    if not rows:
        return torch.empty((0, *info.shape[1:]), dtype=torch_dtype(info.dtype))
    with open_regular(info.source.path, info.source.shown) as (fd, _):
        check_unchanged(info.source, fd)
        _announce(fd, info, width, rows)
        raw = bytearray().join(read_exactly(fd, width, info.start + row * width, info.source.shown) for row in rows)
    return torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype(info.dtype)).view(len(rows), *info.shape[1:])


def is_all_zero(info: TensorInfo) -> bool:
    """Whether every number of a float tensor is 0; reads it in parts. Raises FileError as `read_rows`."""
    with open_regular(info.source.path, info.source.shown) as (fd, _):
        check_unchanged(info.source, fd)
        for at in range(0, info.nbytes, PART_BYTES):
            raw = bytearray(read_exactly(fd, min(PART_BYTES, info.nbytes - at), info.start + at, info.source.shown))
            if bool(torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype(info.dtype)).any()):
                return False
    return True
