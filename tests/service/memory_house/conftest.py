"""A checkpoint of more than 1 GB, written once for a user: random weights in the shape of Qwen3-0.6B."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.service.bench.shapes import random_checkpoint


@pytest.fixture(scope="session")
def large() -> Path:
    """The folder: 1.19 GB of BF16, no tokenizer. Read only."""
    cache = Path(tempfile.gettempdir()) / f"onedesk-tests-{os.getuid()}"
    return random_checkpoint("qwen3-0.6b", cache)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled kernels are kept, once for all tests."""
    cache = tmp_path_factory.mktemp("kernels")
    keep_kernels(cache)
    return cache
