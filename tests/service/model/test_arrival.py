"""Weights that arrive part by part, in the order of use, beside the first prompt."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from onedesk.service.engine.session import Opening, draw_blueprint, open_session
from onedesk.service.errors import Cancelled, FileError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from safetensors.torch import load_file
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
LAYERS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Ten layers and more: on disk layer 10 comes before layer 2.
    return write_tiny_qwen3(tmp_path_factory.mktemp("arrival") / "tiny", layers=LAYERS, dtype="bfloat16", tied=False)


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


class Brake:
    """A cancel check that lets the reading thread pass `free` times and then holds it until `go`."""

    def __init__(self, free: int) -> None:
        self.calls = 0
        self.free = free
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.calls += 1
        if self.calls > self.free and not self.go.is_set():
            self.held.set()
            assert self.go.wait(60)
        return False


def test_parts_come_in_the_order_of_use_and_are_the_files_bytes(folder: Path, pool: Pool) -> None:
    plan = draw_blueprint(open_checkpoint(folder), CPU, 64).plan
    lease = pool.lease("test", "weights", plan.nbytes)
    brake = Brake(free=30)
    arrival = WeightArrival(plan, lease, None, brake).start()
    arrival.wait(0)
    assert brake.held.wait(60)
    here = [part for part in range(LAYERS + 2) if arrival._here[part].is_set()]
    assert here == list(range(len(here)))
    assert 0 < len(here) < LAYERS
    assert not arrival.complete
    brake.go.set()
    assert arrival.finish().bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert arrival.complete
    stored = load_file(folder / "model.safetensors")
    for tensor in plan.tensors:
        wanted = torch.cat([stored[part.name] for part in tensor.parts])
        assert torch.equal(arrival.tensors[tensor.destination.key], wanted.to(tensor.held))


def test_a_block_computes_before_the_last_weights_are_there(folder: Path, pool: Pool, tmp_path: Path) -> None:
    blueprint = draw_blueprint(open_checkpoint(folder), CPU, 64)
    whole = open_session("whole", blueprint, Opening(pool, tmp_path))
    whole.settle()
    wanted = whole.runner.prefill([3, 4, 5], None, lambda _: None).clone()
    brake = Brake(free=60)  # about five blocks
    session = open_session("beside", blueprint, Opening(pool, tmp_path, cancel=brake))
    seen: list[int] = []

    def watch() -> bool:
        seen.append(len(seen))
        if len(seen) == 3:
            assert not session.settled, "nothing ran beside the reading"
            brake.go.set()
        return False

    scores = session.runner.prefill([3, 4, 5], watch, lambda _: None)
    session.settle()
    assert len(seen) == LAYERS + 1
    assert torch.equal(scores, wanted)
    assert session.release()


def test_stopping_gives_everything_back(folder: Path, pool: Pool, tmp_path: Path) -> None:
    brake = Brake(free=10)
    session = open_session("stopped", draw_blueprint(open_checkpoint(folder), CPU, 64), Opening(pool, tmp_path, cancel=brake))
    assert brake.held.wait(60)
    threading.Timer(0.2, brake.go.set).start()
    session.release()
    assert pool.used() == 0
    with pytest.raises(Cancelled):
        session.settle()


def test_a_file_that_changes_while_it_is_read_is_told_to_who_waits(folder: Path, pool: Pool, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    brake = Brake(free=5)
    session = open_session("changed", draw_blueprint(open_checkpoint(copy), CPU, 64), Opening(pool, tmp_path, cancel=brake))
    assert brake.held.wait(60)
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    brake.go.set()
    with pytest.raises(FileError, match=r"model\.safetensors"):
        session.runner.prefill([3, 4, 5], None, lambda _: None)
        session.settle()
    session.release()
    assert pool.used() == 0
