"""Shared by the streaming tests: destinations, comparison with the file, and reads that can be disturbed."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.loader.header import TensorInfo, read_header

CHUNK = 4096
LONG_AGO = (1_000_000_000, 1_000_000_000)  # a change within the file's first clock tick would not show in its time


def empty_jobs(path: Path) -> list[tuple[TensorInfo, torch.Tensor]]:
    """A separate destination for each tensor of a file, filled with values that no tensor keeps."""
    return [(info, torch.full((info.nbytes,), 0xA5, dtype=torch.uint8)) for info in read_header(path).tensors.values()]


def assert_same(jobs: Sequence[tuple[TensorInfo, torch.Tensor]], path: Path) -> None:
    content = path.read_bytes()
    for info, target in jobs:
        assert (
            target.reshape(-1).view(torch.uint8).numpy().tobytes() == content[info.start : info.start + info.nbytes]
        ), info.name


def assert_no_reader_left() -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("onedesk-read")] == []


def intercept(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], Any]) -> list[int]:
    """Call `act` before read number `at` (from 0); returns the offsets of all reads."""
    offsets: list[int] = []
    real, count = os.preadv, itertools.count()

    def preadv(fd: int, views: Any, offset: int) -> int:
        offsets.append(offset)
        if next(count) == at:
            act()
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets
