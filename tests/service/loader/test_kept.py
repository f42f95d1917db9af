"""Files that stay open: never more than allowed, closed with their owner, and named when they are no longer what
they were.
"""

from __future__ import annotations

import errno
import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from onedesk.service.errors import FileError
from onedesk.service.loader.header import TensorInfo, read_header
from onedesk.service.loader.kept import KeptFiles
from onedesk.service.loader.table import FileTable
from onedesk.service.model.spec import Destination
from onedesk.service.model.tables import PlannedTable, open_tables
from safetensors.torch import save_file

ROWS, WIDTH = 6, 8


def part(folder: Path, number: int) -> TensorInfo:
    path = folder / f"shard-{number}.safetensors"
    save_file({"table": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).float() + 1000 * number}, path)
    return read_header(path, shown=path.name).tensors["table"]


def open_here(folder: Path) -> int:
    """Descriptors of this process that lie in the folder."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found += str(folder) in str(link.readlink())
    return found


def test_open_files_are_limited_and_closed_with_the_table(tmp_path: Path) -> None:
    parts = [part(tmp_path, number) for number in range(5)]
    table = FileTable(parts)
    table._files.most = 3
    rows = [0, ROWS, 2 * ROWS + 1, 4 * ROWS, 3 * ROWS + 5, 0]
    wanted = torch.stack([torch.arange(WIDTH) + 1000 * (row // ROWS) + row % ROWS * WIDTH for row in rows]).float()
    for _ in range(2):
        table.announce(rows)
        assert torch.equal(table.read(rows), wanted)
        assert open_here(tmp_path) == 3
    table._files.close()
    assert open_here(tmp_path) == 0
    assert torch.equal(table.read(rows), wanted)
    del table
    gc.collect()
    assert open_here(tmp_path) == 0


def test_the_tables_of_a_model_share_what_may_be_open(tmp_path: Path) -> None:
    parts = [tuple(part(tmp_path, 3 * name + number) for number in range(3)) for name in range(2)]
    planned = [PlannedTable(Destination(str(name), (), 1), infos, None) for name, infos in enumerate(parts)]
    tables = open_tables(planned)
    tables["0"]._files.most = 2
    rows = [0, ROWS, 2 * ROWS]
    for _ in range(2):
        for name, table in tables.items():
            table.announce(rows)
            assert table.read(rows)[:, 0].tolist() == [1000 * (3 * int(name) + n) for n in range(3)]
            assert open_here(tmp_path) == 2
    del tables["0"]
    del tables, table
    gc.collect()
    assert open_here(tmp_path) == 0


def test_at_most_a_share_of_what_may_be_open_is_kept() -> None:
    assert 1 <= KeptFiles().most <= 160


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, r"shard-1\.safetensors was changed or replaced since its header was read \(it had \d+ bytes, now \d+\)"),
        (replace, r"shard-1\.safetensors was changed or replaced .* \(another file of \d+ bytes is there instead\)"),
        (
            touch,
            (
                r"shard-1\.safetensors was changed or replaced .* \(it still has \d+ bytes, but was written [\d.e+]+ s"
                r" earlier than"
            ),
        ),
        (Path.unlink, r"shard-1\.safetensors cannot be opened: No such file"),
    ],
)
@pytest.mark.parametrize("announced", [False, True])
def test_a_file_that_changes_under_an_open_table_is_named(
    tmp_path: Path, harm: object, message: str, announced: bool
) -> None:
    table = FileTable([part(tmp_path, number) for number in range(2)])
    table.read([1, ROWS + 1])
    harm(tmp_path / "shard-1.safetensors")  # pyright: ignore[reportCallIssue]
    assert table.read([2])[0, 0] == 2 * WIDTH
    with pytest.raises(FileError, match=message):
        (table.announce if announced else table.read)([0, ROWS])
    assert table.read([2])[0, 0] == 2 * WIDTH


def test_a_disk_that_cannot_read_is_told_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = part(tmp_path, 0)
    table = FileTable([info])
    wanted = table.read([1])

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as changed:
        changed.setattr(os, "preadv", broken)
        assert torch.equal(table.read([1]), wanted)  # once is no reason to give up
        changed.setattr(os, "pread", broken)
        with pytest.raises(
            FileError,
            match=rf"shard-0\.safetensors cannot be read at byte {info.start + 4 * WIDTH}: Input/output error",
        ):
            table.read([1])
    assert torch.equal(table.read([1]), wanted)
