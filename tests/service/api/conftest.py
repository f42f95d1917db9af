"""A tiny model, and a registry with a budget of its own that has it in its roots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import CONTEXT
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.registry import Registry
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder. Read only."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def registry(checkpoint: Path) -> Iterator[Registry]:
    made = Registry()
    made.configure(Config(tree=checkpoint.parent, model_roots=(checkpoint.parent,), memory={"floor": 64 << 20}))
    yield made
    made.close()


@pytest.fixture
def model(registry: Registry) -> OpenModel:
    """The tiny one, loaded."""
    return registry.open("tiny", context=CONTEXT)
