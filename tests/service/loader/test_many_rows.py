"""Many rows of a table at once: the same as one by one, over files that do not all stay open, and refused where a
file ends.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.config import load_config
from onedesk.service.errors import FileError
from onedesk.service.kernels.choose import row_reader
from onedesk.service.kernels.cpu.file_rows import FileRowReader
from onedesk.service.loader.header import TensorInfo, read_header
from onedesk.service.loader.table import MANY, FileTable
from safetensors.torch import save_file

EACH, WIDTH, PARTS = 300, 8, 5
ROWS = EACH * PARTS
WANTED = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).float()


@pytest.fixture(scope="module")
def reader() -> FileRowReader:
    found = row_reader(load_config(None).cache)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[TensorInfo]:
    return written(tmp_path_factory.mktemp("table"))


def written(folder: Path) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    for number, rows in enumerate(WANTED.split(EACH)):
        path = folder / f"shard-{number}.safetensors"
        save_file({"table": rows.clone()}, path)
        found.append(read_header(path, shown=path.name).tensors["table"])
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(MANY, 4 * MANY),
    among=st.sampled_from([1, 50, ROWS]),
    files=st.integers(1, PARTS),
    announced=st.booleans(),
)
def test_many_rows_are_those_that_were_asked_for(
    parts: list[TensorInfo], reader: FileRowReader, seed: int, count: int, among: int, files: int, announced: bool
) -> None:
    rows = torch.randint(ROWS - among, ROWS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    table = FileTable(parts, reader=reader)
    table._files.most = files
    if announced:
        table.announce(rows)
    assert torch.equal(table.read(rows), WANTED[rows])
    assert table.bytes == len(set(rows)) * WIDTH * 4  # each is read once


def test_no_more_than_is_wanted_of_a_row_that_is_not_there(parts: list[TensorInfo], reader: FileRowReader) -> None:
    table = FileTable(parts, reader=reader)
    for row in (-1, ROWS):
        with pytest.raises(IndexError, match=f"row {row} is not in a table of {ROWS}"):
            table.read([*range(MANY), row])


@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_reads_its_rows_too(parts: list[TensorInfo], reader: FileRowReader, held: bool) -> None:
    table = FileTable(parts, reader=reader)
    rows = list(range(ROWS))
    table.announce(rows)  # the thread that brings them is the parent's alone
    lock = table._files.lock if held else nullcontext()
    with lock:  # as if that thread, or another table's, had just been at the files
        child = os.fork()
        if child == 0:
            right = False
            with suppress(BaseException):
                torch.set_num_threads(
                    1
                )  # OpenMP's threads are the parent's alone; a region would wait for them for ever
                right = torch.equal(table.read(rows), WANTED) and torch.equal(table.read([3, 1]), WANTED[[3, 1]])
                table.announce(rows)
                right = right and torch.equal(table.read(rows), WANTED)
            os._exit(0 if right else 1)
    status = ended(child, 20.0)
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(table.read(rows), WANTED)


def ended(child: int, seconds: float) -> int | None:
    """The status that a child ended with; None for one that had to be killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_file_that_ends_before_its_rows_is_named(
    tmp_path: Path, reader: FileRowReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = written(tmp_path)
    table = FileTable(parts, reader=reader)
    rows = list(range(ROWS))
    assert torch.equal(table.read(rows), WANTED)
    os.truncate(parts[3].source.path, parts[3].source.size - 4)
    with monkeypatch.context() as patched:  # as if it was cut off between the look at it and the read
        patched.setattr(type(parts[3].source), "unchanged", lambda _: True)
        with pytest.raises(
            FileError, match=r"shard-3\.safetensors ends at byte \d+ while \d+ bytes from byte \d+ were read"
        ):
            table.read(rows)
    with pytest.raises(FileError, match=r"shard-3\.safetensors was changed or replaced since its header was read"):
        table.read(rows)
    assert torch.equal(table.read(range(2 * EACH)), WANTED[: 2 * EACH])
