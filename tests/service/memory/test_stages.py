"""The figures per stage of every generation: seconds, bytes, faults, allocations, allocator time, share of the measured
bandwidth.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.service.api import OpenModel, open_model
from onedesk.service.core import Request, Result
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.read_bandwidth import FILE, keep_ceiling, known_ceiling
from onedesk.service.memory.truth import read_truth
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 17 MiB of weights: too few for huge pages, so every page is a fault of its own."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "small", hidden=256, intermediate=1024, tokenizer=False)


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Iterator[OpenModel]:
    opened = opened_in(folder, tmp_path)
    yield opened
    opened.close()


def opened_in(folder: Path, cache: Path) -> OpenModel:
    pool = Pool("cpu", MemorySettings(floor=0), read_truth)
    return open_model(folder, pool=pool, context=64, device="cpu", load=False, kernel_cache=cache)


def write(model: OpenModel, tokens: int = 5) -> Result:
    return [event.result for event in model.generate(Request(ids=(5, 6, 7, 8), max_tokens=tokens)) if event.result][-1]


def test_first_generation_counts_every_stage(model):
    stages = write(model).stages
    assert set(stages) == {"load", "prefetch", "prefill", "decode", "sample"}
    checkpoint = sum(tensor.elements * 4 for tensor in (t.destination for t in model._blueprint.plan.tensors))
    assert stages["load"].bytes == stages["prefetch"].bytes == checkpoint
    assert stages["prefill"].bytes == model._blueprint.pass_bytes
    assert stages["decode"].bytes == 4 * model._blueprint.pass_bytes
    assert stages["load"].allocations >= 3
    assert stages["load"].allocator_seconds > 0
    assert stages["decode"].allocations == stages["prefill"].allocations == 0
    assert stages["decode"].allocator_seconds == 0
    assert stages["prefetch"].seconds <= stages["load"].seconds + stages["prefill"].seconds
    assert all(stage.major_faults >= 0 and stage.minor_faults >= 0 for stage in stages.values())


def test_reader_faults_belong_to_the_load(model):
    stages = write(model).stages
    pages = model.need.weights // mmap.PAGESIZE
    assert stages["load"].minor_faults >= 0.95 * pages
    assert stages["prefill"].minor_faults < 0.5 * pages


def test_generation_reports_previous_return_once(model):
    write(model)
    measured = sum(released.measured for released in model.give_way())
    stages = write(model).stages
    assert stages["release"].bytes == measured > 0
    assert stages["release"].seconds > 0
    assert "release" not in write(model).stages


def test_a_loaded_model_counts_no_load(model):
    model.load()
    assert set(write(model).stages) == {"prefill", "decode", "sample"}


def test_share_needs_a_measured_bandwidth(folder, tmp_path):
    unknown = opened_in(folder, tmp_path)
    assert all(stage.bandwidth_share is None for stage in write(unknown).stages.values())
    unknown.close()
    keep_ceiling(tmp_path, "cpu", 5e9)
    known = opened_in(folder, tmp_path)
    stages = write(known).stages
    known.close()
    decode = stages["decode"]
    assert decode.bandwidth_share == pytest.approx(decode.bytes / decode.seconds / 5e9)
    assert [name for name, stage in stages.items() if stage.bandwidth_share is not None] == ["decode"]


def test_untied_embedding_is_not_counted_as_read(tmp_path):
    tied, apart = (
        opened_in(write_tiny_qwen3(tmp_path / name, tied=name == "tied", tokenizer=False), tmp_path)
        for name in ("tied", "apart")
    )
    assert tied._blueprint.pass_bytes == apart._blueprint.pass_bytes
    assert apart._blueprint.plan.nbytes - tied._blueprint.plan.nbytes == 512 * 64 * 4


@pytest.mark.parametrize("content", ["", "[]", "{", '{"cpu": "fast"}', '{"cpu": NaN}', "\xff"])
def test_broken_bandwidth_file_is_replaced(tmp_path, content):
    (tmp_path / FILE).write_text(content, encoding="latin-1")
    assert known_ceiling(tmp_path, "cpu") is None
    keep_ceiling(tmp_path, "cpu", 7e9)
    assert known_ceiling(tmp_path, "cpu") == 7e9


def test_unwritable_cache_only_loses_bandwidth(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    keep_ceiling(tmp_path / "file", "cpu", 7e9)
    assert known_ceiling(tmp_path / "file", "cpu") is None


def test_the_log_has_the_stages_at_debug_level(model, caplog):
    with caplog.at_level(logging.DEBUG, logger="onedesk.service.api"):
        result = write(model)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "onedesk.service.api" and "prefill" in record.getMessage()
    ]
    assert len(lines) == 1
    assert lines[0].startswith(f"small, {result.finish}: load ")
    for name in result.stages:
        assert f"{name} {result.stages[name].seconds:.4f} s, {result.stages[name].bytes} B" in lines[0]
