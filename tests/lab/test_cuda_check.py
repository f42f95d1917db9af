"""The check of a CUDA device: what it counts as broken, and that its steps run; the CPU stands in for the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.lab import cuda_check
from onedesk.lab.cuda_check import (
    SMALL,
    broken,
    give_way_cycles,
    row_of,
    same_as_cpu,
    summary,
)
from onedesk.service.bench.shapes import write_random
from onedesk.service.memory.pool import Released

EQUAL = {"tokens": 64, "same": 64, "distinct": 9, "score_difference": 1e-6}
ROW = {
    "held": 1000,
    "asked": 1000,
    "measured": 1000,
    "driver": 990,
    "same": True,
    "same_once_there": True,
    "weights_same": True,
}


MIB = 1 << 20
MISSING = {"missing": "no cuda-bindings"}
MANAGED = {
    "can": {"ManagedMemory": True},
    "bytes": {"asked": 256 * MIB, "measured": 256 * MIB, "on_card": 256 * MIB, "half_aside": 130 * MIB},
    "counted_half_aside": 128 * MIB,
    "content_same": True,
    "same_as_cpu": EQUAL,
}


def gave(**changes: Any) -> dict[str, Any]:
    return {"steady": changes.pop("steady", True), "rows": [dict(ROW), ROW | changes]}


def test_nothing_is_broken_when_bytes_text_and_weights_come_back():
    assert broken(EQUAL, gave(), MISSING) == broken(EQUAL, gave(), MANAGED) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver": 979}, "a give-way returned 97.9% of the bytes held, by the figure driver"),
        ({"measured": 900}, "a give-way returned 90.0% of the bytes asked, by the figure measured"),
        ({"steady": False}, "the same question had two answers although the model stayed in memory"),
        ({"same": False}, "the text while waking was another one, 1 of 2 times"),
        ({"same_once_there": False}, "the text after waking was another one, 1 of 2 times"),
        ({"weights_same": False}, "weights were other ones after waking, 1 of 2 times"),
    ],
)
def test_each_cause_has_words_of_its_own(changes: dict[str, Any], words: str):
    assert broken(EQUAL, gave(**changes), MISSING) == [words]


def test_tokens_that_differ_from_the_cpu_are_counted():
    assert broken(EQUAL | {"same": 60}, gave(), MISSING) == ["60 of 64 tokens are those of the CPU"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bytes": MANAGED["bytes"] | {"measured": 200 * MIB}}, "managed memory returned 209715200 of 268435456 bytes"),
        ({"bytes": MANAGED["bytes"] | {"half_aside": 256 * MIB}}, "set aside the card still held 268435456"),
        ({"counted_half_aside": 0}, "set aside the card still held 136314880"),
        ({"content_same": False}, "held other bytes after a part was set aside"),
        ({"same_as_cpu": EQUAL | {"same": 1}}, "1 of 64 tokens are those of the CPU in managed memory"),
    ],
)
def test_managed_memory_is_held_to_its_bytes_and_its_content(changes: dict[str, Any], words: str):
    (found,) = broken(EQUAL, gave(), MANAGED | changes)
    assert words in found


def test_a_row_adds_the_leases_up():
    row = row_of(30, [Released("m", 10, 9, 0.5), Released("m", 20, 20, 0.25)], 29)
    assert row == {"held": 30, "asked": 30, "measured": 29, "driver": 29, "seconds": 0.75}


def test_every_step_of_the_check_runs_and_finds_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_check, "free_bytes", lambda _: 0)  # the CPU has no driver to ask
    equal = same_as_cpu("cpu", tmp_path)
    assert equal["same"] == equal["tokens"] == 64
    assert equal["distinct"] > 1  # one token for ever would show nothing
    folder = tmp_path / "model"
    folder.mkdir()
    write_random(folder, SMALL)
    found = give_way_cycles(folder, "cpu", tmp_path, 2)
    assert found["distinct"] > 1
    assert found["decode_allocations"] == 0
    for row in found["rows"]:
        assert (row["same"], row["same_once_there"], row["weights_same"]) == (True, True, True)
        assert row["score_difference"] < 1e-5
        assert row["measured"] == row["asked"] > 0
    document = {
        "device": "d",
        "torch": "t",
        "seconds": 1.0,
        "same_as_cpu": equal,
        "give_way": found,
        "managed": MISSING,
    }
    document["families"] = [{"family": "qwen3_5", "graph": True}, {"family": "qwen4_exp", "graph": False}]
    document["failures"] = broken(equal, found, MISSING)
    assert document["failures"] == ["a give-way returned 0.0% of the bytes held, by the figure driver"]
    assert "64 of 64 tokens are those of the CPU" in summary(document)
    assert "steps in a graph: qwen3_5\n" in summary(document)


def test_the_command_passes_on_cuda_and_refuses_without(capsys: pytest.CaptureFixture[str]):
    status = cuda_check.main(["--cycles", "1", "--json"])
    document = json.loads(capsys.readouterr().out)
    if torch.cuda.is_available():
        assert (status, document["failures"]) == (0, [])
    else:
        assert status == 1
        assert "torch sees no CUDA device here" in document["error"]["message"]
