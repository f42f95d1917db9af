"""A model of more than 1 GB: decode allocates nothing and has no major faults, wakes read the file once, and a load
holds the checkpoint once while memory is short.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.lab.memory_group import MemoryGroup
from onedesk.service.api import OpenModel, open_model
from onedesk.service.bench.measuring_child import MeasuringChild
from onedesk.service.bench.page_cache import Residency, evict, read_whole
from onedesk.service.bench.subject import SubjectSpec
from onedesk.service.core import Request, Result, Sampling
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from tiny_qwen3 import write_tiny_qwen3

CONTEXT = 64
IDS = tuple(range(100, 104))
TOKENS = 6


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


@pytest.fixture
def model(large: Path, pool: Pool, kernel_cache: Path, tmp_path: Path) -> Iterator[OpenModel]:
    """Not loaded. Code and kernels have run once with a tiny model, so that only the bytes of the large one are new."""
    tiny = open_model(
        write_tiny_qwen3(tmp_path / "tiny", tokenizer=False), pool=pool, context=CONTEXT, kernel_cache=kernel_cache
    )
    write(tiny)
    tiny.close()
    opened = open_model(large, pool=pool, context=CONTEXT, device="cpu", load=False, kernel_cache=kernel_cache)
    yield opened
    opened.close()


def write(model: OpenModel) -> Result:
    request = Request(ids=IDS, sampling=Sampling(temperature=0.0), max_tokens=TOKENS)
    return [event.result for event in model.generate(request) if event.result][-1]


def cached(folder: Path) -> int:
    residency = Residency(open_checkpoint(folder).files)
    found = residency.resident()
    residency.close()
    return found


@pytest.mark.parametrize("file", ["evicted", "cached"])
def test_decode_has_no_faults_or_allocations(model, large, file):
    files = open_checkpoint(large).files
    evict(files) if file == "evicted" else read_whole(files)
    assert (cached(large) < 0.01 * model.need.weights) == (file == "evicted")
    result = write(model)
    stages = result.stages
    assert stages["load"].bytes > 1_000_000_000
    assert result.usage.completion == TOKENS
    assert stages["decode"].bytes > (TOKENS - 1) * 1_000_000_000
    assert (stages["decode"].major_faults, stages["decode"].allocations, stages["decode"].allocator_seconds) == (
        0,
        0,
        0,
    )
    assert cached(large) > 0.95 * model.need.weights  # memory has room: the file's pages stay


def test_a_text_is_the_same_after_a_hand_over(model):
    first = write(model).ids
    released = model.give_way()
    assert sum(r.measured for r in released) >= 0.98 * sum(r.asked for r in released) > 1_000_000_000
    assert write(model).ids == first


def read_bytes() -> int:
    """Bytes that this process has read from the disk so far."""
    return int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[0])


def test_three_wakes_read_the_file_once(model, large, pool):
    evict(open_checkpoint(large).files)
    texts, read = [], []
    for _ in range(3):
        before = read_bytes()
        texts.append(write(model).ids)
        read.append(read_bytes() - before)
        model.give_way()
    assert texts[0] == texts[1] == texts[2]
    assert read[0] > 0.95 * model.need.weights
    assert sum(read[1:]) < 0.01 * model.need.weights
    assert pool.files.cached() > 0.95 * model.need.weights


@pytest.mark.parametrize("file", ["evicted", "cached"])
def test_a_load_holds_the_checkpoint_once_while_memory_is_short(large, kernel_cache, file):
    """Short by a real limit: the weights fit, their file next to them does not."""
    checkpoint = open_checkpoint(large)
    settings = {"limit": 0.95, "floor": 64 << 20}
    with (
        MemoryGroup(f"onedesk-load-{os.getpid()}", 2_000_000_000) as group,
        MeasuringChild("onedesk", SubjectSpec(large, "cpu", "none", CONTEXT, kernel_cache, settings, ())) as worker,
    ):
        (group.folder / "cgroup.procs").write_text(str(worker.pid), encoding="ascii")
        evict(checkpoint.files) if file == "evicted" else read_whole(checkpoint.files)
        peak = worker.ask("load")["peak_bytes"]
        assert cached(large) < 0.05 * checkpoint.weight_bytes
        assert group.kills == 0
    assert checkpoint.weight_bytes <= peak <= 1.1 * checkpoint.weight_bytes
