"""Pools over the real memory of this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onedesk.service.memory.budget import MIB, MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """Make a pool of at most 256 MiB on this machine's real memory, with 4 MiB slabs; keyword arguments change its settings."""

    def make(**settings: object) -> Pool:
        chosen = {"limit_bytes": 256 * MIB, "floor": 64 * MIB, "initial_slab": 4 * MIB, "own_slab": MIB, **settings}
        return Pool("cpu", MemorySettings(**chosen), read_truth)  # type: ignore[arg-type]

    return make
