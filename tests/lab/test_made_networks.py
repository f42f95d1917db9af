"""Networks made on the device, and small ones of every family; the CPU stands in for the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drafted import Told
from onedesk.lab import cuda_families, flash_next
from onedesk.lab.cuda_families import broken_rows
from onedesk.service.engine import session, speculate


@pytest.mark.parametrize("model", ["Qwen3.8-Flash-Next", "qwen3.5-4b"])
def test_a_small_shape_is_made_and_every_figure_is_there(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--device", "cpu", "--tiny", "--prompt", "96", "--tokens", "3", "--batch", "1,2", "--experts", "nvfp4"]
    assert flash_next.main([*arguments, "--model", model, "--folder", str(tmp_path), "--json"]) == 0
    written = capsys.readouterr()
    document = json.loads(written.out)
    assert document["captured"] is False
    assert document["prefill"]["tokens_per_second"] > 0
    assert [row["batch"] for row in document["decode"]] == [1, 2]
    assert document["memory"]["need"] == document["need"] > 0
    assert len(written.err.splitlines()) >= 8  # told as it went


def test_texts_with_guesses_are_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "PassCosts", lambda draft_share: Told())
    monkeypatch.setattr(speculate, "MAX_LOSS", 1e9)
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--prompt",
        "32",
        "--tokens",
        "40",
        "--experts",
        "bf16",
        "--drafts",
        "100,0",
    ]
    assert flash_next.main([*arguments, "--folder", str(tmp_path), "--json"]) == 0
    right, wrong = json.loads(capsys.readouterr().out)["drafts"]
    assert (right["right"], wrong["right"]) == (100, 0)
    assert right["differing_texts"] == wrong["differing_texts"] == 0
    assert max(right["passes"]) < 10 < 30 < min(wrong["passes"])  # of 39 steps


def test_no_part_begins_when_the_time_is_over(capsys: pytest.CaptureFixture[str]):
    assert (
        flash_next.main(["--device", "cpu", "--tiny", "--prompt", "32", "--tokens", "2", "--seconds", "0", "--json"])
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["decode"] == []
    assert document["prefill"]["seconds"] == []


def test_an_unknown_shape_is_named(capsys: pytest.CaptureFixture[str]):
    assert flash_next.main(["--model", "qwen9", "--device", "cpu"]) == 1
    assert "no published shape is called 'qwen9'" in capsys.readouterr().err


def test_small_families_are_checked_one_by_one(capsys: pytest.CaptureFixture[str]):
    assert cuda_families.main(["--device", "cpu", "--families", "qwen3_5,qwen4_exp", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["family"] for row in rows] == ["qwen3_5", "qwen4_exp"]
    for row in rows:
        assert row["score_difference"] == 0
        assert row["distinct"] > 20  # one token for ever would show nothing


def test_what_a_family_breaks_has_words():
    row = {
        "family": "qwen3_5",
        "device": "cuda",
        "kernels": "k",
        "graph": True,
        "score_difference": 0.01,
        "other_texts": 0,
    }
    assert broken_rows([row]) == []
    assert "no graph (k)" in broken_rows([row | {"graph": False}])[0]
    assert "0.200 from the CPU's in the median" in broken_rows([row | {"score_difference": 0.2}])[0]
    assert "2 of 6 texts" in broken_rows([row | {"other_texts": 2}])[0]
