"""Choices and lists: each is what it is alone, whatever else runs, runs ahead or preempts it."""

from __future__ import annotations

import pytest
from asking import ask
from choices import alone, run, same, thinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.api import OpenModel
from onedesk.service.core import Request, Sampling
from onedesk.service.engine.request_state import RunningSequence

ASKED = st.builds(
    lambda text, tokens, seed, n, stop, greedy, penalty: ask(
        text * 3,
        max_tokens=tokens,
        n=n,
        stop=(stop,) if stop else (),
        sampling=Sampling(seed=seed, temperature=0 if greedy else None, frequency_penalty=penalty),
    ),
    st.text("abc ", min_size=1, max_size=40).filter(str.strip),
    st.integers(1, 25),
    st.integers(0, 2**64 - 1),
    st.integers(1, 3),
    st.sampled_from(["", "", "e", "\n", "a"]),
    st.booleans(),
    st.sampled_from([None, None, 0.5]),
)


def test_choices_are_what_each_seed_writes_alone(stepped: OpenModel) -> None:
    request = ask(n=5, sampling=Sampling(seed=2**64 - 2))
    found = run(stepped, request)
    assert [found[0, choice].seed for choice in range(5)] == [2**64 - 2, 2**64 - 1, 0, 1, 2]
    assert all(same(found[0, choice], alone(stepped, request, choice)) for choice in range(5))
    assert len({found[0, choice].ids for choice in range(5)}) == 5


def test_more_choices_than_places_follow_when_others_have_ended(stepped: OpenModel) -> None:
    request = ask(n=20, max_tokens=12)
    found = run(stepped, request)
    assert len(found) == 20
    assert all(same(found[0, choice], alone(stepped, request, choice)) for choice in (0, 7, 8, 19))


def test_a_host_sampled_row_ends_next_to_rows_that_run_ahead(stepped: OpenModel) -> None:
    penalized = Sampling(seed=1, frequency_penalty=0.5)
    requests = [ask("ends first", sampling=penalized, max_tokens=tokens) for tokens in (4, 5, 9)] + [
        ask("continues", max_tokens=20)
    ]
    found = run(stepped, *requests)
    assert all(same(found[place, 0], alone(stepped, request)) for place, request in enumerate(requests))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(ASKED, min_size=1, max_size=4))
def test_a_list_is_what_its_items_are_alone(stepped: OpenModel, requests: list[Request]) -> None:
    found = run(stepped, *requests)
    assert set(found) == {(place, choice) for place, request in enumerate(requests) for choice in range(request.n)}
    for (place, choice), result in found.items():
        assert same(result, alone(stepped, requests[place], choice))


def test_a_spent_thinking_budget_is_closed_in_every_row(stepped: OpenModel) -> None:
    requests = [thinker(seed, thinking_budget=5 + seed) for seed in range(4)]
    found = run(stepped, *requests, ask())
    for place, request in enumerate([*requests, ask()]):
        assert same(found[place, 0], alone(stepped, request))
    assert all("That is enough thinking" in found[place, 0].reasoning for place in range(4))


def test_outgrowing_the_reservation_preempts_the_newest(narrow: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[int] = []
    preempt = RunningSequence.preempt
    monkeypatch.setattr(RunningSequence, "preempt", lambda self: (preempted.append(self.ticket.request), preempt(self)))
    requests = [thinker(seed) for seed in range(3)]
    found = run(narrow, *requests)
    assert preempted, "none was preempted"
    assert 0 not in preempted, "the oldest was preempted"
    assert "length" in {result.finish for result in found.values()}
    for place, request in enumerate(requests):
        assert same(found[place, 0], alone(narrow, request)), place
