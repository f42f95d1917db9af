"""`onedesk memory` shows what this process holds, lease by lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.service.api import OpenModel
from onedesk.service.catalog.memory_report import abilities, memory_report, memory_table
from onedesk.service.config import Config
from onedesk.service.core import Request
from onedesk.service.memory.backends.choose_backend import BackendReport
from onedesk.service.registry import REGISTRY
from tiny_qwen3 import write_tiny_qwen3

CONFIG = Config(memory={"limit_bytes": 64 << 20, "kept_back": 0.1, "floor": 1 << 20})


@pytest.fixture
def model(tmp_path: Path) -> Iterator[OpenModel]:
    REGISTRY.close()
    REGISTRY.configure(CONFIG)
    yield REGISTRY.open(write_tiny_qwen3(tmp_path / "tiny"), context=64, device="cpu")
    REGISTRY.close()
    REGISTRY.configure(Config())


def test_leases_budget_and_counters_are_those_of_the_pool(model):
    list(model.generate(Request(ids=(1, 2), max_tokens=3)))
    report = memory_report(CONFIG, device="cpu", proc=None)
    assert report["truth"]["checkpoint_pages"] >= model.need.weights
    assert "of them checkpoint files, dropped first" in memory_table(report)
    assert report["budget"] == {
        "limit": 64 << 20,
        "kept_back": int((64 << 20) * 0.1),
        "floor": 1 << 20,
        "promised": 0,
        "used": model.held_bytes(),
    }
    assert {lease["kind"]: lease["bytes"] for lease in report["leases"]}["weights"] == model.need.weights
    assert sum(lease["bytes"] for lease in report["leases"]) == model.held_bytes()
    for lease in report["leases"]:
        assert (lease["owner"], lease["residency"], lease["policy"]) == ("tiny", "host", "stay")
        assert lease["idle"] >= 0
    assert report["counters"]["allocations"] >= len(report["leases"])
    table = memory_table(report)
    assert "tiny" in table
    assert "weights" in table


def test_what_each_kind_of_memory_can_do_is_told(model):
    report = memory_report(CONFIG, device="cpu", proc=None)
    (host,) = report["backends"]
    assert (host["name"], host["residency"], host["missing"]) == ("mmap", "host", "")
    assert host["can"]["mincore"] is host["can"]["dontneed"] is True
    assert "dontneed" in memory_table(report).splitlines()[-1]
    assert abilities(BackendReport("x", "device", {"a": True, "b": False, "c": False})) == "a; not b, c"
    assert abilities(BackendReport("x", "device", {}, "install it")) == "not used: install it"


def test_after_giving_way_nothing_is_leased(model):
    model.give_way()
    report = memory_report(CONFIG, device="cpu", proc=None)
    assert (report["leases"], report["budget"]["used"]) == ([], 0)
    assert report["counters"]["releases"] >= 1
    assert "nothing is leased" in memory_table(report)


def test_another_machine_has_none_of_our_leases(model, tmp_path):
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n", encoding="ascii")
    report = memory_report(Config(), device="cpu", proc=proc)
    assert (report["leases"], report["truth"]["available"]) == ([], 8_000_000 * 1024)
    assert (report["budget"]["used"], report["backends"]) == (0, [])


def test_memory_by_stage_is_shown_from_the_second_generation_on(model):
    for _ in range(3):
        list(model.generate(Request(ids=(1, 2), max_tokens=3)))
    report = memory_report(CONFIG, device="cpu", proc=None)
    assert [(leaks["owner"], leaks["uses"]) for leaks in report["leaks"]] == [("tiny", 2)]
    assert {"prefill", "decode", "between"} <= set(report["leaks"][0]["stages"])
    assert "over the last 2 uses no stage grows" in memory_table(report)
