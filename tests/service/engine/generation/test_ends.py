"""Cancelled, stopped and dropped requests keep their text and free their blocks."""

from __future__ import annotations

from asking import ask
from choices import alone, check, results, run, same, tokens
from onedesk.service.api import OpenModel
from onedesk.service.core import Event, Sampling


def test_a_cancelled_item_ends_alone(stepped: OpenModel) -> None:
    requests = [ask(f"number {place}", sampling=Sampling(seed=place), max_tokens=60) for place in range(3)]
    wanted = [alone(stepped, request) for request in requests]
    kv = stepped.session.runner.kv  # type: ignore[union-attr]
    events: list[Event] = []
    available: list[int] = []
    for event in stepped.generate_batch(requests, cancel_request=lambda place: place == 1 and tokens(events, 1) >= 5):
        events.append(event)
        if event.request == 1:
            available.append(kv.available)
    found = results(events)
    check(stepped)
    assert (found[1, 0].finish, found[1, 0].ids) == ("cancelled", wanted[1].ids[:5])
    assert available[-1] > min(available)  # held-back text may come between the end and the result
    assert same(found[0, 0], wanted[0])
    assert same(found[2, 0], wanted[2])


def test_stop_ends_all(stepped: OpenModel) -> None:
    requests = [ask(f"number {place}", n=2, max_tokens=60) for place in range(6)]
    events: list[Event] = []
    for event in stepped.generate_batch(requests, cancel=lambda: tokens(events, 0) >= 6):
        events.append(event)
    found = results(events)
    check(stepped)
    assert len(found) == 12
    assert {result.finish for result in found.values()} <= {"cancelled", "stop"}
    assert [len(found[5, choice].ids) for choice in range(2)] == [0, 0], "it had no slot yet"
    for choice in range(2):
        assert found[0, choice].ids == alone(stepped, requests[0], choice).ids[: len(found[0, choice].ids)]


def test_a_dropped_stream_frees_its_blocks(stepped: OpenModel) -> None:
    stream = stepped.generate_batch([ask(n=3), ask("b", max_tokens=50)])
    seen = 0
    while seen < 10:
        seen += next(stream).token is not None
    stream.close()
    assert not stepped.busy
    check(stepped)
    assert same(run(stepped, ask())[0, 0], alone(stepped, ask()))
