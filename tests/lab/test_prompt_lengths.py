"""The measurement of lengths reads each of them, and tells the delta nets' time apart; no test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.lab.prompt_lengths import FAMILIES, main


def test_every_family_is_read_at_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    assert main(["--lengths", "40,300", "--cycles", "1", "--config", str(config)]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["family"] for document in documents] == list(FAMILIES)
    for document in documents:
        short, long = document["rows"]
        assert (short["tokens"], long["tokens"], short["ratio"]) == (40, 300, None)
        assert 0 < long["linear_seconds"] < long["seconds"]


def test_a_family_that_is_not_measured_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--families", "qwen3"])
    assert "--families are qwen3_next, qwen4_exp" in capsys.readouterr().err
