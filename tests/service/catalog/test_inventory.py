"""The rows of `onedesk models`: what files and config say of a model of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onedesk.service.catalog.composition import compose
from onedesk.service.catalog.inventory import default_model, model_rows, model_table
from onedesk.service.config import Config
from onedesk.service.console import WIDTH
from onedesk.service.loader.checkpoint import open_checkpoint
from published import CASES, write_published
from tiny_families import FAMILIES, write_family
from tiny_qwen3 import write_tiny_qwen3
from tiny_vision import write_seeing

GIB = 1 << 30


def rows_of(
    root: Path, memory: dict[str, Any] | None = None, *, context: int | None = None
) -> dict[str, dict[str, Any]]:
    rows = model_rows(Config(model_roots=(root,), memory=memory or {}), None, device="cpu", context=context)
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_family(root / family, family)
    write_family(root / "pictures", "qwen4_exp", vision=True)
    return root


def test_every_family_has_its_parameters_and_its_bytes_by_kind(models: Path):
    rows = rows_of(models)
    assert set(rows) == {*FAMILIES, "pictures"}
    for name, row in rows.items():
        checkpoint = open_checkpoint(models / name)
        network = compose(checkpoint.config)
        assert (row["parameters"], row["active_parameters"]) == (network.parameters, network.active)
        assert row["opens"] is row["fits"] is True
        assert row["context"] == 4096
        assert row["images"] > 0
    assert rows["qwen3_moe"]["active_parameters"] < rows["qwen3_moe"]["parameters"]
    assert rows["qwen4_exp"]["bytes"]["table"] == 4096 * 16 * 4
    # keys and values of one of four layers, fp32, and a pooled indexer key of 16 for four tokens
    assert rows["qwen4_exp"]["bytes"]["kv_per_1k"] == 1000 * (2 * 2 * 32 * 4 + 16)
    assert rows["qwen3_5"]["bytes"]["kv_per_1k"] == 1000 * 2 * 2 * 32 * 4
    # the picture tower is in the file, and is not opened
    assert rows["pictures"]["bytes"] == rows["qwen4_exp"]["bytes"]
    assert rows["pictures"]["parameters"] > rows["qwen4_exp"]["parameters"]


def test_models_that_see_say_what_their_towers_take(tmp_path: Path):
    write_seeing(tmp_path / "seer", "qwen3_vl")
    write_tiny_qwen3(tmp_path / "writer")
    rows = rows_of(tmp_path)
    assert rows["writer"]["vision"] is None
    seen = rows["seer"]["vision"]
    towers = sum(info.nbytes for name, info in open_checkpoint(tmp_path / "seer").tensors.items() if "visual" in name)
    assert towers <= seen["tower"] < 2 * towers
    assert (seen["pixels"], seen["tokens"]) == (262_144, 256)
    # x, mixed and qkv of 1,024 patches, four rows of 256 tokens, fp32
    assert seen["scratch"] == pytest.approx(4 * (1024 * (5 * 72 + 36) + 4 * 256 * 64), rel=0.01)


def test_longest_context_and_room_for_images_follow_the_budget(tmp_path: Path):
    write_tiny_qwen3(tmp_path / "tiny", context=200_000)
    plenty = rows_of(tmp_path)["tiny"]
    assert plenty["context"] == 200_000
    little = rows_of(tmp_path, {"limit_bytes": 64 << 20, "floor": GIB})["tiny"]
    assert little["fits"] is True
    assert 4096 <= little["context"] < 200_000
    assert little["images"] == pytest.approx(plenty["images"] - GIB + (512 << 20), abs=GIB // 4)
    at_most = rows_of(tmp_path, {"limit_bytes": 64 << 20}, context=little["context"])["tiny"]
    beyond = rows_of(tmp_path, {"limit_bytes": 64 << 20}, context=little["context"] + 256)["tiny"]
    assert (at_most["fits"], beyond["fits"]) == (True, False)
    assert at_most["images"] < plenty["images"]


def test_packed_numbers_count_as_parameters(tmp_path: Path):
    case = next(case for case in CASES if case.name == "gptq-asym-128")
    write_published(tmp_path / "packed", case)
    row = rows_of(tmp_path)["packed"]
    assert row["parameters"] == compose(open_checkpoint(tmp_path / "packed").config).parameters
    assert row["bytes"]["weights"] < row["parameters"] * 2


def test_the_table_has_a_column_for_each_figure(models: Path):
    rows = model_rows(Config(model_roots=(models,)), None, device="cpu", context=None)
    head, *lines = model_table(rows).splitlines()
    assert (
        " ".join(head.split())
        == "NAME FAMILY FORMAT PARAMETERS ACTIVE WEIGHTS TABLE KV / 1000 FITS CONTEXT IMAGES TOKENS/s"
    )
    assert sum(not line.startswith(" ") for line in lines) == len(rows)
    assert all(len(line) <= WIDTH for line in lines if line.startswith(" "))
    assert "256 KiB" in next(line for line in lines if line.startswith("qwen4_exp"))


def test_a_partial_download_is_not_the_default(tmp_path: Path):
    (tmp_path / "models" / "half").mkdir(parents=True)
    (tmp_path / "models" / "half" / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    config = Config(model_roots=(tmp_path / "models",))
    assert default_model(config) == "half"  # its error says what is missing
    write_tiny_qwen3(tmp_path / "models" / "onedesk-demo-toy", tokenizer=False)
    assert default_model(config) == "onedesk-demo-toy"
    write_tiny_qwen3(tmp_path / "models" / "first", tokenizer=False)
    assert default_model(config) == "first"
    write_tiny_qwen3(tmp_path / "models" / "second", tokenizer=False)
    assert default_model(config) is None


def test_a_model_without_its_tokenizer_is_said_to_take_ids_only(tmp_path: Path):
    folder = write_tiny_qwen3(tmp_path / "tiny")
    assert "--ids" not in rows_of(tmp_path)["tiny"]["reason"]
    (folder / "tokenizer.json").unlink()
    row = rows_of(tmp_path)["tiny"]
    assert row["fits"] is True
    assert row["reason"].endswith("it has no tokenizer.json, so it takes token ids only (--ids)")
