"""Single rows of a matrix in a checkpoint, read into their places before the whole matrix has come."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from .files import open_regular, read_exactly
from .header import TensorInfo
from .readers import advise_file, check_unchanged

_RANDOM: int | None = getattr(os, "POSIX_FADV_RANDOM", None)
_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)


def read_rows(info: TensorInfo, rows: Iterable[int], target: torch.Tensor) -> None:
    """Read `rows` of the matrix `info` into the same rows of `target`, which has its shape and dtype, on any device.

    The reads are announced before the first one is waited for. Raises FileError as stream_tensors does.
    """
    wanted = sorted(set(rows))
    if not wanted:
        return
    width = info.nbytes // info.shape[0]
    with open_regular(info.source.path, info.source.shown) as (fd, _):
        check_unchanged(info.source, fd)
        advise_file(fd, 0, 0, _RANDOM)  # no read-ahead around a row of a few KiB
        for row in wanted:
            advise_file(fd, info.start + row * width, width, _WILLNEED)
        raw = bytearray().join(read_exactly(fd, width, info.start + row * width, info.source.shown) for row in wanted)
    values = torch.frombuffer(raw, dtype=torch.uint8).view(target.dtype).view(len(wanted), *target.shape[1:])
    target[torch.tensor(wanted, device=target.device)] = values.to(target.device)
