"""Rows of a table that stays in its files: what they mean in every form, each read once, and refused where they are
damaged.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import FileError, ModelError
from onedesk.service.loader.header import TensorInfo, read_header
from onedesk.service.loader.table import FileTable
from published import nvfp4
from safetensors.torch import save_file

ROWS, WIDTH, PARTS = 40, 48, 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An NVFP4 table in four parts, as published, and what it means."""
    stored, wanted = nvfp4(divides=False)(ROWS, WIDTH, torch.Generator().manual_seed(2))
    each = ROWS // PARTS
    tensors = {"table.weight_scale_2": stored["weight_scale_2"].view(1)}
    for part in range(PARTS):
        for suffix in ("weight", "weight_scale"):
            tensors[f"table.shard_{part}.{suffix}"] = stored[suffix][part * each : (part + 1) * each].contiguous()
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    save_file(tensors, path)
    return path, wanted


def opened(path: Path) -> FileTable:
    found: dict[str, TensorInfo] = dict(read_header(path, shown=path.name).tensors)
    numbers, groups = (
        [found[f"table.shard_{part}.{suffix}"] for part in range(PARTS)] for suffix in ("weight", "weight_scale")
    )
    return FileTable(numbers, found["table.weight_scale_2"], groups)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=30))
def test_four_bit_rows_are_right_in_any_order(file: tuple[Path, torch.Tensor], rows: list[int]) -> None:
    path, wanted = file
    table = opened(path)
    assert table.shape == (ROWS, WIDTH)
    assert torch.equal(table.read(rows), wanted[rows])


