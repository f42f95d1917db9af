"""Rows that are handed over as they come: all of them once, whole steps, on the readers' threads, each with a bench
of its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError
from onedesk.service.loader import readers as readers_module
from onedesk.service.loader.bounce import StagingBuffer
from onedesk.service.loader.chunks import intake_bytes
from onedesk.service.loader.header import read_header
from onedesk.service.loader.stream import stream_tensors
from safetensors.torch import save_file
from streaming import assert_no_reader_left

CPU = torch.device("cpu")


@dataclass
class Collector:
    """An intake that keeps a copy of what it is given, by first row."""

    step: int = 1
    most: int = 1 << 20
    device: torch.device = CPU
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    works: set[int] = field(default_factory=set)
    threads: set[str] = field(default_factory=set)

    def take(self, values: torch.Tensor, first: int, work: torch.Tensor) -> None:
        assert first not in self.parts
        self.parts[first] = values.clone()
        self.works.add(work.data_ptr())
        self.threads.add(threading.current_thread().name)

    def whole(self) -> torch.Tensor:
        return torch.cat([self.parts[first] for first in sorted(self.parts)])


def staging(count: int, nbytes: int) -> list[StagingBuffer]:
    return [StagingBuffer(torch.empty(nbytes, dtype=torch.uint8), torch.empty(16)) for _ in range(count)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 70),
    cols=st.integers(1, 40),
    step=st.integers(1, 9),
    most=st.integers(1, 4000),
    count=st.integers(1, 3),
    direct=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int32]),
)
def test_all_rows_come_once_in_whole_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    cols: int,
    step: int,
    most: int,
    count: int,
    direct: bool,
    dtype: torch.dtype,
) -> None:
    """Beside tensors whose bytes go where they are to lie, also through the buffer that other devices get."""
    monkeypatch.setattr(readers_module, "DIRECT_DEVICES", ("cpu",) if direct else ())
    matrix = (torch.randn(rows, cols) * 50).to(dtype)
    save_file({"before": torch.arange(9), "m": matrix, "one": torch.tensor(7.0)}, tmp_path / "m.safetensors")
    found = read_header(tmp_path / "m.safetensors").tensors
    mine, single, plain = Collector(step, most), Collector(), torch.empty(9, dtype=torch.int64)
    room = max(intake_bytes(found["m"], step, most), 4)
    arrived: list[int] = []
    jobs = [(found["m"], mine), (found["before"], plain), (found["one"], single)]
    stats = stream_tensors(jobs, staging=staging(count, room), arrived=arrived.append)
    assert stats.bytes == matrix.nbytes + 9 * 8 + 4
    assert sorted(arrived) == [0, 1, 2]
    assert torch.equal(plain, torch.arange(9))
    assert torch.equal(single.whole(), torch.tensor([7.0]))
    if rows:
        assert torch.equal(mine.whole().view(torch.uint8), matrix.view(torch.uint8))
    assert all(first % step == 0 for first in mine.parts)
    assert all(part.nbytes <= max(most, step * cols * dtype.itemsize) for part in mine.parts.values())


def test_each_reader_has_its_own_staging_buffer(tmp_path: Path) -> None:
    save_file({"m": torch.randn(400, 50)}, tmp_path / "m.safetensors")
    mine = Collector(most=1000)
    stream_tensors([(read_header(tmp_path / "m.safetensors").tensors["m"], mine)], staging=staging(2, 1000), readers=4)
    assert 1 <= len(mine.works) == len(mine.threads) <= 2
    assert all(name.startswith("onedesk-read") for name in mine.threads)


def test_an_intake_that_refuses_ends_the_stream(tmp_path: Path) -> None:
    save_file({"m": torch.randn(400, 50)}, tmp_path / "m.safetensors")

    class Refusing(Collector):
        def take(self, values: torch.Tensor, first: int, work: torch.Tensor) -> None:
            raise ModelError("m has weights that are no numbers")

    with pytest.raises(ModelError, match="no numbers"):
        stream_tensors(
            [(read_header(tmp_path / "m.safetensors").tensors["m"], Refusing(most=1000))], staging=staging(2, 1000)
        )
    assert_no_reader_left()


def test_rows_without_a_bench_are_a_fault_of_the_caller(tmp_path: Path) -> None:
    save_file({"m": torch.randn(4, 5)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="this reader has no staging buffer"):
        stream_tensors([(read_header(tmp_path / "m.safetensors").tensors["m"], Collector())])
