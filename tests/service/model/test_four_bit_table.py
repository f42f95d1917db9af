"""The n-gram table of qwen4_exp in NVFP4, as published: read where it lies, and refused by name where parts of it do
not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onedesk.service.engine.session import draw_blueprint
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.table import FileTable
from onedesk.service.model.tables import PlannedTable, open_tables
from published import nvfp4
from safetensors.torch import load_file, save_file
from tiny_families import write_family

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding."
SHARDS, ROWS, WIDTH = 4, 1024, 16
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The checkpoint, and what its table means."""
    folder = write_family(tmp_path_factory.mktemp("model") / "tiny", "qwen4_exp")
    tensors = load_file(folder / "model.safetensors")
    stored, wanted = nvfp4(divides=False)(SHARDS * ROWS, WIDTH, torch.Generator().manual_seed(4))
    for shard in range(SHARDS):
        for suffix in ("weight", "weight_scale"):
            tensors[f"{TABLE}shard_{shard}.{suffix}"] = stored[suffix][shard * ROWS : (shard + 1) * ROWS].contiguous()
    tensors[f"{TABLE}weight_scale_2"] = stored["weight_scale_2"].view(1)
    save_file(tensors, folder / "model.safetensors")
    return folder, wanted


def table_of(folder: Path) -> PlannedTable:
    (table,) = draw_blueprint(open_checkpoint(folder), torch.device("cpu"), 64).plan.tables
    return table


def opened(planned: PlannedTable) -> FileTable:
    (table,) = open_tables([planned]).values()
    return table


def changed(folder: Path, to: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_its_rows_are_read_where_they_lie(made: tuple[Path, torch.Tensor]) -> None:
    table = table_of(made[0])
    assert table.nbytes == SHARDS * ROWS * (WIDTH // 2 + WIDTH // 16)
    rows = [4095, 0, 1024, 1023, 0, 2500]
    assert torch.equal(opened(table).read(rows), made[1][rows])


def test_all_in_one_tensor_it_is_the_same(made: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    def join(tensors: Tensors) -> None:
        for suffix in ("weight", "weight_scale"):
            whole = torch.cat(
                [tensors.pop(f"{TABLE}shard_{shard}.{suffix}").view(torch.uint8) for shard in range(SHARDS)]
            )
            tensors[TABLE + suffix] = whole if suffix == "weight" else whole.view(torch.float8_e4m3fn)

    rows = [3, 4000]
    assert torch.equal(opened(table_of(changed(made[0], tmp_path, join))).read(rows), made[1][rows])


def other(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({TABLE + suffix: tensor})


def without(suffix: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(TABLE + suffix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("shard_2.weight_scale"), r"lacks the tensor .*shard_2\.weight_scale of NVFP4, wanted \[1024, 1\]"),
        (without("shard_1.weight"), r"lacks the tensor .*shard_1\.weight of NVFP4, wanted \[1024, 8\]"),
        (other("shard_1.weight", torch.zeros(1000, 8, dtype=torch.uint8)), r"wanted \[1024, 8\] .* found \[1000, 8\]"),
        (other("shard_1.weight", torch.zeros(1024, 9, dtype=torch.uint8)), r"wanted \[1024, 8\] .* found \[1024, 9\]"),
        (other("weight_scale_2", torch.ones(2)), r"weight_scale_2 is F32 \[2\]; one floating number is needed"),
        (without("weight_scale_2"), r"shard_0\.weight: wanted \[1024, 16\] by config\.json, found \[1024, 8\]"),
    ],
)
def test_what_does_not_fit_is_named(
    made: tuple[Path, torch.Tensor], tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    folder = changed(made[0], tmp_path, change)
    with pytest.raises(ModelError, match=message):
        table_of(folder)
