"""Rows of a table that stays in its files: what they mean in every form, each read once, and refused where they are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError
from onedesk.service.loader.header import TensorInfo, read_header
from onedesk.service.loader.table import FileTable
from published import nvfp4
from safetensors.torch import save_file

ROWS, WIDTH, PARTS = 40, 48, 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An NVFP4 table in four parts, as published, and what it means."""
    stored, wanted = nvfp4(divides=False)(ROWS, WIDTH, torch.Generator().manual_seed(2))
    each = ROWS // PARTS
    tensors = {"table.weight_scale_2": stored["weight_scale_2"].view(1)}
    for part in range(PARTS):
        for suffix in ("weight", "weight_scale"):
            tensors[f"table.shard_{part}.{suffix}"] = stored[suffix][part * each : (part + 1) * each].contiguous()
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    save_file(tensors, path)
    return path, wanted


def opened(path: Path) -> FileTable:
    found: dict[str, TensorInfo] = dict(read_header(path, shown=path.name).tensors)
    numbers, groups = ([found[f"table.shard_{part}.{suffix}"] for part in range(PARTS)] for suffix in ("weight", "weight_scale"))
    return FileTable(numbers, found["table.weight_scale_2"], groups)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=30))
def test_rows_in_four_bits_are_those_of_their_meaning_in_any_order(file: tuple[Path, torch.Tensor], rows: list[int]) -> None:
    path, wanted = file
    table = opened(path)
    assert table.shape == (ROWS, WIDTH)
    assert torch.equal(table.read(torch.tensor(rows)), wanted[rows])


def test_a_scale_that_is_nan_is_named_when_its_row_is_read(file: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    raw = bytearray(file[0].read_bytes())
    info = read_header(file[0], shown="table").tensors["table.shard_2.weight_scale"]
    raw[info.start + WIDTH // 16] = 0x7F
    path = tmp_path / "table.safetensors"
    path.write_bytes(raw)
    table = opened(path)
    assert torch.equal(table.read(torch.tensor([20])), file[1][[20]])
    with pytest.raises(ModelError, match=r"tensor table\.shard_2\.weight_scale has scales that are NaN; the checkpoint is damaged"):
        table.read(torch.tensor([0, 21]))
