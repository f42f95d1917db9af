"""The measurement of guesses writes the same texts with and without them; no test asserts a time."""

from __future__ import annotations

import json

from kept_kernels import keep_kernels
from onedesk.lab.draft_tokens import CASES, DRAFTED, main
from onedesk.service.bench.shapes import SHAPES, write_random
from tiny_qwen3 import write_tiny_qwen3


def test_every_case_is_written_both_ways_to_the_same_text(tmp_path, capsys):
    model = write_tiny_qwen3(tmp_path / "tiny", context=256, tokenizer=False)
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    assert main(["--model", str(model), "--tokens", "40", "--cycles", "2", "--config", str(config), "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [row["case"] for row in document["rows"]] == [case.name for case in CASES]
    assert {row["differing_texts"] for row in document["rows"]} == {0}
    assert "TIME WITH / WITHOUT" in shown.err


def test_a_draft_layer_is_measured_at_the_published_rate(tmp_path, capsys):
    model, config = tmp_path / "tiny", tmp_path / "onedesk.toml"
    model.mkdir()
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "intermediate_size": 64,
        "head_dim": 32,
        "num_attention_heads": 2,
    }
    few = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    write_random(model, {**SHAPES["qwen3.5-toy"], **small, **few, "full_attention_interval": 2})
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    assert main(["--model", str(model), "--tokens", "40", "--cycles", "1", "--config", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in document["rows"]] == [case.name for case in (*CASES, DRAFTED)]
    assert {row["differing_texts"] for row in document["rows"]} == {0}


def test_a_model_that_is_not_there_is_told(tmp_path, capsys):
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    assert main(["--model", "lost", "--config", str(config)]) == 1
    assert "no model 'lost'" in json.loads(capsys.readouterr().out)["error"]["message"]
