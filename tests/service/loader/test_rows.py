"""Single rows of a matrix: their bytes and no others, and the same errors as a whole read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from onedesk.service.errors import FileError
from onedesk.service.loader.header import TensorInfo, read_header
from onedesk.service.loader.rows import read_rows
from safetensors.torch import save_file

ROWS = 300


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.float16])
def matrix(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(2)).to(request.param)


def written(matrix: torch.Tensor, folder: Path) -> TensorInfo:
    save_file({"before": torch.ones(7), "matrix": matrix}, folder / "model.safetensors")
    return read_header(folder / "model.safetensors").tensors["matrix"]


@pytest.mark.parametrize("rows", [[0], [ROWS - 1], [5, 3, 5, 299, 0], list(range(ROWS)), []])
def test_the_rows_come_in_the_order_that_was_asked_for(matrix, tmp_path, rows):
    found = read_rows(written(matrix, tmp_path), rows)
    assert found.dtype == matrix.dtype
    assert torch.equal(found, matrix[rows])


def test_a_file_that_changed_is_refused(tmp_path):
    info = written(torch.ones(ROWS, 24), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(FileError, match="was changed or replaced"):
        read_rows(info, [1])


def test_a_file_truncated_after_its_header_is_located(tmp_path):
    info = written(torch.ones(ROWS, 24), tmp_path)
    before = (tmp_path / "model.safetensors").stat()
    os.truncate(tmp_path / "model.safetensors", before.st_size - 10)
    os.utime(tmp_path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FileError, match=r"model\.safetensors"):
        read_rows(info, [ROWS - 1])


def test_a_file_that_is_gone_is_refused(tmp_path):
    info = written(torch.ones(ROWS, 24), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileError, match="cannot be opened"):
        read_rows(info, [1])
