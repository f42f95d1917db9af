"""A file that is read in many small chunks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from onedesk.service.loader import chunks
from safetensors.torch import save_file
from streaming import CHUNK, LONG_AGO


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks from a small file."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def weights(tmp_path: Path, small_chunks: None) -> Path:
    """25 chunks in one file of three tensors, last changed long ago."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(5000), "b": torch.randn(100, 100).bfloat16(), "c": torch.arange(15000)}, path)
    os.utime(path, LONG_AGO)
    return path
