"""OpenAI's own client is the judge: what it sends is understood, what comes back is what it expects."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from typing import Any

import openai
import pytest
from openai import OpenAI
from serving import MODEL, THINKER, Server

ASK: list[Any] = [{"role": "user", "content": "a red cat"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PICTURE = {
    "type": "object",
    "properties": {"what": {"type": "string", "maxLength": 8}},
    "required": ["what"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "draw", "parameters": PICTURE}}


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 8, "seed": 3, **options})


def test_models(client: OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {MODEL, THINKER} <= set(listed)
    assert client.models.retrieve(MODEL).owned_by == "onedesk"
    assert listed[MODEL].onedesk["context"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/nothing")


def test_an_answer(client: OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason, len(choice.message.content)) == ("assistant", "length", 8)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.onedesk["finish"] == "length"
    assert {"prefill", "decode"} <= set(answer.onedesk["stages"])


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI) -> None:
    whole = chat(client, max_tokens=20).choices[0].message.content
    chunks = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1
    without = list(chat(client, stream=True))
    assert all(chunk.usage is None for chunk in without)


def test_choices_have_seeds_that_count_on(client: OpenAI) -> None:
    answer = chat(client, n=3, temperature=1.5)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == [chat(client, temperature=1.5, seed=3 + place).choices[0].message.content for place in range(3)]
    assert answer.usage.completion_tokens == 24
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat(client, n=3, temperature=1.5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_stop_is_cut_from_the_text(client: OpenAI) -> None:
    text = chat(client, max_tokens=30).choices[0].message.content
    stopped = chat(client, max_tokens=30, stop=text[12:15])
    assert stopped.choices[0].message.content == text[: text.index(text[12:15])]
    assert (stopped.choices[0].finish_reason, stopped.onedesk["finish"]) == ("stop", "stop_string")
    assert (
        chat(client, max_tokens=30, stop=["never here", text[5:8]]).choices[0].message.content
        == text[: text.index(text[5:8])]
    )


def test_log_probabilities(client: OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(
        len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content
    )
    assert content[0].bytes == list(content[0].token.encode())
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, temperature=0, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert chat(client).choices[0].logprobs is None


def test_logit_bias(client: OpenAI) -> None:
    # Byte-level vocabulary, sorted: "!" is the first printable one.
    assert chat(client, logit_bias={"0": 100}).choices[0].message.content == "!" * 8


def test_json(client: OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=shape, max_tokens=600, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        document = json.loads(answer.choices[0].message.content)
        assert set(document) == {"name", "age"}
        assert document["age"] in (1, 2, 3)
    begun = chat(client, response_format={"type": "json_object"}, max_tokens=20).choices[0].message.content
    assert begun.startswith("{")
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        chat(
            client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strang"}}}
        )


def test_reasoning_is_kept_apart(client: OpenAI) -> None:
    thinking = {
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_budget": 5,
        "onedesk": {"answer_tokens": 6},
    }
    options = {"model": THINKER, "max_tokens": None, "extra_body": thinking}
    answer = chat(client, **options)
    message = answer.choices[0].message
    assert len(message.content) == 6
    assert message.reasoning_content == message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 5
    chunks = list(chat(client, stream=True, **options))
    assert (
        "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
        == message.reasoning_content
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_all_that_is_generated_is_bounded_thoughts_included(client: OpenAI, name: str) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for most in (1, 7, 30):
        answer = chat(client, **{"model": THINKER, "max_tokens": None, "extra_body": thinking, name: most})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", most)
        # Nothing closes the thoughts: as in other servers they may take all of it.
        assert answer.usage.completion_tokens_details.reasoning_tokens == most
    bounded = chat(
        client, **{"model": THINKER, "max_tokens": None, "extra_body": thinking | {"thinking_budget": 5}, name: 60}
    )
    assert bounded.usage.completion_tokens == 60
    assert 5 <= bounded.usage.completion_tokens_details.reasoning_tokens < 60
    assert bounded.choices[0].message.content


def test_an_answer_may_have_a_budget_of_its_own(client: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 20}
    answer = chat(client, model=THINKER, max_tokens=None, extra_body=thinking | {"onedesk": {"answer_tokens": 6}})
    details = answer.usage.completion_tokens_details
    assert (answer.usage.completion_tokens - details.reasoning_tokens, details.reasoning_tokens >= 20) == (6, True)
    both = chat(client, model=THINKER, max_tokens=10, extra_body=thinking | {"onedesk": {"answer_tokens": 6}})
    assert both.usage.completion_tokens == 10


def test_only_reasoning_is_an_answer_without_content(client: OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 100_000}
    message = (
        chat(client, model=THINKER, messages=[{"role": "user", "content": "x" * 400}], extra_body=extra)
        .choices[0]
        .message
    )
    assert message.content == ""
    assert message.reasoning_content


def test_tools_and_their_answers_reach_the_template(client: OpenAI) -> None:
    plain = chat(client, model=THINKER).usage.prompt_tokens
    assert chat(client, model=THINKER, tools=[TOOL]).usage.prompt_tokens > plain + 60
    assert chat(client, model=THINKER, tools=[TOOL], tool_choice="none").usage.prompt_tokens == plain
    assert (
        chat(client, model=THINKER, extra_body={"chat_template_kwargs": {"mood": "12345"}}).usage.prompt_tokens
        == plain + 5
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "draw", "arguments": '{"what": "cat"}'}}
    turns: list[Any] = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]
    assert chat(client, model=THINKER, messages=turns).usage.prompt_tokens > plain + 40


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "draw"}}])
def test_a_call_can_be_forced(client: OpenAI, choice: Any) -> None:
    options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400, "temperature": 1.5, "top_p": 1.0}
    answer = chat(client, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert [call.function.name for call in answer.message.tool_calls] == ["draw"]
    assert set(json.loads(answer.message.tool_calls[0].function.arguments)) == {"what"}
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **options)]
    streamed = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
    assert json.loads("".join(streamed)) == json.loads(answer.message.tool_calls[0].function.arguments)
    assert len(streamed) > 3  # they come while they are written


def test_a_call_that_cannot_be_forced(client: OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "paint"}}
    for options in ({"tool_choice": other, "tools": [TOOL]}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="names no tool"):
            chat(client, **options)


def test_a_format_binds_what_is_no_call(client: OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    forced = chat(client, tools=[TOOL], tool_choice="required", response_format=shape, max_tokens=400).choices[0]
    assert [call.function.name for call in forced.message.tool_calls] == ["draw"]
    for seed in range(3):
        free = chat(
            client, tools=[TOOL], response_format=shape, max_tokens=400, seed=seed, parallel_tool_calls=False
        ).choices[0]
        if free.message.tool_calls:
            assert (len(free.message.tool_calls), free.message.tool_calls[0].function.name) == (1, "draw")
        else:
            assert set(json.loads(free.message.content)) == {"name", "age"}


def test_content_in_parts_and_the_developer_role(client: OpenAI) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a red "}, {"type": "text", "text": "cat"}]}
    ]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content
    developer: list[Any] = [{"role": "developer", "content": "be brief"}, *ASK]
    system: list[Any] = [{"role": "system", "content": "be brief"}, *ASK]
    assert (
        chat(client, messages=developer).choices[0].message.content
        == chat(client, messages=system).choices[0].message.content
    )


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a cat", max_tokens=6, seed=1, logprobs=2)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    several = client.completions.create(model=MODEL, prompt=["a cat", "a dog"], n=2, max_tokens=6, seed=1, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == "a cat" + choice.text
    assert several.choices[2].text.startswith("a dog")
    assert several.usage is not None
    assert several.usage.completion_tokens == 24
    ids = client.completions.create(model=MODEL, prompt=[64, 65, 66], max_tokens=4, seed=1)
    streamed = list(client.completions.create(model=MODEL, prompt=[[64, 65, 66]], max_tokens=4, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == ids.choices[0].text
    best = client.completions.create(model=MODEL, prompt="a cat", max_tokens=4, seed=1, best_of=3, n=2, temperature=1.5)
    assert len(best.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_shown_with_its_own_log_probabilities(client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["a cat", "on a mat"],
        "max_tokens": 3,
        "seed": 1,
        "echo": True,
        "logprobs": 2,
        "n": 2,
    }
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        parts = [[chunk for chunk in chunks if chunk.index == index] for index in range(4)]
    else:
        parts = [[choice] for choice in client.completions.create(**asked).choices]
    for prompt, choice in zip(("a cat", "a cat", "on a mat", "on a mat"), parts, strict=True):
        text = "".join(part.text for part in choice)
        shown = [part.logprobs for part in choice if part.logprobs is not None]
        tokens = [token for part in shown for token in part.tokens or []]
        values = [value for part in shown for value in part.token_logprobs or []]
        tops = [top for part in shown for top in part.top_logprobs or []]
        assert text.startswith(prompt)
        assert "".join(tokens) == text
        assert [offset for part in shown for offset in part.text_offset or []] == list(range(len(text)))
        assert values[0] is None
        assert tops[0] is None
        assert [value for value in values[1:] if value is None or value > 0] == []
        assert all(
            len(top) == 2 and max(top.values()) >= value for top, value in zip(tops[1:], values[1:], strict=True)
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_comes_back_scored_and_nothing_is_written(server: Server, stream: bool) -> None:
    written = server.figure("onedesk_finishes_total")
    asked = {"model": MODEL, "prompt": ["a cat", "on a mat"], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    client = server.client()
    if stream:
        came = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        choices, usage = [choice for chunk in came for choice in chunk.choices], came[-1].usage
        ends = [choice for choice in choices if choice.finish_reason]
        choices = [choice for choice in choices if not choice.finish_reason]
    else:
        whole = client.completions.create(**asked)
        choices, ends, usage = whole.choices, whole.choices, whole.usage
    assert [(choice.index, choice.text) for choice in choices] == [
        (0, "a cat"),
        (1, "a cat"),
        (2, "on a mat"),
        (3, "on a mat"),
    ]
    assert [choice.finish_reason for choice in ends] == ["length"] * 4
    for choice in choices:
        assert (choice.logprobs.token_logprobs[0], "".join(choice.logprobs.tokens)) == (None, choice.text)
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, len("a cat") + len("on a mat"))
    assert server.figure("onedesk_finishes_total") == written
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 0; use a whole number from 1, or echo: true"):
        client.completions.create(model=MODEL, prompt="a cat", max_tokens=0)


def test_a_prompt_scores_the_same_as_an_answer(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a cat", max_tokens=6, seed=1, logprobs=2).choices[0]
    echoed = client.completions.create(
        model=MODEL, prompt="a cat" + answer.text, max_tokens=1, echo=True, logprobs=2
    ).choices[0]
    assert answer.logprobs is not None
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[5:11] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-4)
    assert [set(top) for top in (echoed.logprobs.top_logprobs or [])[5:11]] == [
        set(top) for top in answer.logprobs.top_logprobs or []
    ]


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a cat", "a dog"])
    first, same, other = (entry.embedding for entry in answer.data)
    assert first == same != other
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
    plain = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float").data[0].embedding
    assert plain == pytest.approx(first, abs=1e-6)
    cut = client.embeddings.create(model=MODEL, input="a cat", dimensions=8, encoding_format="float").data[0].embedding
    assert len(cut) == 8
    assert sum(value * value for value in cut) == pytest.approx(1)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="a cat", dimensions=100_000)


def test_without_max_tokens_the_context_is_the_limit(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 470}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    with pytest.raises(openai.BadRequestError, match="no room for an answer"):
        chat(client, messages=[{"role": "user", "content": "x" * 600}])


@pytest.mark.parametrize(
    ("options", "kind", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 0}, openai.BadRequestError, "wrong_value"),
        ({"top_p": 0}, openai.BadRequestError, "invalid_request"),
        ({"messages": []}, openai.BadRequestError, "wrong_value"),
        ({"messages": [{"role": "user", "content": ""}]}, openai.BadRequestError, "invalid_request"),
        ({"extra_body": {"thinking_budget": -1}}, openai.BadRequestError, "wrong_value"),
    ],
)
def test_errors_are_those_of_the_api(
    client: OpenAI, options: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as failed:
        chat(client, **options)
    assert failed.value.code == code
    assert failed.value.type == "invalid_request_error"


def test_sixty_four_streams_at_once_are_not_mixed_up(server: Server) -> None:
    """56 of mixed lengths are read to their ends, 8 clients vanish: half of them while they wait, half while they
    are written.
    """
    client = server.client()
    asked = [{"seed": seed, "max_tokens": 10 + 4 * seed, "temperature": 1.0} for seed in range(8)]
    alone = [chat(client, **options).choices[0].message.content for options in asked]
    texts = [""] * 56

    def run(place: int) -> None:
        for chunk in chat(client, **asked[place % 8], stream=True):
            texts[place] += chunk.choices[0].delta.content or ""

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(texts))]
    assert server.ask("POST", "/v1/memory/sleep", {"wake": "manual"})[0] == 200  # nobody is let in before all are there
    for thread in threads:
        thread.start()
    server.until("onedesk_waiting", 56)
    vanishing = [
        server.open_stream({"model": MODEL, "max_tokens": 400, "temperature": 2.0, "top_p": 1.0, "top_k": 0})
        for _ in range(8)
    ]
    server.until("onedesk_waiting", 64)
    for connection in vanishing[:4]:
        connection.close()
    server.until("onedesk_waiting", 60)
    assert server.ask("POST", "/v1/memory/wake", {})[0] == 200
    for connection in vanishing[4:]:
        received = b""
        while b"data: " not in received:
            received += connection.recv(4096)
        connection.close()
    for thread in threads:
        thread.join(60)
    assert texts == [alone[place % 8] for place in range(len(texts))]
    server.until("onedesk_working", 0)
    server.until("onedesk_waiting", 0)


def test_the_first_event_of_a_stream_comes_with_its_headers(server: Server) -> None:
    """Apart they wake the client twice before its first token."""
    with closing(server.open_stream({"model": MODEL, "max_tokens": 2})) as connection:
        first = connection.recv(65536)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"role":"assistant"' in first


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_unknown_onedesk_field_is_refused_with_the_list(server: Server, path: str) -> None:
    """OpenAI's fields are many and grow; ours are read by nobody else, so one that is not known was meant to be
    another.
    """
    body = {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for name, shown in (("contxt", "contxt"), ("x" * 500, "x" * 40 + "...")):
        status, _, document = server.ask("POST", path, body | {"onedesk": {"quant": "none", name: 512}})
        assert (status, document["error"]["param"], document["error"]["code"]) == (
            400,
            f"onedesk.{shown}",
            "unknown_field",
        )
        words = (
            f"onedesk.{shown} is not known; known fields: context, quant, policy, ttl, answer_tokens, repetition_stop,"
            " detail"
        )
        assert document["error"]["message"] == words
    described = server.ask("GET", "/openapi.json")[2]["paths"][path]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert described["properties"]["onedesk"]["additionalProperties"] is False
    assert server.ask("POST", path, body | {"onedesk": {"quant": "none"}, "contxt": 512})[0] == 200
