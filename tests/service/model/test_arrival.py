"""Weights that arrive part by part, in the order of use, beside the first prompt."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from onedesk.service.engine.session import Blueprint, Opening, Session, draw_blueprint, open_session
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
    """A cancel check that holds the reading thread, once the parts `after` have come, until `go`."""

    def __init__(self, after: range) -> None:
        self.after = after
        self._arrivals: list[WeightArrival] = []
        self._watched, self.held, self.go = threading.Event(), threading.Event(), threading.Event()

    def watch(self, arrival: WeightArrival) -> None:
        """Say which arrival is held; the reading thread waits for that first."""
        self._arrivals.append(arrival)
        self._watched.set()

    def __call__(self) -> bool:
        assert self._watched.wait(60)
        if all(self._arrivals[0]._here[part].is_set() for part in self.after) and not self.go.is_set():
            self.held.set()
            assert self.go.wait(60)
        return False


def test_parts_come_in_the_order_of_use_and_are_the_files_bytes(folder: Path, pool: Pool) -> None:
    plan = draw_blueprint(open_checkpoint(folder), CPU, 64).plan
    lease = pool.lease("test", "weights", plan.nbytes)
    brake = Brake(after=range(1, 3))
    arrival = WeightArrival(plan, lease, None, brake).start()
    brake.watch(arrival)
    arrival.wait(1)
    assert brake.held.wait(60)
    here = {part for part in range(LAYERS + 2) if arrival._here[part].is_set()}
    # Readers work side by side, so a part may overtake its neighbour; the last ones cannot be there yet.
    assert {1, 2} <= here
    assert not here & {0, *range(LAYERS - 2, LAYERS + 2)}
    assert not arrival.complete
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    arrival.fetch_rows([7, 500, 7, 0])
    assert torch.equal(arrival.tensors["embedding"][[0, 7, 500]], embedding[[0, 7, 500]])
    assert arrival.waited > 0
    brake.go.set()
    assert arrival.finish().bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert arrival.complete
    stored = load_file(folder / "model.safetensors")
    for tensor in plan.tensors:
        wanted = torch.cat([stored[part.name] for part in tensor.parts])
        assert torch.equal(arrival.tensors[tensor.destination.key], wanted.to(tensor.held))


def braked_session(name: str, blueprint: Blueprint, pool: Pool, cache: Path, after: range) -> tuple[Session, Brake]:
    brake = Brake(after)
    session = open_session(name, blueprint, Opening(pool, cache, cancel=brake))
    brake.watch(session._arrival)
    return session, brake


@pytest.mark.parametrize("tied", [False, True])
def test_a_block_computes_before_the_last_weights_are_there(
    folder: Path, pool: Pool, tmp_path: Path, tied: bool
) -> None:
    """A head that is tied to the embedding waits for all of it, which comes last."""
    if tied:
        folder = write_tiny_qwen3(tmp_path / "tied", layers=LAYERS, dtype="bfloat16")
    blueprint = draw_blueprint(open_checkpoint(folder), CPU, 64)
    whole = open_session("whole", blueprint, Opening(pool, tmp_path))
    whole.settle()
    wanted = whole.runner.prefill(whole.runner.kv.open(8), [3, 4, 5], None, lambda _: None).clone()
    session, brake = braked_session("beside", blueprint, pool, tmp_path, range(1, 4))
    seen: list[int] = []

    def watch() -> bool:
        seen.append(len(seen))
        if len(seen) == 3:
            assert not session.settled, "nothing ran beside the reading"
            brake.go.set()
        return False

    scores = session.runner.prefill(session.runner.kv.open(8), [3, 4, 5], watch, lambda _: None)
    session.settle()
    assert len(seen) == LAYERS + 1
    assert torch.equal(scores, wanted)
    assert session.release()


def test_stopping_gives_everything_back(folder: Path, pool: Pool, tmp_path: Path) -> None:
    session, brake = braked_session(
        "stopped", draw_blueprint(open_checkpoint(folder), CPU, 64), pool, tmp_path, range(0)
    )
    assert brake.held.wait(60)
    threading.Timer(0.2, brake.go.set).start()
    session.release()
    assert pool.used() == 0
    with pytest.raises(Cancelled):
        session.settle()


def test_a_file_changed_while_read_fails_the_wait(folder: Path, pool: Pool, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    session, brake = braked_session("changed", draw_blueprint(open_checkpoint(copy), CPU, 64), pool, tmp_path, range(0))
    assert brake.held.wait(60)
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    brake.go.set()
    with pytest.raises(FileError, match=r"model\.safetensors"):
        session.settle()
    session.release()
    assert pool.used() == 0


def test_rows_of_a_file_that_changed_are_refused(folder: Path, pool: Pool, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    session, brake = braked_session("rows", draw_blueprint(open_checkpoint(copy), CPU, 64), pool, tmp_path, range(0))
    assert brake.held.wait(60)
    (copy / "model.safetensors").write_bytes(b"other")
    with pytest.raises(FileError, match="was changed or replaced"):
        session.runner.prefill(session.runner.kv.open(8), [3, 4], None, lambda _: None)
    brake.go.set()
    session.release()
    assert pool.used() == 0


def test_rows_are_not_read_alone_once_all_are_there(folder: Path, pool: Pool, tmp_path: Path) -> None:
    session = open_session("whole", draw_blueprint(open_checkpoint(folder), CPU, 64), Opening(pool, tmp_path))
    session.settle()
    waited = session.waited
    session._arrival.fetch_rows([1, 2])
    assert session.waited == waited
    session.release()
