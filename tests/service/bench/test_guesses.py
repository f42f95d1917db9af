"""The measurement of guesses writes the same texts with and without them; no test asserts a time."""

from __future__ import annotations

import json

from kept_kernels import keep_kernels
from onedesk.service.bench.guesses import CASES, main
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


def test_a_model_that_is_not_there_is_told(tmp_path, capsys):
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    assert main(["--model", "lost", "--config", str(config)]) == 1
    assert "no model 'lost'" in json.loads(capsys.readouterr().out)["error"]["message"]
