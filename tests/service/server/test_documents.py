"""From events to OpenAI's documents, by the types of OpenAI's own package; and what a body becomes for the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.core import (
    Event,
    Finish,
    Logprobs,
    Message,
    Progress,
    Result,
    Usage,
)
from onedesk.service.server.check import check
from onedesk.service.server.error_documents import ApiError, as_api_error, to_json
from onedesk.service.server.frames import Frames
from onedesk.service.server.requests import chat_ask, completion_ask
from onedesk.service.server.responses import ChatWriter, CompletionWriter, Echo, added, usage
from onedesk.service.server.schemas import CHAT
from onedesk.service.server.sse import as_events
from onedesk.service.server.statistics import BOUNDS, Figures, Histogram, Times
from onedesk.service.text.tokenizer import Tokenizer
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tiny_qwen3 import tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object"}}}
CALLS = (
    'I draw.\n<tool_call>\n{"name": "draw", "arguments": {"what": "cat"}}\n</tool_call>\n'
    "<tool_call>\n<function=draw>\n</function>\n</tool_call>"
)


def result(text: str = "", *, finish: Finish = "stop", reasoning: str = "", completion: int = 3) -> Result:
    return Result(text, reasoning, (), finish, 7, Usage(5, completion, 1), {"total": 0.5}, {})


def chat(text: str, *, stream: bool, step: int = 7, finish: Finish = "stop", **options: Any) -> Any:
    """The document, or the chunks, of a text that comes `step` characters at a time."""
    writer = ChatWriter("m", None, stream=stream, with_logprobs=False, tools=options.get("tools", ()))
    events = [Event(text[at : at + step], token=1) for at in range(0, len(text), step)] + [
        Event(result=result(text, finish=finish))
    ]
    if stream:
        return [
            ChatCompletionChunk.model_validate(chunk, strict=True)
            for event in events
            for chunk in writer.chunks([(0, event)])
        ]
    for event in events:
        writer.collect(0, event)
    return ChatCompletion.model_validate(writer.whole(usage([result(text)])), strict=True)


def test_tool_calls_whole() -> None:
    choice = chat(CALLS, stream=False, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I draw.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
        ("draw", {"what": "cat"}),
        ("draw", {}),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    only = chat(CALLS[8:], stream=False, tools=[TOOL]).choices[0].message
    assert only.content is None
    assert chat(CALLS, stream=False).choices[0].message.content == CALLS
    assert chat(CALLS, stream=False, tools=[TOOL], finish="length").choices[0].finish_reason == "length"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_tool_calls_in_a_stream(step: int) -> None:
    chunks = chat(CALLS, stream=True, step=step, tools=[TOOL])
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I draw."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "draw"), (1, "draw")]
    arguments = ["".join(call.function.arguments for call in calls if call.index == index) for index in (0, 1)]
    assert list(map(json.loads, arguments)) == [{"what": "cat"}, {}]
    if step == 1:
        assert len(calls) > 10  # arguments come while they are written
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_events_that_come_together_are_one_chunk() -> None:
    writer = ChatWriter("m", None, stream=True, with_logprobs=False, tools=())
    chunks = writer.chunks([(0, Event("a")), (0, Event("b")), (1, Event("c")), (0, Event(reasoning="d"))])
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks] == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"content": "ab"}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "c"}),
        (0, {"reasoning_content": "d", "reasoning": "d"}),
    ]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_call_in_unclosed_reasoning_is_a_call(step: int, stream: bool) -> None:
    thoughts = f"I should draw.\n{CALLS[8:]}"
    for text, expected in (("", 2), ("no, I only talk", 0)):
        writer = ChatWriter("m", None, stream=stream, with_logprobs=False, tools=[TOOL])
        events = [Event(reasoning=thoughts[at : at + step], token=1) for at in range(0, len(thoughts), step)]
        events += [Event(text, token=1)] * bool(text) + [Event(result=result(text, reasoning=thoughts))]
        if stream:
            parts = [chunk["choices"][0] for event in events for chunk in writer.chunks([(0, event)])]
            messages = [part["delta"] for part in parts]
        else:
            for event in events:
                writer.collect(0, event)
            parts = writer.whole(usage([result()]))["choices"]
            messages = [parts[0]["message"]]
        calls = [call for message in messages for call in message.get("tool_calls", []) if "id" in call]
        assert [call["function"]["name"] for call in calls] == ["draw"] * expected
        assert parts[-1]["finish_reason"] == ("tool_calls" if expected else "stop")
        assert "".join(message.get("reasoning", "") for message in messages).strip() == (
            "I should draw." if expected else thoughts
        )
        assert all(message.get("reasoning") == message.get("reasoning_content") for message in messages)
        assert "".join(message.get("content") or "" for message in messages) == text


@pytest.mark.parametrize("stream", [False, True])
def test_at_most_one_call_where_more_are_not_wanted(stream: bool) -> None:
    writer = ChatWriter("m", None, stream=stream, with_logprobs=False, tools=[TOOL])
    writer.one_call = True
    events = [Event(CALLS + " and so on", token=1), Event(result=result(CALLS + " and so on"))]
    if stream:
        messages = [chunk["choices"][0]["delta"] for event in events for chunk in writer.chunks([(0, event)])]
    else:
        for event in events:
            writer.collect(0, event)
        messages = [writer.whole(usage([result()]))["choices"][0]["message"]]
    assert "".join(message.get("content") or "" for message in messages) == "I draw."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert {call["index"] for call in calls if stream} <= {0}
    assert sum("id" in call for call in calls) == 1


def test_tools_with_a_format_and_calls_one_at_a_time() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "c"}],
        "tools": [TOOL],
        "parallel_tool_calls": False,
    }
    check(body, CHAT)
    ask = chat_ask(body, 100)
    assert (ask.one_call, ask.requests[0].stop, ask.requests[0].calls) == (True, ("</tool_call>",), 0)
    ask = chat_ask(body | {"response_format": {"type": "json_object"}}, 100)
    assert (ask.requests[0].stop, ask.requests[0].calls, ask.requests[0].json_schema) == ((), 1, '{"type":"object"}')
    ask = chat_ask(body | {"response_format": {"type": "json_object"}, "parallel_tool_calls": True}, 100)
    assert (ask.one_call, ask.requests[0].calls > 1) == (False, True)
    ask = chat_ask(body | {"response_format": {"type": "json_object"}, "tool_choice": "required"}, 100)
    assert "draw" in (ask.requests[0].json_schema or "")


def test_how_the_prompt_ends_and_thoughts_under_either_name() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": "c", "reasoning": "r"}],
        "continue_final_message": True,
    }
    check(body, CHAT)
    request = chat_ask(body, 100).requests[0]
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert request.messages[0].reasoning == "r"
    assert (
        chat_ask(body | {"continue_final_message": False, "add_generation_prompt": False}, 9)
        .requests[0]
        .add_generation_prompt
        is False
    )
    with pytest.raises(ApiError, match="exclude each other"):
        chat_ask(body | {"add_generation_prompt": True}, 100)
    assert completion_ask({"prompt": "a"}, 9).requests[0].parse_special
    assert not completion_ask({"prompt": "a", "parse_special": False}, 9).requests[0].parse_special


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        ("stop", "stop"),
        ("stop_string", "stop"),
        ("length", "length"),
        ("repetition", "length"),
        ("cancelled", "length"),
    ],
)
def test_every_end_is_one_that_clients_know(finish: Finish, told: str) -> None:
    document = chat("a", stream=False, finish=finish)
    assert document.choices[0].finish_reason == told
    assert document.onedesk["finish"] == finish
    assert chat("a", stream=True, finish=finish)[-1].choices[0].finish_reason == told


def test_half_a_character_is_told_as_bytes() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    ids = tokenizer.encode("猫")
    writer = ChatWriter("m", tokenizer, stream=False, with_logprobs=True, tools=())
    for token in ids:
        writer.collect(0, Event(token=token, logprobs=Logprobs(-0.5, ((token, -0.5), (1, float("-inf"))))))
    writer.collect(0, Event(result=result("猫")))
    document = json.loads(to_json(writer.whole(usage([result()]))))
    content = document["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "猫"
    assert content[0]["top_logprobs"][1]["logprob"] is None


def test_texts_that_go_on() -> None:
    writer = CompletionWriter("m", None, with_logprobs=False, echoes={0: Echo("once "), 1: Echo("once ")})
    for index in (1, 0):
        writer.collect(index, Event("upon", token=1))
        writer.collect(index, Event(result=result("upon")))
    document = Completion.model_validate(writer.whole(usage([result("upon"), result("upon")])), strict=True)
    assert [(choice.index, choice.text) for choice in document.choices] == [(0, "once upon"), (1, "once upon")]
    streamed = CompletionWriter("m", None, with_logprobs=False, echoes={0: Echo("once ")})
    chunks = streamed.chunks([(0, Event("up")), (0, Event("on")), (0, Event(result=result("upon")))])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "once upon"


def test_usage_of_several_prompts_adds_up() -> None:
    total = added([usage([result(), result(completion=4)]), usage([result()])])
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (10, 10, 20)
    assert total["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_body_becomes_a_request() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
        "max_completion_tokens": 9.0,
        "n": 2,
        "stop": "x",
        "logit_bias": {"5": -1},
        "logprobs": True,
        "top_logprobs": 3,
        "reasoning_effort": "none",
        "chat_template_kwargs": {"mood": "dark"},
        "response_format": {"type": "json_object"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
    }
    check(body, CHAT)
    ask = chat_ask(body, 100)
    request = ask.requests[0].validated()
    assert request.messages == (Message("system", "ab"), Message("user", "c"))
    assert (request.max_tokens, request.n, request.stop, request.logprobs, request.thinking) == (9, 2, ("x",), 3, "off")
    assert request.template_options == {"mood": "dark", "reasoning_effort": "none"}
    assert request.json_schema == '{"type":"object"}'
    assert (ask.stream, ask.include_usage, ask.tools) == (True, True, (TOOL,))
    assert chat_ask({"messages": [{"role": "user", "content": "c"}]}, 100).requests[0].max_tokens == 100


def test_prompts_of_every_form() -> None:
    for value, texts, ids in (
        ("a", ["a"], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [(1, 2)]),
        ([[1], [2.0, 3]], [], [(1,), (2, 3)]),
    ):
        requests = completion_ask({"prompt": value}, 10).requests
        assert [request.prompt for request in requests if request.prompt] == texts
        assert [request.ids for request in requests if request.ids] == ids


def test_what_is_not_ours_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    error = as_api_error(ValueError("a secret of /somebody"))
    assert error.status == 500
    assert "secret" not in str(error.document())
    assert "secret" in caplog.text
    assert as_api_error(ApiError(404, "x", code="y")).status == 404


def test_figures() -> None:
    histogram = Histogram()
    for value in (0.0005, 0.001, 5.0, 10_000.0):
        histogram.observe(value)
    cumulative = dict(histogram.cumulative())
    assert (cumulative["0.001"], cumulative["5"], cumulative["+Inf"], len(cumulative)) == (2, 3, 4, len(BOUNDS))
    figures = Figures()
    assert figures.wait_seconds("m", 3, 1) == 3
    for _ in range(30):
        figures.finished("m", Times(0.0, 1.0, 1.5, 11.0))
    assert figures.wait_seconds("m", 4, 2) == 20
    assert figures.wait_seconds("m", 10_000, 1) == 600


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", 'say "\\"', "猫\n", "\ud83d"]), st.booleans(), st.integers(0, 1)),
        max_size=12,
    ),
    st.booleans(),
)
def test_what_is_sent_at_once_is_what_documents_would_say(pieces: list[tuple[str, bool, int]], detail: bool) -> None:
    """Pieces of two choices, thoughts or text or neither, each with its token."""
    for writer in (
        ChatWriter("m", None, stream=True, with_logprobs=False, tools=()),
        CompletionWriter("m", None, with_logprobs=False, echoes={}),
    ):
        writer.detail = detail
        frames = Frames(writer)
        assert frames.of(0, Event("a", token=1)) is None  # its role has not been told
        writer.chunks([(0, Event("a")), (1, Event("b"))])
        for at, (text, thought, index) in enumerate(pieces):
            event = Event("" if thought else text, text if thought else "", token=at)
            assert frames.of(index, event) == as_events(writer.chunks([(index, event)]))


def test_what_does_more_than_add_a_piece_is_not_sent_at_once() -> None:
    writer = ChatWriter("m", None, stream=True, with_logprobs=False, tools=(TOOL,))
    writer.chunks([(0, Event("a"))])
    assert Frames(writer).of(0, Event("b", token=1)) is None  # it may be a call's beginning
    writer = ChatWriter("m", None, stream=True, with_logprobs=True, tools=())
    writer.chunks([(0, Event("a"))])
    for event in (
        Event(result=result()),
        Event("b", token=1, logprobs=Logprobs(-0.5)),
        Event(progress=Progress("prefill", 1, 2)),
        Event("b", "c", 1),
    ):
        assert Frames(writer).of(0, event) is None
