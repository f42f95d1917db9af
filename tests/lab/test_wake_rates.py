"""`lab.wake_rates` on a CPU: a row for each way, state and number of readers, next to the wakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_kernels import keep_kernels
from onedesk.lab import wake_rates
from onedesk.service.bench import shapes


def test_every_way_into_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = shapes.SHAPES["qwen3-toy"] | {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    for module in (shapes, wake_rates):
        monkeypatch.setattr(module, "SHAPES", {"small": small})
    cache = tmp_path / "cache"
    keep_kernels(cache)
    command = ["--model", "small", "--device", "cpu", "--cache", str(cache), "--readers", "1,2"]
    assert wake_rates.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = [(row["what"], row["state"], row["readers"]) for row in document["rates"]]
    ways = ("raw read", "into the device")
    assert found == [(way, state, count) for state in ("cold", "warm") for count in (1, 2) for way in ways]
    assert all(row["bytes_per_second"] > 0 for row in document["rates"])
    assert [row["state"] for row in document["wakes"]["rows"]] == ["cold", "warm", "row 1", "row 2", "row 3"]
    assert "into the device" in wake_rates.summary(document)
