"""Thirty hand-overs, the short form of `onedesk bench handover --cycles 300`."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys

from kept_kernels import keep_kernels
from onedesk.service.bench.handover import handover_table, own_bytes
from onedesk.service.memory.read_bandwidth import keep_ceiling
from tiny_qwen3 import write_tiny_qwen3

MIB = 1 << 20
CYCLES = 16


def test_hand_overs_return_everything_and_leave_nothing(tmp_path):
    model = write_tiny_qwen3(tmp_path / "writer", hidden=512, intermediate=1536)
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    keep_ceiling(tmp_path / "cache", "cpu", 2e10)  # measuring it reads 24 GiB
    command = [
        sys.executable,
        "-m",
        "onedesk.service",
        "bench",
        "handover",
        "--model",
        str(model),
        "--cycles",
        str(CYCLES),
        "--tokens",
        "4",
    ]
    done = subprocess.run(
        [*command, "--config", str(tmp_path / "onedesk.toml"), "--json"], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    assert (document["kind"], document["cycles"], document["different_texts"], document["shortfalls"]) == (
        "handover",
        CYCLES,
        0,
        0,
    )
    assert document["drift_bytes"] <= 8 * MIB
    assert document["drift_kept"] == {"threads": 0, "open files": 0, "children": 0}
    assert [row["step"] for row in document["rows"]] == ["give way", "close"]
    for row in document["rows"]:
        assert row["leased"] >= row["asked"] >= document["checkpoint_bytes"] > 32 * MIB
        assert row["worst_share"] >= 0.98
        assert row["worst_process_share"] >= 0.98
        assert 0 < row["seconds"] <= row["worst_seconds"]
    assert "texts that differ: 0" in handover_table(document)


def test_own_bytes_follow_allocations():
    before = own_bytes()
    taken = mmap.mmap(-1, 64 * MIB)  # from the system, not from a heap with free space of other tests
    taken.write(b"x" * (64 * MIB))
    assert own_bytes() - before >= 63 * MIB
    taken.close()
    assert own_bytes() - before < 2 * MIB
