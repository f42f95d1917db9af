"""`onedesk bench ttft`: its cases, what they count, and that loading and prefill overlap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.service.bench.first_token import first_token_table
from onedesk.service.bench.kinds import measure_kind
from onedesk.service.bench.run import BenchPlan
from onedesk.service.cli import command as cli
from onedesk.service.config import Config
from onedesk.service.errors import RequestError
from onedesk.service.loader.names import ModelRoots
from onedesk.service.memory.read_bandwidth import keep_ceiling
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(
        tmp_path_factory.mktemp("models") / "tiny", hidden=256, intermediate=1024, context=256, tokenizer=False
    )


def test_every_way_to_the_first_token_is_measured(model, tmp_path, capsys):
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    keep_ceiling(tmp_path / "cache", "cpu", 2e10)  # measuring it reads 24 GiB
    command = [
        "bench",
        "ttft",
        "--model",
        str(model),
        "--prompt",
        "40",
        "--cycles",
        "2",
        "--device",
        "cpu",
        "--config",
        str(config),
        "--json",
    ]
    assert cli.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["model"], document["cycles"]) == ("ttft", "tiny", 2)
    rows = document["rows"]
    assert [(row["engine"], row["state"], row["overlap"]) for row in rows] == [
        ("onedesk", "cold", True),
        ("onedesk", "cold", False),
        ("onedesk", "warm", True),
        ("onedesk", "warm", False),
        ("onedesk", "open, read", False),
        ("onedesk", "open, kept", False),
    ]
    assert document["prefix_tokens"] == 128
    assert [row["cached_tokens"] for row in rows[4:]] == [0, 128]
    assert document["prefix_share"] == rows[5]["seconds"] / rows[4]["seconds"]
    for row in rows[:4]:
        assert row["tokens"] == 40
        assert 0 < row["prefill_seconds"] <= row["seconds"]
        assert (row["waited_seconds"] is not None) == row["overlap"]
        assert row["tokens_per_second"] == pytest.approx(40 / row["seconds"])
        assert row["bytes_per_second"] == pytest.approx(document["checkpoint_bytes"] / row["seconds"], rel=0.01)
        assert (row["cached_before_bytes"] > 0.9 * document["checkpoint_bytes"]) == (row["state"] == "warm")
    assert document["overlap_share"] == rows[0]["seconds"] / rows[1]["seconds"]
    assert f"{document['overlap_share']:.2f} of the time without" in first_token_table(document)


def test_too_long_prompt_is_refused_with_both_numbers(model, tmp_path):
    with pytest.raises(RequestError, match="takes 257 tokens of context and tiny allows 256"):
        measure_kind(BenchPlan("ttft", str(model), device="cpu", prompt=256), Config(tree=tmp_path), ModelRoots([]))
