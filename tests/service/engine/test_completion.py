"""A completion's limits, ends and forced tokens, with a real tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import qwen_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.core import NEUTRAL
from onedesk.service.engine.completion import CLOSING, Completion, Limits, Prepared
from onedesk.service.engine.sampler import Adjustments
from onedesk.service.text.stops import StopStrings
from onedesk.service.text.tokenizer import Tokenizer, load_tokenizer

EOS = 99
TOKENIZER = load_tokenizer(qwen_tokenizers.real_tokenizer("qwen3"))
CLOSED = tuple(TOKENIZER.encode(CLOSING))
(CLOSE,) = TOKENIZER.encode("</think>")
WORD, OTHER = TOKENIZER.encode("red fox")


def prepared(
    answer: int = 10, reasoning: int = 5, room: int = 100, *, in_reasoning: bool = False, stop: str = ""
) -> Prepared:
    """A request whose prompt has two tokens and, `in_reasoning`, has opened the reasoning."""
    return Prepared(
        ids=(1, 2),
        sampling=NEUTRAL,
        seed=0,
        limits=Limits(answer, reasoning, room, frozenset({EOS})),
        reserve=answer,
        stop=StopStrings((stop,) if stop else ()),
        in_reasoning=in_reasoning,
        repetition_stop=False,
        tokenizer=TOKENIZER,
        choosable=TOKENIZER.size,
        adjustments=Adjustments(NEUTRAL, (), 0),
        closing=CLOSED,
    )


def test_eos_ends_and_counts_but_is_no_id() -> None:
    completion = Completion(prepared())
    for token in (WORD, OTHER, EOS):
        completion.take(token)
    assert (completion.ids, completion.taken, completion.finish) == ([WORD, OTHER], 3, "stop")


def test_reasoning_does_not_use_up_the_answer() -> None:
    completion = Completion(prepared(answer=2, reasoning=100, in_reasoning=True))
    for token in [WORD] * 49 + [CLOSE, WORD]:
        completion.take(token)
    assert completion.finish is None
    completion.take(OTHER)
    assert (completion.finish, completion.reasoning_tokens, completion.answer_tokens) == ("length", 50, 2)


def test_a_spent_budget_forces_the_closing_once() -> None:
    completion, taken = Completion(prepared(reasoning=3, in_reasoning=True)), []
    while completion.finish is None:
        forced = completion.forced_token
        taken.append(WORD if forced is None else forced)
        completion.take(taken[-1], forced=forced is not None)
    assert taken == [*[WORD] * 3, *CLOSED, *[WORD] * 10]
    assert (completion.reasoning_tokens, completion.answer_tokens) == (3 + len(CLOSED), 10)


@given(
    answer=st.integers(1, 8),
    reasoning=st.integers(0, 8),
    room=st.integers(1, 20),
    in_reasoning=st.booleans(),
    tokens=st.lists(st.sampled_from([WORD, OTHER, CLOSE]), max_size=40),
)
def test_limits_hold(answer: int, reasoning: int, room: int, in_reasoning: bool, tokens: list[int]) -> None:
    completion = Completion(prepared(answer, reasoning, room, in_reasoning=in_reasoning))
    for token in tokens:
        if completion.finish:
            break
        forced = completion.forced_token
        completion.take(token if forced is None else forced, forced=forced is not None)
    assert completion.answer_tokens <= answer
    assert completion.taken == len(completion.ids) == completion.answer_tokens + completion.reasoning_tokens <= room
    assert (completion.finish == "length") == (completion.answer_tokens == answer or completion.taken == room)


def test_a_stop_string_at_the_last_token_is_the_reason() -> None:
    completion = Completion(prepared(answer=1, stop="red"))
    completion.take(WORD)
    assert completion.finish == "stop_string"
    completion.end("cancelled")
    assert completion.finish == "stop_string"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_a_completion_without_a_tokenizer_has_tokens_only(tokenizer: Tokenizer | None) -> None:
    completion = Completion(replace(prepared(), tokenizer=tokenizer))
    completion.take(WORD)
    completion.end("cancelled")
    result = completion.result(0, 0, {}, {})
    assert (result.text, result.ids, result.finish) == ("red" if tokenizer else "", (WORD,), "cancelled")
