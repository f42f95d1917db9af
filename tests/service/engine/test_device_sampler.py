"""The device chooses what the host's sampler chooses, by Triton's interpreter; a plan says what each row wants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreted import results
from onedesk.service.core import Sampling
from onedesk.service.engine.device_plan import PENALIZED, PLAN_ROWS, Needs, RowState, write_plan
from onedesk.service.engine.sampler import Sampler
from onedesk.service.engine.stepper import Feed


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results("sampler")


def test_the_same_draw_gives_the_same_token_or_one_of_the_same_score(found: dict[str, Any]):
    for row in found["rows"]:
        assert row["ours"] == row["host"] or row["scores"][0] == row["scores"][1], row
    assert sum(row["ours"] == row["host"] for row in found["rows"]) > 0.8 * len(found["rows"])


def test_counts_are_left_clean_and_broken_scores_are_no_token(found: dict[str, Any]):
    assert not any(found["left"])


def test_every_setting_gives_the_host_samplers_token_but_for_ties():
    found = results("adjusted")
    assert found["rows"] > 20
    assert found["equal"] > 0.8 * found["rows"]


def sampler(**changes: Any) -> Sampler:
    values = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return Sampler(Sampling(**(values | {"repetition_penalty": 1.0} | changes)), 3, [], 500)


def planned(*samplers: Sampler, batch: int, wanted: bool = True) -> tuple[np.ndarray, Needs]:
    feeds = [Feed(None, one, 7 + i, 0, i, wanted) for i, one in enumerate(samplers)]  # type: ignore[arg-type]
    plan = np.full((PLAN_ROWS, batch), -9, np.int32)
    return plan, write_plan(plan, feeds, list(range(10, 10 + batch)))


def test_a_plan_has_a_row_for_each_of_the_batch():
    plan, needs = planned(sampler(), sampler(temperature=0.5, top_k=20), sampler(temperature=2.0), batch=4)
    assert needs == Needs(draws=True)
    assert plan[0].tolist() == [7, 8, 9, 7]
    assert plan[2].tolist() == [10, 11, 12, 13]
    assert plan[3].tolist() == [0, 2, 1, 0]
    assert plan[4].tolist() == [500] * 4
    assert plan[5, 1:3].tolist() == [20, 500]
    assert plan.view(np.float32)[6, 1:3].tolist() == [0.5, 2.0]


def test_the_uniform_number_keeps_its_places():
    one = sampler(temperature=1.0)
    plan, _ = planned(one, batch=1)
    high, low = plan.view(np.float32)[9:11, 0]
    assert float(high) + float(low) == pytest.approx(one.uniform(0), abs=1e-14)


def test_a_row_of_padding_counts_nothing_and_chooses_nothing():
    feeds = [Feed(None, sampler(temperature=1.0, presence_penalty=1.0), 7, 0, 0, wanted=True)]  # type: ignore[arg-type]
    plan = np.zeros((PLAN_ROWS, 2), np.int32)
    assert write_plan(plan, feeds, [3, 3], [RowState(PENALIZED, 4, [8, 9])]) == Needs(draws=True, adjusts=True)
    assert plan[11:13].tolist() == [[PENALIZED, 0], [4, 0]]
    assert plan[18:21].tolist() == [[8, -1], [9, -1], [-1, -1]]
    assert plan.view(np.float32)[13].tolist() == [1.0, 1.0]
    assert plan[3].tolist() == [1, 0]


def test_a_row_whose_token_is_known_makes_no_draw():
    assert planned(sampler(temperature=1.0), batch=1, wanted=False)[1] == Needs()
