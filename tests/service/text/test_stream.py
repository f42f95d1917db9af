from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.text.reasoning import split_reasoning
from onedesk.service.text.stream import Piece, TextStream
from onedesk.service.text.tokenizer import Tokenizer

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FAMILY = "👨‍👩‍👧‍👦"


def run(stream: TextStream, ids: list[int]) -> tuple[str, str]:
    """All pieces joined: (reasoning, text)."""
    pieces = [*(stream.push(token) for token in ids), stream.finish()]
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)


def one_character_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as tokens of one byte each: every border that there can be."""
    of = {tokenizer.token_bytes(token): token for token in range(256)}
    return [of[bytes([byte])] for byte in text.encode()]


def test_reasoning_and_answer_come_apart(tokenizer: Tokenizer) -> None:
    answer = (
        f"<think>\nThe user 想要 {FAMILY}.\n</think>\n\nHere is a cat on a red mat, soft light. 你好"
        f" {FAMILY}!<|im_end|>"
    )
    wanted = (f"The user 想要 {FAMILY}.", f"Here is a cat on a red mat, soft light. 你好 {FAMILY}!")
    for ids in (tokenizer.encode(answer), one_character_tokens(tokenizer, answer.removesuffix("<|im_end|>"))):
        stream = TextStream(tokenizer)
        assert run(stream, ids) == wanted == (stream.reasoning, stream.text)
        assert not stream.stopped


@pytest.mark.parametrize(
    "answer",
    ["First, a cat.\n\nThen a mat.", "Wait: a cat.\n\nNext, a mat.", "Okay, so: a cat\n", '"a cat"', "Prompt: a cat"],
)
def test_an_answer_that_looks_like_reasoning_is_unchanged(tokenizer: Tokenizer, answer: str) -> None:
    stream = TextStream(tokenizer)
    assert run(stream, tokenizer.encode(answer)) == ("", answer)


def test_a_prompt_that_opened_reasoning(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, in_reasoning=True)
    assert stream.in_reasoning
    assert run(stream, tokenizer.encode("because\n</think>\n\nYes.")) == ("because", "Yes.")
    assert not stream.in_reasoning


def test_reasoning_that_is_never_closed_is_no_answer(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["."], in_reasoning=True)
    assert run(stream, tokenizer.encode("I think. And think")) == ("I think. And think", "")
    assert stream.in_reasoning
    assert (stream.text, stream.stopped) == ("", False)


def test_text_before_an_unopened_tag_becomes_reasoning(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["OK!"])
    pieces = run(stream, tokenizer.encode("hm, the user wants O\n</think>\n\nHello there OK! more"))
    assert (stream.reasoning, stream.text, stream.stopped) == ("hm, the user wants O", "Hello there ", True)
    assert pieces == ("", "hm, the user wants O\nHello there ")


def test_control_tokens_never_show(tokenizer: Tokenizer) -> None:
    for token in tokenizer.control_ids:
        stream = TextStream(tokenizer, stop=["<|"])
        assert run(stream, [*tokenizer.encode("a"), token, *tokenizer.encode("b"), token]) == ("", "ab")
    stream = TextStream(tokenizer)
    assert run(stream, tokenizer.encode("<tool_call>\n{}\n</tool_call>")) == ("", "<tool_call>\n{}\n</tool_call>")


@pytest.mark.parametrize(
    ("stop", "answer", "text"),
    [
        ("END", "one two END three", "one two "),
        ("two EN", "one two END three", "one "),
        ("\n\n", "<think>\na\n\nb\n</think>\n\nfirst\n\nsecond", "first"),
        ("</answer>", "x</answer>y", "x"),
        ("好", "你好", "你"),
        (FAMILY, f"go {FAMILY} go", "go "),
        ("👩", f"go {FAMILY} go", "go 👨\u200d"),
        ("o", "<think>no</think>yes, ok", "yes, "),
        ("</think>", "<think>a</think>b", "b"),
    ],
)
def test_stop_strings_end_the_answer_across_tokens(tokenizer: Tokenizer, stop: str, answer: str, text: str) -> None:
    for ids in (tokenizer.encode(answer), one_character_tokens(tokenizer, answer)):
        stream = TextStream(tokenizer, stop=["never there", stop])
        assert run(stream, ids)[1] == text == stream.text
        assert stream.stopped == (stop != "</think>")


def test_after_a_stop_nothing_comes(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["stop"])
    for token in tokenizer.encode("a stop"):
        stream.push(token)
    assert (stream.stopped, stream.in_reasoning) == (True, False)
    assert stream.push(tokenizer.encode("b")[0]) == Piece() == stream.finish()
    assert stream.text == "a "


def test_a_stop_is_noticed_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = one_character_tokens(tokenizer, "a😀")
    stream = TextStream(tokenizer, stop=["😀"])
    assert [(stream.push(token).text, stream.stopped) for token in ids] == [
        ("a", False),
        *[("", False)] * 3,
        ("", True),
    ]


@RELAXED
@given(data=st.data())
def test_any_ids_give_what_the_whole_decode_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tags = [tokenizer.id_of("<think>"), tokenizer.id_of("</think>"), *tokenizer.encode("\n \n\n`<")]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(tags), st.integers(0, tokenizer.size - 1)), max_size=30))
    in_reasoning = data.draw(st.booleans())
    stream = TextStream(tokenizer, in_reasoning=in_reasoning)
    pieces = run(stream, ids)
    whole = split_reasoning(tokenizer.decode(ids), in_reasoning)
    assert (stream.reasoning, stream.text) == whole
    assert pieces == whole or pieces[1].endswith(whole[1])


@RELAXED
@given(
    text=st.text(alphabet="ab 你😀\u200d\n", max_size=40),
    stops=st.lists(st.text(alphabet="ab 你😀", min_size=1, max_size=4), max_size=3),
)
def test_any_text_with_stops_is_the_same_however_it_is_cut(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    totals = set()
    for ids in (tokenizer.encode(text), one_character_tokens(tokenizer, text)):
        stream = TextStream(tokenizer, stop=stops)
        assert run(stream, ids) == (stream.reasoning, stream.text)
        totals.add((stream.text, stream.stopped))
    assert len(totals) == 1
    (shown, stopped), *_ = totals
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
