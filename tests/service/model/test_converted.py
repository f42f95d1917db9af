"""Weights that were converted once: found again, streamed in as they lie, and trusted only while whole and of the
same source.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from onedesk.service.core import Progress
from onedesk.service.engine.session import draw_blueprint
from onedesk.service.errors import Cancelled, FileError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.header import read_header
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model import convert as convert_module
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.convert import Conversion, convert, file_bytes, is_current
from onedesk.service.model.converted import FOLDER, SOURCE, WEIGHTS, converted_folder
from onedesk.service.model.qwen3 import destinations, read_config
from onedesk.service.model.weights import WeightPlan, plan_weights
from onedesk.service.quant.formats import CHOICES, int4
from onedesk.service.quant.weight import Format, QuantizedWeight, Weight
from published import CASES, write_published
from safetensors.torch import load_file, save_file
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
LONG_AGO = (1_700_000_000, 1_700_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "tiny", layers=2, dtype="bfloat16", tied=False, shards=2)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


def conversion(folder: Path, cache: Path, quant: str = "int4", aim: Format | None = None) -> Conversion:
    checkpoint = open_checkpoint(folder)
    plan = plan_weights(destinations(read_config(checkpoint.config)), checkpoint, aim or CHOICES[quant])
    return Conversion(checkpoint, plan, quant, converted_folder(checkpoint, quant, cache))


def made(folder: Path, cache: Path, pool: Pool, quant: str = "int4", aim: Format | None = None) -> Conversion:
    """Converted, in a lease of the stated size."""
    whole = conversion(folder, cache, quant, aim)
    lease = pool.lease("quantize", "scratch", whole.need)
    convert(whole, lease, None, None)
    lease.release()
    return whole


def current(whole: Conversion, pool: Pool) -> bool:
    lease = pool.lease("quantize", "scratch", whole.need)
    found = is_current(whole, lease, None, None)
    lease.release()
    return found


def plan_of(folder: Path, cache: Path | None, quant: str = "int4") -> WeightPlan:
    return draw_blueprint(open_checkpoint(folder), CPU, 64, quant, cache).plan


def from_cache(plan: WeightPlan) -> bool:
    return {info.source.path.name for tensor in plan.tensors for info in tensor.parts} == {WEIGHTS}


def loaded(plan: WeightPlan, pool: Pool) -> dict[str, Weight]:
    arrival = WeightArrival(plan, pool.lease("test", "weights", plan.nbytes), None, None).start()
    arrival.finish()
    return arrival.tensors


def assert_equal(one: dict[str, Weight], other: dict[str, Weight]) -> None:
    for key, weight in one.items():
        also = other[key]
        if isinstance(weight, QuantizedWeight) and isinstance(also, QuantizedWeight):
            assert weight.format == also.format
            assert all(torch.equal(a, b) for a, b in zip(weight.tensors, also.tensors, strict=True)), key
        else:
            assert torch.equal(weight, also), key


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_next_opening_reads_it_as_it_lies(folder: Path, cache: Path, pool: Pool, quant: str) -> None:
    before = {file: file.stat() for file in folder.iterdir()}
    whole = made(folder, cache, pool, quant)
    plan = plan_of(folder, cache, quant)
    assert from_cache(plan)
    assert plan.staging_bytes(CPU) == 0
    assert plan.form == whole.plan.form
    assert not plan.changed()
    assert not from_cache(plan_of(folder, cache, "int8" if quant == "int4" else "int4"))
    assert not from_cache(plan_of(folder, cache, "none"))
    assert_equal(loaded(plan, pool), loaded(plan_of(folder, None, quant), pool))
    assert {file: file.stat()[:9] for file in folder.iterdir()} == {file: found[:9] for file, found in before.items()}
    assert file_bytes(whole.plan) <= (whole.folder / WEIGHTS).stat().st_size <= file_bytes(whole.plan) + 8192


@pytest.mark.parametrize("back", [1, 5_000, 20_000])
def test_a_byte_that_turned_over_is_found_by_converting_again(
    folder: Path, cache: Path, pool: Pool, back: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = made(folder, cache, pool)
    assert current(whole, pool)
    with (whole.folder / WEIGHTS).open("r+b") as file:
        place = file.seek(-back, os.SEEK_END)
        octet = file.read(1)[0]
        file.seek(place)
        file.write(bytes([octet ^ 16]))
    assert not current(whole, pool)
    assert "not those that were written there" in caplog.text
    made(folder, cache, pool)
    assert current(whole, pool)


def test_anybody_can_read_the_file(folder: Path, cache: Path, pool: Pool) -> None:
    whole = made(folder, cache, pool)
    tensors = load_file(whole.folder / WEIGHTS)
    told = read_header(whole.folder / WEIGHTS).metadata
    assert {key: told[key] for key in ("format", "version", "quant", "group", "symmetric")} == {
        "format": "onedesk",
        "version": "1",
        "quant": "int4",
        "group": "128",
        "symmetric": "true",
    }
    assert len(told["content"]) == 64
    assert tensors["0.qkv.data"].dtype == torch.uint8
    assert tensors["embedding.scales"].dtype == torch.float32
    assert tensors["norm"].dtype == torch.float32


def test_the_form_that_was_asked_for_is_the_one_that_is_found(folder: Path, cache: Path, pool: Pool) -> None:
    made(folder, cache, pool, aim=int4(32, symmetric=False))
    assert "int4-g32-asym" in plan_of(folder, cache).form
    assert not current(conversion(folder, cache), pool)
    made(folder, cache, pool)
    assert "int4-g128" in plan_of(folder, cache).form
    assert [path.name for path in (cache / FOLDER).iterdir()] == [conversion(folder, cache).folder.name]


def test_the_float_rest_of_a_quantized_checkpoint_is_converted(tmp_path: Path, cache: Path, pool: Pool) -> None:
    case = next(case for case in CASES if case.name == "awq-32")
    folder, _ = write_published(tmp_path / "awq", case)
    made(folder, cache, pool)
    plan = plan_of(folder, cache)
    assert from_cache(plan)
    assert plan.form == "int4-g32-asym+int8"
    assert_equal(loaded(plan, pool), loaded(plan_of(folder, None), pool))


def test_it_is_not_made_twice(folder: Path, cache: Path, pool: Pool) -> None:
    whole = conversion(folder, cache)
    assert not current(whole, pool)
    made(folder, cache, pool)
    assert current(conversion(folder, cache), pool)


def rewrite(file: Path, at: int = -10) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, os.SEEK_END)
        stream.write(b"\x11\x22")


def test_a_source_that_changed_is_not_taken_for_what_it_was(
    folder: Path, cache: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two bytes in the middle of a tensor, beyond any sample, with the old time of writing put back."""
    shard = folder / "model-00002-of-00002.safetensors"
    os.utime(shard, LONG_AGO)
    made(folder, cache, pool)
    assert from_cache(plan_of(folder, cache))
    caplog.clear()
    rewrite(shard, -shard.stat().st_size // 3)
    os.utime(shard, LONG_AGO)
    with caplog.at_level(logging.WARNING):
        plan = plan_of(folder, cache)
    assert not from_cache(plan)
    assert len(caplog.records) == 1
    told = caplog.records[0].getMessage()
    assert "are not used: a file of the model was changed, copied or touched since it was made" in told
    assert "onedesk quantize --model tiny --quant int4 makes them again" in told
    assert not current(conversion(folder, cache), pool)
    made(folder, cache, pool)
    assert_equal(loaded(plan_of(folder, cache), pool), loaded(plan_of(folder, None), pool))


def test_a_touched_or_copied_source_is_compared_by_bytes(folder: Path, cache: Path, pool: Pool, tmp_path: Path) -> None:
    written = (made(folder, cache, pool).folder / WEIGHTS).stat().st_mtime_ns
    copy = tmp_path / "copies" / "tiny"
    shutil.copytree(folder, copy)
    for place in (folder, copy):
        for file in place.glob("*.safetensors"):
            os.utime(file, LONG_AGO)
        assert not from_cache(plan_of(place, cache))
        assert current(conversion(place, cache), pool)
        assert from_cache(plan_of(place, cache))
    assert (conversion(folder, cache).folder / WEIGHTS).stat().st_mtime_ns == written


def test_two_checkpoints_of_one_shape_do_not_share_a_folder(folder: Path, cache: Path, tmp_path: Path) -> None:
    other = write_tiny_qwen3(tmp_path / "other", layers=2, dtype="bfloat16", tied=False, shards=2, seed=1)
    assert conversion(folder, cache).folder != conversion(other, cache).folder
    assert conversion(folder, cache).folder != conversion(folder, cache, "int8").folder


Damage = Callable[[Path], None]


def cut(place: Path) -> None:
    os.truncate(place / WEIGHTS, (place / WEIGHTS).stat().st_size - 1)


def lose_weights(place: Path) -> None:
    (place / WEIGHTS).unlink()


def lose_source(place: Path) -> None:
    (place / SOURCE).unlink()


def garble_source(place: Path) -> None:
    (place / SOURCE).write_text("[]")


def strange_version(place: Path) -> None:
    save_file(
        load_file(place / WEIGHTS), place / WEIGHTS, metadata={"format": "onedesk", "version": "99", "quant": "int4"}
    )


def strange_group(place: Path) -> None:
    told = read_header(place / WEIGHTS).metadata
    save_file(load_file(place / WEIGHTS), place / WEIGHTS, metadata={**told, "group": "33"})


def other_tensor(place: Path) -> None:
    told = read_header(place / WEIGHTS).metadata
    save_file({**load_file(place / WEIGHTS), "more": torch.ones(1)}, place / WEIGHTS, metadata=dict(told))


def other_shape(place: Path) -> None:
    told = read_header(place / WEIGHTS).metadata
    save_file({**load_file(place / WEIGHTS), "norm": torch.ones(3)}, place / WEIGHTS, metadata=dict(told))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "it is cut short or damaged"),
        (lose_weights, "weights.safetensors cannot be opened"),
        (lose_source, "source.json cannot be opened"),
        (garble_source, "source.json holds a JSON list"),
        (strange_version, "does not say that it is version 1 of weights in int4"),
        (strange_group, "has groups of '33' columns"),
        (other_tensor, "has tensors that the model does not, the first is more"),
        (other_shape, r"is to have norm, F32 \[64\], and has F32 \[3\]"),
    ],
)
def test_a_damaged_folder_is_logged_and_rebuilt(
    folder: Path, cache: Path, pool: Pool, caplog: pytest.LogCaptureFixture, damage: Damage, why: str
) -> None:
    whole = made(folder, cache, pool)
    damage(whole.folder)
    with caplog.at_level(logging.WARNING):
        assert not from_cache(plan_of(folder, cache))
    assert len(caplog.records) == 1
    assert re.search(why, caplog.records[0].getMessage())
    assert not current(whole, pool)
    made(folder, cache, pool)
    assert from_cache(plan_of(folder, cache))


