"""A stand-in hub per test, and a tree that knows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, running_hub
from pulling import Desk, make_desk


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture
def desk(tmp_path: Path, hub: Hub) -> Desk:
    return make_desk(tmp_path / "tree", hub)
