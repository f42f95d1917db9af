"""The state of a request: limits, ends, forced tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.engine.sequence import Limits, Sequence

EOS = 99


def sequence(answer: int = 10, reasoning: int = 5, room: int = 100) -> Sequence:
    return Sequence((1, 2), Limits(answer, reasoning, room, frozenset({EOS})))


def test_eos_ends_and_counts_but_is_no_id() -> None:
    s = sequence()
    for token in (5, 6, EOS):
        s.settle(token, in_reasoning=False)
    assert (s.ids, s.completion, s.finish) == ([5, 6], 3, "stop")


def test_reasoning_does_not_eat_the_answers_tokens() -> None:
    s = sequence(answer=2, reasoning=100)
    for token in range(50):
        s.settle(token, in_reasoning=True)
    assert s.finish is None
    s.settle(60, in_reasoning=False)
    assert s.finish is None
    s.settle(61, in_reasoning=False)
    assert (s.finish, s.reasoning, s.answer) == ("length", 50, 2)


def test_a_spent_budget_forces_the_closing_once() -> None:
    s, closing, fed = sequence(reasoning=3), [70, 71], []
    inside = True
    for token in range(20):
        forced = s.next_forced(in_reasoning=inside, closing=closing)
        fed.append(token if forced is None else forced)
        s.settle(fed[-1], in_reasoning=inside)
        inside = inside and fed[-1] != 71
        if s.finish:
            break
    assert fed[:6] == [0, 1, 2, 70, 71, 5]
    assert fed.count(70) == 1


@given(
    answer=st.integers(1, 8),
    reasoning=st.integers(0, 8),
    room=st.integers(1, 20),
    tokens=st.lists(st.tuples(st.integers(0, 98), st.booleans()), max_size=40),
)
def test_limits_hold(answer: int, reasoning: int, room: int, tokens: list[tuple[int, bool]]) -> None:
    s = sequence(answer, reasoning, room)
    for token, inside in tokens:
        if s.finish:
            break
        s.settle(token, in_reasoning=inside)
    assert s.answer <= answer
    assert s.completion == len(s.ids) == s.answer + s.reasoning <= room
    assert (s.finish == "length") == (s.answer == answer or s.completion == room)


def test_a_stop_string_at_the_last_token_is_the_reason() -> None:
    s = sequence(answer=1)
    s.settle(5, in_reasoning=False)
    s.end("stop_string")
    assert s.finish == "stop_string"
    s.end("cancelled")
    assert s.finish == "stop_string"
