"""A conversion that was stopped or killed goes on where it was, and ends as one that was never stopped."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import Progress
from onedesk.service.errors import Cancelled, FileError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model import partial as partial_module
from onedesk.service.model.convert import Conversion, convert, is_current
from onedesk.service.model.converted import FOLDER, WEIGHTS, converted_folder
from onedesk.service.model.partial import JOURNAL, PREFIX
from onedesk.service.model.qwen3 import destinations, read_config
from onedesk.service.model.weights import plan_weights
from onedesk.service.quant.formats import CHOICES
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(
        tmp_path_factory.mktemp("source") / "tiny", layers=2, dtype="bfloat16", tied=False, shards=2
    )


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a conversion that was never stopped."""
    done = conversion(folder, tmp_path_factory.mktemp("whole"))
    run(done)
    return (done.folder / WEIGHTS).read_bytes()


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "KEEP_FROM", 1)


def conversion(folder: Path, cache: Path, quant: str = "int4") -> Conversion:
    checkpoint = open_checkpoint(folder)
    plan = plan_weights(destinations(read_config(checkpoint.config)), checkpoint, CHOICES[quant])
    return Conversion(checkpoint, plan, quant, converted_folder(checkpoint, quant, cache))


def run(work: Conversion, stop_after: int | None = None) -> list[Progress]:
    """Convert; stopped after so many reports of progress."""
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    told: list[Progress] = []
    with_lease = pool.lease("quantize", "scratch", work.need)
    try:
        convert(work, with_lease, told.append, None if stop_after is None else lambda: len(told) >= stop_after)
    finally:
        with_lease.release()
    return told


def stopped(work: Conversion, after: int) -> Path:
    """Convert until so many reports; the folder that is left."""
    with pytest.raises(Cancelled):
        run(work, after)
    return work.folder.parent / f"{PREFIX}{work.folder.name}"


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / FOLDER).iterdir())


@settings(max_examples=12, deadline=None)
@given(stops=st.lists(st.integers(1, 25), min_size=1, max_size=4))
def test_stopped_anywhere_any_number_of_times_it_ends_the_same(
    folder: Path, whole: bytes, tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    work = conversion(folder, cache)
    for stop in stops:
        try:
            run(work, stop)
        except Cancelled:
            continue
        break
    run(work)
    assert (work.folder / WEIGHTS).read_bytes() == whole
    assert left_over(cache) == [work.folder.name]
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    assert is_current(work, pool.lease("quantize", "scratch", work.need), None, None)


def test_what_was_converted_is_not_read_again(
    folder: Path, whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = conversion(folder, tmp_path)
    with caplog.at_level(logging.WARNING):
        partial = stopped(work, 14)
    assert "are converted and kept; converting again goes on from there, deleting" in caplog.text
    tensors = len((partial / JOURNAL).read_text().splitlines()) - 1
    assert tensors >= 4
    told = run(work)
    assert len({progress.total for progress in told}) == 1
    skipped = sum(info.nbytes for tensor in work.plan.tensors[:tensors] for info in tensor.parts)
    assert told[0].done >= skipped > 0
    assert told[-1].done == told[-1].total
    assert (work.folder / WEIGHTS).read_bytes() == whole


KILLED = """
    import sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from test_partial import conversion, run
    work = conversion(Path({folder!r}), Path({cache!r}))
    import onedesk.service.model.partial as partial
    noted = partial.Partial.note
    def note(self, written, hashes):
        noted(self, written, hashes)
        if written.tensors == {tensors}:
            print("here", flush=True)
            import time
            time.sleep(60)
    partial.Partial.note = note
    run(work)
"""


def test_killed_it_goes_on_too(folder: Path, whole: bytes, tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1])]
    code = textwrap.dedent(KILLED).format(paths=paths, folder=str(folder), cache=str(tmp_path), tensors=6)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "here"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    work = conversion(folder, tmp_path)
    told = run(work)
    assert told[0].done >= sum(info.nbytes for tensor in work.plan.tensors[:6] for info in tensor.parts)
    assert (work.folder / WEIGHTS).read_bytes() == whole
    assert left_over(tmp_path) == [work.folder.name]


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        octet = file.read(1)[0]
        file.seek(place)
        file.write(bytes([octet ^ 1]))


