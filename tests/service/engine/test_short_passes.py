"""The end of a prompt as a graph: the same texts as without, at any length, and only where nothing else is asked of the
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adjusted_rows import Carver
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Request, Result, Sampling
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.short_passes import ShortPasses, short_passes
from onedesk.service.errors import RequestError
from onedesk.service.kernels.forward_batch import BLOCK, DecodeBatch, ForwardBatch
from onedesk.service.memory.lease import carved_bytes
from onedesk.service.registry import Registry
from stepping import ReplayedGraphs
from tiny_qwen3 import write_tiny_qwen3

CONTEXT = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    folder: Path = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "tiny", layers=2)
    registry = Registry()
    registry.configure(Config(tree=folder, model_roots=(folder,), memory={"floor": 64 << 20}))
    opened = registry.open("tiny", context=CONTEXT)
    opened.load()
    yield opened
    registry.close()


class ByPosition(ShortPasses):
    """The CPU's chunks take their positions from the host; its decode steps take them from memory, as a GPU's chunks
    do."""

    def _rows(self, size: int) -> ForwardBatch:
        return DecodeBatch(self._positions[:size], self._table.expand(size, -1).contiguous(), self._kv.context)


@pytest.fixture
def graphs(model: OpenModel) -> Iterator[ReplayedGraphs]:
    """The model's short passes are graphs until the test ends."""
    assert model.session is not None
    runner, made = model.session.runner, ReplayedGraphs()
    runner.short = ByPosition(Carver(), runner.network, runner.kv, runner.scratch, made)  # type: ignore[arg-type]
    yield made
    runner.short = None
    runner.kv.check()


def ids_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 490, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def written(model: OpenModel, ids: tuple[int, ...], **more: Any) -> Result:
    request = Request(ids=ids, sampling=Sampling(temperature=0.0), max_tokens=12, **more)
    return next(event.result for event in model.generate(request) if event.result is not None)


def scores_after(runner: Runner, prefix: tuple[int, ...], tail: tuple[int, ...], short: ShortPasses | None):
    """The scores after a prefix and a tail, and what a decode step makes of the cache."""
    with runner.kv.open(CONTEXT) as sequence:
        runner.short = None
        runner.prefill(sequence, prefix, None, lambda _: None)
        runner.short = short
        first = runner.prefill(sequence, tail, None, lambda _: None).clone()
        runner.short = None
        return first, runner.decode([sequence], [7])[0].clone()


@pytest.mark.parametrize("tail", [9, 15, 16, 17, 40, 64])
def test_a_graph_reads_the_end_of_a_prompt_after_any_prefix(model: OpenModel, graphs: ReplayedGraphs, tail: int):
    """Also where it was captured with other ids, another length and another prefix."""
    runner = model.session.runner  # type: ignore[union-attr]
    short = runner.short
    for seed, prefix in ((1, 90), (2, 200), (3, 64), (4, 301)):
        begin, end = ids_of(prefix, seed), ids_of(max(9, tail - seed % 3), 9 + seed)
        for ours, wanted in zip(
            scores_after(runner, begin, end, short), scores_after(runner, begin, end, None), strict=True
        ):
            torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=2e-4)
    assert set(graphs.keys) <= {("prefill", 16), ("prefill", 32), ("prefill", 64)}
    assert len(graphs.keys) >= 1


def test_a_prompt_after_its_cached_prefix_takes_the_graph(model: OpenModel, graphs: ReplayedGraphs):
    begin = ids_of(3 * BLOCK, 7)
    written(model, (*begin, *ids_of(70, 8)))
    assert graphs.keys == []
    assert written(model, (*begin, *ids_of(20, 9))).usage.cached == 3 * BLOCK
    assert graphs.keys == [("prefill", 32)]


@pytest.mark.parametrize("tail", [5, 8, 65, 200])
def test_other_lengths_are_no_graph(model: OpenModel, graphs: ReplayedGraphs, tail: int):
    written(model, ids_of(tail, tail), prefix_reuse=False)
    assert graphs.keys == []


def test_a_cancelled_request_ends_before_its_pass(model: OpenModel, graphs: ReplayedGraphs):
    request = Request(ids=ids_of(30, 4), sampling=Sampling(temperature=0.0), max_tokens=5)
    results = [event.result for event in model.generate(request, cancel=lambda: True) if event.result is not None]
    assert results[-1].finish == "cancelled"
    assert graphs.keys == []


def test_a_prompt_beyond_the_capacity_is_refused(model: OpenModel, graphs: ReplayedGraphs):
    runner = model.session.runner  # type: ignore[union-attr]
    with runner.kv.open(20) as sequence, pytest.raises(RequestError, match="30 tokens do not fit"):
        runner.prefill(sequence, ids_of(30), None, lambda _: None)


def test_its_bytes_are_those_that_it_carves(model: OpenModel):
    class Counter(Carver):
        total = 0

        def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            self.total += carved_bytes(shape, dtype)
            return super().carve(shape, dtype)

    runner, counter = model.session.runner, Counter()  # type: ignore[union-attr]
    ShortPasses(counter, runner.network, runner.kv, runner.scratch, ReplayedGraphs()).close()  # type: ignore[arg-type]
    assert counter.total == ShortPasses.nbytes(CONTEXT)


def test_a_network_whose_steps_are_no_graph_has_none(model: OpenModel):
    runner = model.session.runner  # type: ignore[union-attr]
    lease: Any = Carver()
    assert short_passes(lease, runner.network, runner.kv, runner.scratch, ReplayedGraphs()) is None
