"""`onedesk bench wake`: its states, what they count, and that only the first wake reads the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.service.bench.kinds import kind_table, measure_kind
from onedesk.service.bench.run import BenchPlan
from onedesk.service.cli import command as cli
from onedesk.service.config import Config
from onedesk.service.errors import RequestError
from onedesk.service.loader.names import ModelRoots
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "tiny", hidden=256, intermediate=1024, context=256, tokenizer=False)


def test_only_a_cold_wake_reads_the_disk(model, tmp_path, capsys):
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    command = ["bench", "wake", "--model", str(model), "--prompt", "20", "--cycles", "2", "--device", "cpu", "--json"]
    assert cli.main([*command, "--config", str(tmp_path / "onedesk.toml")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["model"], document["cycles"], document["prompt"]) == ("wake", "tiny", 2, 20)
    size, rows = document["checkpoint_bytes"], {row["state"]: row for row in document["rows"]}
    assert list(rows) == ["cold", "warm", "row 1", "row 2", "row 3"]
    for state, row in rows.items():
        assert (row["read_bytes"] > 0.9 * size) == (state in ("cold", "row 1"))
        assert row["cached_bytes"] > 0.95 * size  # a wake does not read the header
        assert row["load_seconds"] > 0
        assert row["share"] == pytest.approx(row["raw_seconds"] / row["wake_seconds"])
        assert row["bytes_per_second"] == pytest.approx(size / row["wake_seconds"])
    assert "row 3" in kind_table(document)


def test_another_engine_does_not_wake(model, tmp_path):
    plan = BenchPlan("wake", str(model), device="cpu", against="transformers")
    with pytest.raises(RequestError, match="only Onedesk gives way"):
        measure_kind(plan, Config(tree=tmp_path), ModelRoots([]))