def spoil_bytes(partial: Path) -> None:
    end = json.loads((partial / JOURNAL).read_text().splitlines()[-1])["end"]
    flip(partial / WEIGHTS, end - 5)


def cut_file(partial: Path) -> None:
    os.truncate(partial / WEIGHTS, (partial / WEIGHTS).stat().st_size // 3)


def no_file(partial: Path) -> None:
    (partial / WEIGHTS).unlink()


def other_head(partial: Path) -> None:
    text = (partial / JOURNAL).read_text()
    (partial / JOURNAL).write_text(text.replace("header", "Header", 1))


def nonsense(partial: Path) -> None:
    with (partial / JOURNAL).open("a") as file:
        file.write('{"end": "x"}\n')


def not_text(partial: Path) -> None:
    (partial / JOURNAL).write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("spoil", [spoil_bytes, cut_file, no_file, other_head, nonsense, not_text])
def test_what_does_not_agree_with_its_journal_is_begun_anew(
    folder: Path, whole: bytes, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    work = conversion(folder, tmp_path)
    spoil(stopped(work, 14))
    told = run(work)
    assert told[0].done <= sum(info.nbytes for info in work.plan.tensors[0].parts)
    assert (work.folder / WEIGHTS).read_bytes() == whole


def test_a_line_that_was_cut_off_costs_its_tensor_alone(folder: Path, whole: bytes, tmp_path: Path) -> None:
    work = conversion(folder, tmp_path)
    partial = stopped(work, 14)
    before = len((partial / JOURNAL).read_text().splitlines()) - 1
    text = (partial / JOURNAL).read_text()
    (partial / JOURNAL).write_text(text[:-20])
    told = run(work)
    assert told[0].done >= sum(info.nbytes for tensor in work.plan.tensors[: before - 1] for info in tensor.parts)
    assert (work.folder / WEIGHTS).read_bytes() == whole


def test_a_changed_source_restarts_the_conversion(tmp_path: Path) -> None:
    source = write_tiny_qwen3(tmp_path / "tiny", layers=2, dtype="bfloat16", tied=False)
    work = conversion(source, tmp_path / "cache")
    stopped(work, 14)
    time.sleep(0.01)
    os.utime(source / "model.safetensors")
    told = run(conversion(source, tmp_path / "cache"))
    assert told[0].done <= sum(info.nbytes for info in work.plan.tensors[0].parts)


def test_partial_work_of_another_model_is_deleted_unless_locked(folder: Path, tmp_path: Path) -> None:
    other = stopped(conversion(folder, tmp_path, "int8"), 14)
    work = conversion(folder, tmp_path)
    with (other / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run(work)
        assert other.is_dir()
    work.folder.rename(tmp_path / "aside")
    run(work)
    assert left_over(tmp_path) == [work.folder.name]


def test_who_finds_the_work_taken_does_it_elsewhere(folder: Path, whole: bytes, tmp_path: Path) -> None:
    work = conversion(folder, tmp_path)
    partial = stopped(work, 14)
    with (partial / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run(work)
        assert (work.folder / WEIGHTS).read_bytes() == whole
        assert left_over(tmp_path) == sorted([partial.name, work.folder.name])


def test_what_fails_or_is_little_is_not_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "KEEP_FROM", 1 << 30)
    work = conversion(folder, tmp_path)
    assert not stopped(work, 14).exists()
    source = write_tiny_qwen3(tmp_path / "tiny", layers=2, dtype="bfloat16")
    failing = conversion(source, tmp_path)
    os.utime(source / "model.safetensors")
    monkeypatch.setattr(partial_module, "KEEP_FROM", 1)
    with pytest.raises(FileError, match="was changed or replaced"):
        run(failing)
    assert left_over(tmp_path) == []