def test_a_scale_that_is_nan_is_named_when_its_row_is_read(file: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    raw = bytearray(file[0].read_bytes())
    info = read_header(file[0], shown="table").tensors["table.shard_2.weight_scale"]
    raw[info.start + WIDTH // 16] = 0x7F
    path = tmp_path / "table.safetensors"
    path.write_bytes(raw)
    table = opened(path)
    assert torch.equal(table.read([20]), file[1][[20]])
    with pytest.raises(
        ModelError,
        match=r"tensor table\.shard_2\.weight_scale has scales that are NaN in row 1; the checkpoint is damaged",
    ):
        table.read([0, 21])


@pytest.mark.parametrize("byte", [0x00, 0x80, 0x9A])
def test_an_invalid_scale_is_named(file: tuple[Path, torch.Tensor], tmp_path: Path, byte: int) -> None:
    raw = bytearray(file[0].read_bytes())
    tensors = read_header(file[0], shown="table").tensors
    info, numbers = tensors["table.shard_2.weight_scale"], tensors["table.shard_2.weight"]
    raw[info.start + WIDTH // 16] = byte
    raw[numbers.start + WIDTH // 2] = 0x21
    path = tmp_path / "table.safetensors"
    path.write_bytes(raw)
    message = (
        r"tensor table\.shard_2\.weight_scale has a scale below 0, or of 0 over other numbers in row 1; the checkpoint"
        r" is damaged"
    )
    with pytest.raises(ModelError, match=message):
        opened(path).read([0, 21])
    raw[numbers.start + WIDTH // 2 : numbers.start + WIDTH // 2 + 8] = b"\x00\x80" * 4
    path.write_bytes(raw)
    if byte != 0x9A:
        assert opened(path).read([21])[0, :16].eq(0).all()


@pytest.mark.parametrize(
    ("scale", "message"),
    [(0.0, "tensor t has numbers other than 0 under a scale of 0 in row 2"), (-1.0, "tensor s is -1")],
)
def test_one_scale_that_cannot_be_is_named(tmp_path: Path, scale: float, message: str) -> None:
    numbers = torch.zeros(4, 8)
    numbers[2, 5] = 1
    save_file({"t": numbers.to(torch.float8_e4m3fn), "s": torch.tensor([scale])}, tmp_path / "table.safetensors")
    found = read_header(tmp_path / "table.safetensors", shown="table").tensors
    table = FileTable([found["t"]], found["s"])
    if scale == 0:
        assert table.read([0, 1]).eq(0).all()
    with pytest.raises(ModelError, match=message):
        table.read([1, 2])


LARGE_ROWS, LARGE_WIDTH = 200_000, 160
PAGE = 4096


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of BF16 rows as wide as those of Qwen3.8-Flash-Next; on a disk, or nothing would be read from it."""
    path = tmp_path_factory.mktemp("large") / "table.safetensors"
    save_file({"table": torch.arange(LARGE_ROWS * LARGE_WIDTH).view(LARGE_ROWS, LARGE_WIDTH).to(torch.bfloat16)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def read_from_disk() -> int:
    """Bytes that this process has fetched from storage."""
    return int(re.findall(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[0])


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("announced", [False, True])
def test_a_new_token_reads_sixteen_pages_a_repeated_one_none(large: Path, announced: bool) -> None:
    info = read_header(large, shown="table").tensors["table"]
    table = FileTable([info])
    table.read([0])
    rows = torch.randint(0, LARGE_ROWS, (16,), generator=torch.Generator().manual_seed(1 + announced)).tolist()
    evict(large)
    before = read_from_disk()
    if announced:
        table.announce(rows)
    found = table.read(rows)
    # A row of 320 bytes may lie on a border of two pages; two more for what else this process may read.
    places = [info.start + row * 2 * LARGE_WIDTH for row in rows]
    pages = {page for place in places for page in (place // PAGE, (place + 2 * LARGE_WIDTH - 1) // PAGE)}
    assert len(pages) * PAGE <= read_from_disk() - before <= (len(pages) + 2) * PAGE
    assert torch.equal(
        found, (torch.tensor(rows)[:, None] * LARGE_WIDTH + torch.arange(LARGE_WIDTH)).to(torch.bfloat16).float()
    )
    again = read_from_disk()
    assert torch.equal(table.read(rows), found)
    assert read_from_disk() == again


def test_what_was_read_is_counted(file: tuple[Path, torch.Tensor]) -> None:
    table = opened(file[0])
    table.read([3, 3, 30])
    assert table.bytes == 2 * (WIDTH // 2 + WIDTH // 16)
    assert table.seconds > 0
    table.announce([5, 1])
    assert table.bytes == 2 * (WIDTH // 2 + WIDTH // 16)
    with pytest.raises(IndexError, match="row 40 is not in a table of 40"):
        table.announce([ROWS])


def test_announced_cached_rows_need_no_second_read(
    file: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = opened(file[0]), [35, 2, 2, 11, 39]
    table.read(rows)
    table.announce(rows)
    with monkeypatch.context() as changed:
        for name in ("preadv", "pread", "stat"):
            changed.setattr(os, name, None)
        assert torch.equal(table.read(rows), file[1][rows])
    table.announce(rows)
    assert torch.equal(table.read([1, 2]), file[1][[1, 2]])  # others than were announced
    assert torch.equal(table.read(rows), file[1][rows])


def refusing(refusal: int, seen: list[int]) -> object:
    """preadv that answers so where it may not wait; `seen` are the flags of its calls."""
    plain = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        seen.append(flags)
        if flags:
            raise OSError(refusal, os.strerror(refusal))
        return plain(fd, buffers, offset)

    return preadv


@pytest.mark.parametrize(("refusal", "asked"), [(errno.EAGAIN, 8), (errno.EOPNOTSUPP, 4)])
def test_uncached_rows_are_read_on_demand(
    file: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch, refusal: int, asked: int
) -> None:
    table, rows, seen = opened(file[0]), [5, 38], list[int]()
    monkeypatch.setattr(os, "preadv", refusing(refusal, seen))
    table.announce(rows)
    table.announce(rows)
    assert len(seen) == asked  # a file system that knows no such reading is not asked again
    assert torch.equal(table.read(rows), file[1][rows])


def test_a_file_truncated_after_announcing_is_named(
    file: tuple[Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.safetensors"
    path.write_bytes(file[0].read_bytes())
    table = opened(path)
    monkeypatch.setattr(os, "preadv", refusing(errno.EAGAIN, []))
    table.announce([5, 38])
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(
        FileError, match=r"table\.safetensors was changed or replaced since its header was read \(it had \d+ bytes, now"
    ):
        table.read([5, 38])
