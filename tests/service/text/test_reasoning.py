from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.text.reasoning import ReasoningSplitter, opens_reasoning, split_reasoning

# (whole answer, the prompt has opened reasoning, reasoning, text)
CASES = [
    ("", False, "", ""),
    ("", True, "", ""),
    ("Hello", False, "", "Hello"),
    ("\n\n  Hello\n", False, "", "\n\n  Hello\n"),
    ("  \n", False, "", "  \n"),
    ("<think>\nwhy\n</think>\n\nHello\n", False, "why", "Hello\n"),
    (" \n<think>why</think>Hello", False, "why", "Hello"),
    ("why\n</think>\n\nHello", True, "why", "Hello"),
    ("\nwhy not?\n\nso\n\n</think>\n\n\nHello", True, "why not?\n\nso", "Hello"),
    ("<think>\nwhy\n</think>\n\nHello", True, "why", "Hello"),
    ("\n<think>\n\n</think>\n\nHello", True, "", "Hello"),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("<think>never closed\n", False, "never closed\n", ""),
    ("never closed <think> at all </thin", True, "never closed <think> at all </thin", ""),
    ("<think>", False, "", ""),
    ("<thi", False, "", "<thi"),
    ("<thi", True, "<thi", ""),
    ("<thinking>aloud</thinking>", False, "", "<thinking>aloud</thinking>"),
    ("a </think", False, "", "a </think"),
    ("all of this was thought\n</think>\n\nHello", False, "all of this was thought", "Hello"),
    ("</think>\n\nHello", False, "", "Hello"),
    ("\n\n</think>Hello", False, "", "Hello"),
    ("why</think>Hello</think> again", False, "why", "Hello</think> again"),
    ("why</think>Hello</think> again", True, "why", "Hello</think> again"),
    ("<think>a</think>b<think>c</think>d", False, "a", "b<think>c</think>d"),
    ("<think>a</think>\n\n<think>b</think>c", False, "a\n\nb", "c"),
    ("<think></think><think>b</think>c", False, "b", "c"),
    ("a</think><think>b</think>c", False, "a\n\nb", "c"),
    ("\n</think><think>b</think>c", False, "b", "c"),
    ("Hi <think>a</think> there", False, "", "Hi <think>a</think> there"),
    ("Write `</think>` to end it.", False, "", "Write `</think>` to end it."),
    ('It says "</think>" there.', False, "", 'It says "</think>" there.'),
    ("It's '</think>", False, "It's '", ""),
    ("the tag `</think>` ends me</think>Hello", True, "the tag `</think>` ends me", "Hello"),
    ("so `x` is`</think>\nHello", True, "so `x` is`", "Hello"),
    ("<think>a</think>", False, "a", ""),
    ("<think>a</think>\n\n", False, "a", ""),
    ("<think>a</think>\n \nb", False, "a", " \nb"),
    ("First, I wait. Next, a red mat.", False, "", "First, I wait. Next, a red mat."),
    ("<think>想一想\n</think>\n\n你好", False, "想一想", "你好"),
    ("<THINK>a</THINK>", False, "", "<THINK>a</THINK>"),
    ("1 < 2 and </ 3", True, "1 < 2 and </ 3", ""),
]
WORDS = ["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "b", "`", '"', "好", "<think", "/think>"]


def in_pieces(pieces: list[str], in_reasoning: bool) -> tuple[str, str]:
    splitter, totals = ReasoningSplitter(in_reasoning), {"text": "", "reasoning": ""}
    for channel, part in [*(segment for piece in pieces for segment in splitter.push(piece)), *splitter.finish()]:
        if channel == "reclaim":
            totals = {"text": "", "reasoning": totals["text"].strip("\n")}
        else:
            assert part
            totals[channel] += part
    return totals["reasoning"], totals["text"]


@pytest.mark.parametrize(("answer", "in_reasoning", "reasoning", "text"), CASES)
def test_answers_are_split(answer: str, in_reasoning: bool, reasoning: str, text: str) -> None:
    assert split_reasoning(answer, in_reasoning) == (reasoning, text)
    assert in_pieces(list(answer), in_reasoning) == (reasoning, text)
    for cut in range(1, len(answer)):
        assert in_pieces([answer[:cut], answer[cut:]], in_reasoning) == (reasoning, text)


def bare(text: str) -> str:
    return re.sub(r"<think>|</think>|\s", "", text)


@settings(max_examples=600, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=14), in_reasoning=st.booleans(), data=st.data())
def test_nothing_is_lost_however_it_is_cut(words: list[str], in_reasoning: bool, data: st.DataObject) -> None:
    answer = "".join(words)
    reasoning, text = split_reasoning(answer, in_reasoning)
    assert bare(reasoning) + bare(text) == bare(answer)
    assert answer.endswith(text)
    pieces, rest = [], answer
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:length])
        rest = rest[length:]
    assert in_pieces(pieces, in_reasoning) == (reasoning, text)


def test_only_what_may_be_a_tag_is_held_back() -> None:
    splitter = ReasoningSplitter(in_reasoning=True)
    shown = [
        [piece for _, piece in splitter.push(part)]
        for part in ("so it is", " < 3", " <", "/th", "ink", "s>\n", "\n", "x")
    ]
    assert shown == [["so it is"], [" < 3"], [" "], [], [], ["</thinks>"], [], ["\n\nx"]]
    answer = ReasoningSplitter()
    assert [piece for part in (" ", "a\n", "\n", "b <") for _, piece in answer.push(part)] == [" a\n", "\n", "b "]


def test_in_reasoning_follows_the_tags() -> None:
    splitter, seen = ReasoningSplitter(), []
    for part in ("\n", "<think>", "\n", "why", "</think>", "\n\n", "Hello", "</think>"):
        splitter.push(part)
        seen.append(splitter.in_reasoning)
    assert seen == [False, True, True, True, False, False, False, False]
    assert ReasoningSplitter(in_reasoning=True).in_reasoning


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_may_open_reasoning(prompt: str, opened: bool) -> None:
    assert opens_reasoning(prompt) is opened
