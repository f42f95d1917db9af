"""What the service adds is measured on a real service; no test asserts a time."""

from __future__ import annotations

import json

from kept_kernels import keep_kernels
from onedesk.lab import serving
from tiny_qwen3 import write_tiny_qwen3


def test_every_figure_is_there_and_releases_give_everything_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(serving, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(serving, "PAUSE_SECONDS", 0.0)
    model = write_tiny_qwen3(tmp_path / "models" / "tiny", context=256)
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    options = [
        "--model",
        str(model),
        "--quant",
        "none",
        "--device",
        "cpu",
        "--tokens",
        "6",
        "--cycles",
        "1",
        "--streams",
        "2",
    ]
    assert serving.main([*options, "--config", str(config), "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    for name in ("first_token", "way", "token"):
        assert set(document[name]) == {"inside", "service", "added", "added_share", "added_low", "added_high"}
    assert document["way"]["inside"] < document["first_token"]["inside"]
    assert document["streams"]["begun"] > 0
    assert document["streams"]["count"] == document["streams_inside"]["count"] == 2
    assert document["threads"] >= 1
    assert set(document["processor_seconds_a_token"]) == {"inside", "service"}
    assert document["release"]["share"] >= 0.98
    assert document["release"]["asked"] > 0
    assert "each further token" in shown.err
