"""best_of and beam search: ranked by the model's scores, next to other requests and when they are stopped."""

from __future__ import annotations

import pytest
from asking import ask
from choices import alone, check, results, run, same
from onedesk.service.api import OpenModel
from onedesk.service.core import Request, Result, Sampling


def test_best_of_gives_the_likeliest_as_the_model_scores_them(model: OpenModel) -> None:
    request = ask(n=2, best_of=6, max_tokens=10)
    found = run(model, request)
    singles = [alone(model, request, choice) for choice in range(6)]
    prompt = model.encode(model.render(request.messages))
    ends = {"stop": model.encode("<|im_end|>")}

    def total(result: Result) -> float:
        logprobs = model.score([*prompt, *result.ids, *ends.get(result.finish, [])])
        return sum(logprobs[len(prompt) - 1 :])

    best = sorted(singles, key=total, reverse=True)[:2]
    assert set(found) == {(0, 0), (0, 1)}
    for place, wanted in enumerate(best):
        assert found[0, place].ids == wanted.ids
        assert found[0, place].seed == wanted.seed
        assert found[0, place].logprob == pytest.approx(total(wanted), abs=1e-3)


def test_a_search_beside_other_work_changes_neither(model: OpenModel) -> None:
    search = Request(ids=tuple(range(3, 30)), beams=3, n=3, max_tokens=10, sampling=Sampling(seed=0))
    lone = run(model, search)
    found = run(model, ask(), search, ask("b", n=2))
    for choice in range(3):
        assert same(found[1, choice], lone[0, choice])
    assert same(found[0, 0], alone(model, ask()))
    assert same(found[2, 1], alone(model, ask("b", n=2), 1))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stopped_search_gives_its_best_so_far(model: OpenModel, after: int) -> None:
    steps: list[int] = []
    request = Request(ids=tuple(range(3, 30)), beams=4, max_tokens=30, sampling=Sampling(logit_bias={2: -100.0}))
    stream = model.generate(request, cancel=lambda: len(steps) >= after)
    events = []
    for event in stream:
        events.append(event)
        if event.progress is not None and event.progress.stage == "decode":
            steps.append(1)
    check(model)
    result = results(events)[0, 0]
    assert result.finish == "cancelled"
    assert len(result.ids) <= after + 2
