"""Speculative decoding does not change completions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asking import ask
from choices import alone, run, same, thinker
from onedesk.service.api import OpenModel
from onedesk.service.core import Request, Sampling
from onedesk.service.engine.speculate import PassCosts

REPEATS = (11, 12, 13, 14, 15, 16, 17, 18) * 6


class Free(PassCosts):
    """Passes of any width cost the same, so that every draft is verified."""

    def record(self, rows: int, seconds: float) -> None:
        self.measured = dict.fromkeys(range(1, 9), 1.0)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=3, temperature=0), Sampling(seed=4, temperature=0.4), Sampling(seed=5, frequency_penalty=0.1)],
)
@pytest.mark.parametrize("ids", [REPEATS, tuple(range(3, 60))])
def test_draft_tokens_do_not_change_the_completion(model: OpenModel, sampling: Sampling, ids: tuple[int, ...]) -> None:
    biased = replace(sampling, logit_bias={2: -100.0} | dict.fromkeys(range(11, 14), 6.0))
    request = Request(ids=ids, max_tokens=60, sampling=biased)
    wanted = alone(model, request)
    model.session.costs = Free()  # type: ignore[union-attr]
    found = run(model, request)[0, 0]
    model.session.costs = PassCosts()  # type: ignore[union-attr]
    assert same(found, wanted)
    stage = found.stages["speculation"]
    assert stage.proposed > 0
    assert 0 <= stage.accepted <= stage.proposed
    assert stage.accepted > 0 or sampling.temperature != 0


def test_drafts_end_with_the_completion(model: OpenModel) -> None:
    requests = [
        ask(max_tokens=30, sampling=Sampling(seed=3, temperature=0), stop=stop) for stop in ((), ("e",), ("at",))
    ]
    requests += [thinker(1, thinking_budget=9, sampling=Sampling(seed=3, temperature=0))]
    for request in requests:
        wanted = alone(model, request)
        model.session.costs = Free()  # type: ignore[union-attr]
        assert same(run(model, request)[0, 0], wanted)
        model.session.costs = PassCosts()  # type: ignore[union-attr]
