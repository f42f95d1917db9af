"""Pools over the real memory of this machine, and a checkpoint of more than 1 GB that is written once per user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.service.bench.shapes import random_checkpoint
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """Make a pool of at most 256 MiB on this machine's real memory, with 4 MiB slabs. Keyword arguments change its
    settings.
    """

    def make(**settings: object) -> Pool:
        chosen = {"limit_bytes": 256 * MIB, "floor": 64 * MIB, "initial_slab": 4 * MIB, "own_slab": MIB, **settings}
        return Pool("cpu", MemorySettings(**chosen), read_truth)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def large() -> Path:
    """The folder: 1.19 GB of BF16, no tokenizer. Read only."""
    cache = Path(tempfile.gettempdir()) / f"onedesk-tests-{os.getuid()}"
    return random_checkpoint("qwen3-0.6b", cache)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels, shared by all tests."""
    cache = tmp_path_factory.mktemp("kernels")
    keep_kernels(cache)
    return cache
