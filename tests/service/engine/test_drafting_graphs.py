"""Drafts where passes are CUDA graphs: the same completions as without. The CPU stands in for the device, see
stepping.py."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import PROMPT, Told, arbitrary, passes, start, tell, write, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel
from onedesk.service.core import Event, Request, Result, Sampling
from onedesk.service.engine import speculate
from onedesk.service.engine.decode_loop import DecodeLoop
from onedesk.service.engine.request_state import RunningSequence
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.speculate import PassCosts, Speculator
from onedesk.service.engine.stepper import Checked
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from stepping import OnTheCpu, ReplayedGraphs, stepping

WAYS = {
    "greedy": Sampling(temperature=0.0),
    "drawn": Sampling(0.9, 20, 0.9, 0.02, seed=3),
    "penalties": Sampling(0.8, 20, 0.9, 0.0, presence_penalty=0.5, seed=9),
    "a bias and every penalty": Sampling(0.8, 0, 0.9, 0.05, 0.2, 0.1, 1.05, seed=9, logit_bias={9: 1.0, 30: -5.0}),
}


@pytest.fixture(autouse=True)
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed costs are no share of the real time, so the bound on losses is lifted."""
    monkeypatch.setattr(speculate, "MAX_LOSS", 1e9)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen4_exp"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    """A model of which about every third draft token is wrong."""
    folder: Path = tmp_path_factory.mktemp("models")
    keep_kernels(folder)
    pool = Pool("cpu", MemorySettings(floor=64 << 20), lambda: read_truth("cpu"))
    opened = start(write(folder / "tiny", request.param, rigged=True, wrong=0.25), pool, folder)
    yield opened
    opened.close()


@pytest.fixture
def stepper(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    tell(model)
    with stepping(model, monkeypatch) as made:
        yield made


def ask(sampling: Sampling, **changes: object) -> Request:
    return replace(Request(ids=PROMPT, sampling=sampling, max_tokens=50, prefix_reuse=False), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_in_graphs_save_passes_and_change_nothing(model: OpenModel, stepper: OnTheCpu, way: str) -> None:
    request = ask(WAYS[way])
    plain = written(model, replace(request, speculation=False))
    assert (stepper.checked, stepper.launches) == (0, 49)
    drafted = written(model, request)
    assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
    drafts = drafted.stages["draft"]
    assert 20 < drafts.accepted < drafts.proposed
    assert passes(model, drafted) == stepper.checked + stepper.launches - 49 < 40
    graphs = stepper._graphs
    assert isinstance(graphs, ReplayedGraphs)
    assert {key[0] for key in graphs.keys} >= {1, "check", "draft"}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), chance=st.floats(0.0, 1.0), way=st.sampled_from(list(WAYS)))
def test_any_drafts_in_graphs_leave_the_text_as_it_is(
    model: OpenModel, stepper: OnTheCpu, seed: int, chance: float, way: str
) -> None:
    """Drafts of any length, right up to any token, from the layer or invented."""
    draw, request = (
        random.Random(seed),
        ask(WAYS[way], ids=PROMPT[: 5 + seed % 30], max_tokens=30),
    )
    wanted = written(model, replace(request, speculation=False)).ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onedesk.service.engine.decode_loop.Speculator", arbitrary(request, wanted, draw, chance))
        assert written(model, request).ids == wanted
    tell(model).kv.check()


class Noting(PassCosts):
    """Fixed costs; what is recorded is kept apart."""

    def __init__(self) -> None:
        fixed = Told()
        super().__init__(fixed.measured, fixed.draft_share, fixed.measured_draft)
        self.noted: list[int] = []

    def record(self, rows: int, seconds: float) -> None:
        self.noted.append(rows)

    def record_draft(self, tokens: int, unread: int, seconds: float) -> None:
        self.noted.append(-tokens)


def test_a_step_that_captures_is_not_recorded(
    model: OpenModel, stepper: OnTheCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own pass nor that of the draft layer before it is recorded: a capture takes longer than the passes
    after it."""
    costs, graphs, grew = Noting(), stepper._graphs, list[bool]()
    tell(model, costs)
    real_step, real_record, recorded = DecodeLoop.step, Speculator.record, list[float | None]()

    def step(loop: DecodeLoop, sequences: Sequence[RunningSequence]) -> Iterator[Event]:
        before = graphs.captured
        try:
            yield from real_step(loop, sequences)
        finally:  # the last one is left where the text ends
            grew.append(graphs.captured > before)

    def record(speculator: Speculator, proposed: int, accepted: int, seconds: float | None, **more: Any) -> None:
        recorded.append(seconds)
        real_record(speculator, proposed, accepted, seconds, **more)

    monkeypatch.setattr(DecodeLoop, "step", step)
    monkeypatch.setattr(Speculator, "record", record)
    written(model, ask(WAYS["greedy"], speculation=True))
    assert len(grew) == stepper.checked + stepper.launches
    assert any(grew)
    count = len([rows for rows in costs.noted if rows > 0])
    assert count == len([seconds for seconds in recorded if seconds is not None]) == grew.count(False)


def test_a_text_whose_steps_are_in_flight_is_not_checked(model: OpenModel, stepper: OnTheCpu) -> None:
    stepper._in_flight.append(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps are in flight"):
        stepper.check(None, None, [1], 1)  # type: ignore[arg-type]
    stepper._in_flight.clear()


def test_results_show_drafts(model: OpenModel, stepper: OnTheCpu) -> None:
    result: Result = written(model, ask(WAYS["drawn"]))
    assert result.stages["speculation"].accepted >= result.stages["draft"].accepted > 0


def test_a_forced_token_inside_a_check_takes_no_draw() -> None:
    """The device's draw after it was another token's: the host draws again."""
    vocab, scores = 50, torch.randn(3, 50, generator=torch.Generator().manual_seed(1))

    def sampler() -> Sampler:
        return Sampler(Sampling(1.3, 0, 1.0, 0.0, 0.0, 0.0, 1.0), 4, [], vocab)

    drawing, chosen = sampler(), []
    for row in scores:
        chosen.append(drawing.choose(row.clone()))
        drawing.accept(chosen[-1])
    forced = sampler()
    checked = Checked(forced, scores.clone(), [*chosen[:2], vocab - 1], 0)
    assert checked.pick(0).token == chosen[0]
    forced.accept(chosen[0])
    forced.accept(7, forced=True)
    alone = sampler()
    alone.accept(0)
    assert checked.pick(2).token == alone.choose(scores[2].clone()) != vocab - 1