def test_what_was_cut_off_or_fails_leaves_nothing(
    folder: Path, cache: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = conversion(folder, cache)
    lease = pool.lease("quantize", "scratch", whole.need)
    told: list[Progress] = []
    with pytest.raises(Cancelled):
        convert(whole, lease, told.append, lambda: len(told) > 5)
    assert list((cache / FOLDER).iterdir()) == []
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 5))  # type: ignore[attr-defined]
    with pytest.raises(
        FileError, match=r"the converted weights take .* and the cache's disk has 5 B left; make room there"
    ):
        convert(whole, lease, None, None)
    monkeypatch.undo()
    monkeypatch.setattr(convert_module, "_sync", full_disk)
    with pytest.raises(FileError, match=r"cannot be kept in the cache: No space left on device; make room there"):
        convert(whole, lease, None, None)
    assert list((cache / FOLDER).iterdir()) == []


def test_what_an_ended_process_left_of_another_model_makes_room(folder: Path, cache: Path, pool: Pool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = cache / FOLDER / f".unfinished-{ended.pid}-abc"
    (left / "made").mkdir(parents=True)
    (left / "made" / WEIGHTS).write_bytes(b"half")
    assert [path.name for path in (cache / FOLDER).iterdir()] == [left.name]
    whole = made(folder, cache, pool)
    assert [path.name for path in (cache / FOLDER).iterdir()] == [whole.folder.name]


def full_disk(_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_a_source_that_changes_while_it_is_read_is_told(folder: Path, cache: Path, pool: Pool) -> None:
    whole = conversion(folder, cache)
    rewrite(folder / "model-00001-of-00002.safetensors")
    lease = pool.lease("quantize", "scratch", whole.need)
    with pytest.raises(FileError, match="was changed or replaced since its header was read"):
        convert(whole, lease, None, None)
    assert list((cache / FOLDER).iterdir()) == []


def test_progress_is_complete_and_one_tensor_is_in_memory(folder: Path, cache: Path, pool: Pool) -> None:
    whole = conversion(folder, cache)
    largest = max(tensor.nbytes for tensor in whole.plan.tensors)
    assert largest <= whole.need < largest + (9 << 20)
    lease = pool.lease("quantize", "scratch", whole.need)
    told: list[Progress] = []
    convert(whole, lease, told.append, None)
    done = [progress.done for progress in told]
    assert done == sorted(done)
    assert told[-1].done == told[-1].total == open_checkpoint(folder).weight_bytes


def test_two_writers_succeed_and_a_reader_sees_one_complete(folder: Path, cache: Path, pool: Pool) -> None:
    wholes = [conversion(folder, cache), conversion(folder, cache, aim=int4(32))]
    made(folder, cache, pool)
    stop, seen = threading.Event(), set()

    def write(whole: Conversion) -> None:
        lease = pool.lease("quantize", "scratch", whole.need)
        while not stop.is_set():
            convert(whole, lease, None, None)

    with ThreadPoolExecutor() as writers:
        written = [writers.submit(write, whole) for whole in wholes]
        ends = time.monotonic() + 20
        while len(seen) < 2 and time.monotonic() < ends:
            plan = plan_of(folder, cache)
            if from_cache(plan):
                seen.add(plan.form)
        stop.set()
        for future in written:
            future.result()
    assert {form for forms in seen for form in forms.split("+")} == {"int4-g128", "int4-g32", "int8"}
    assert (
        json.loads((wholes[0].folder / SOURCE).read_text())["content"]
        == read_header(wholes[0].folder / WEIGHTS).metadata["content"]
    )
    assert [path.name for path in (cache / FOLDER).iterdir()] == [wholes[0].folder.name]
