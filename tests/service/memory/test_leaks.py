"""The leak report: a clean engine has no leaks; an artificial leak is named by its stage."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from onedesk.service.api import OpenModel, open_model
from onedesk.service.config import Config
from onedesk.service.core import Request
from onedesk.service.engine.leaks import GROWN, KEPT_USES
from onedesk.service.engine.runner import Runner
from onedesk.service.kernels.forward_batch import RotaryTable
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.registry import REGISTRY
from tiny_qwen3 import write_tiny_qwen3

MIB = 1 << 20
USES = 9


@pytest.fixture
def model(tmp_path: Path) -> Iterator[OpenModel]:
    pool = Pool("cpu", MemorySettings(floor=0), read_truth)
    opened = open_model(
        write_tiny_qwen3(tmp_path / "tiny", tokenizer=False),
        pool=pool,
        context=128,
        device="cpu",
        kernel_cache=tmp_path / "cache",
    )
    yield opened
    opened.close()


def write(model: OpenModel, times: int, after: Callable[[], object] = lambda: None) -> None:
    for _ in range(times):
        list(model.generate(Request(ids=(5, 6, 7), max_tokens=4)))
        after()


def fresh(nbytes: int) -> mmap.mmap:
    """Touched bytes from the system, not from a heap with free space of other tests."""
    pages = mmap.mmap(-1, nbytes)
    pages.write(b"x" * nbytes)
    return pages


def keep_more(monkeypatch: pytest.MonkeyPatch, where: type, method: str, nbytes: int) -> list[mmap.mmap]:
    """Let every call of `method` leak `nbytes`."""
    kept: list[mmap.mmap] = []
    right = getattr(where, method)

    def leaking(*arguments: object, **named: object) -> object:
        kept.append(fresh(nbytes))
        return right(*arguments, **named)

    monkeypatch.setattr(where, method, leaking)
    return kept


def test_a_clean_engine_has_no_stage_that_grows(model):
    write(model, USES, model.give_way)
    report = model.leak_report()
    assert (report.owner, report.uses) == ("tiny", USES - 1)
    assert set(report.stages) == {"load", "decode", "release", "between"}
    assert report.grew is None, report


def test_prefill_is_counted_apart_after_load(model):
    write(model, USES)
    assert set(model.leak_report().stages) == {"prefill", "decode", "between"}
    assert model.leak_report().grew is None


def test_a_leak_in_decode_is_named(model, monkeypatch):
    kept = keep_more(monkeypatch, Runner, "decode", 128 << 10)
    write(model, USES)
    report = model.leak_report()
    assert report.grew == "decode"
    assert report.stages["decode"].total > 0.6 * sum(map(len, kept)) * (USES - 1) / USES
    assert report.growth >= GROWN


def test_a_leak_in_prefill_is_named(model, monkeypatch):
    keep_more(monkeypatch, Runner, "prefill", MIB)
    write(model, USES)
    assert model.leak_report().grew == "prefill"


def test_leak_of_load_is_named_load(model, monkeypatch):
    keep_more(monkeypatch, RotaryTable, "nbytes", MIB)
    write(model, USES, model.give_way)
    assert model.leak_report().grew == "load"


def test_growth_between_the_uses_is_the_hosts(model):
    kept: list[mmap.mmap] = []
    write(model, USES, lambda: kept.append(fresh(4 * MIB)))
    report = model.leak_report()
    assert report.grew == "between"
    assert report.stages["between"].median >= 4 * MIB


def test_a_model_that_comes_and_goes_is_no_leak(model):
    """The host draws between two uses and frees it again. The weights themselves are leases and never counted."""
    write(model, USES, lambda: torch.ones(8 * MIB).sum())
    assert model.leak_report().grew is None
    assert model.leak_report().outside > 0


def test_only_the_last_uses_are_kept(model, monkeypatch):
    kept = keep_more(monkeypatch, Runner, "decode", 128 << 10)
    write(model, USES)
    monkeypatch.undo()
    write(model, KEPT_USES + 1)
    assert len(kept) == USES * 3
    assert (model.leak_report().uses, model.leak_report().grew) == (KEPT_USES + 1, None)


def test_the_registry_reports_every_handle_that_was_used(tmp_path):
    REGISTRY.close()
    REGISTRY.configure(Config(memory={"floor": 0}))
    try:
        used = REGISTRY.open(write_tiny_qwen3(tmp_path / "used", tokenizer=False), context=64, device="cpu")
        REGISTRY.open(write_tiny_qwen3(tmp_path / "unused", tokenizer=False), context=64, device="cpu")
        write(used, 3)
        assert [report.owner for report in REGISTRY.leak_reports()] == ["used"]
    finally:
        REGISTRY.close()
        REGISTRY.configure(Config())
