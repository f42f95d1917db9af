"""/v1/responses and /v1/messages, judged by OpenAI's and Anthropic's own clients, over models whose text is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from script_models import write_script_model
from serving import Server, write_tree

CHAIN = ("I should look.", "</think>", "\n\nNow.\n", "<tool_call>", "\n<function=look>\n<parameter=what>\n", "a cat")
CALL = (*CHAIN, " on a mat", "\n</parameter>\n</function>\n", "</tool_call>")
WHAT = {
    "type": "object",
    "properties": {"what": {"type": "string", "maxLength": 16}},
    "required": ["what"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": WHAT}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": WHAT}
COLD = {"temperature": 0}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["17"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tree = write_tree(tmp_path_factory.mktemp("apis"), context=2048)
    write_script_model(tree / "models" / "caller", CALL)
    write_script_model(tree / "models" / "thinker", ("I think, and then nothing.",))
    write_script_model(tree / "models" / "talker", ("Hello", " there."), template="closed")
    made = Server(tree).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture
def claude(server: Server) -> Anthropic:
    return Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=server.token, max_retries=0, timeout=60.0)


def test_a_response(client: OpenAI) -> None:
    answer = client.responses.create(
        model="talker", input="hi", instructions="Be kind.", temperature=0, metadata={"a": "b"}
    )
    assert (answer.output_text, answer.status, answer.object) == ("Hello there.", "completed", "response")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be kind.", {"a": "b"}, 0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    short = client.responses.create(model="talker", input="hi", temperature=0, max_output_tokens=1)
    assert (short.output_text, short.status) == ("Hello", "incomplete")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_response_with_thoughts_and_a_call_and_its_result(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "caller", "tools": [FUNCTION], "temperature": 0}
    answer = client.responses.create(input="what is there?", **asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call: Any = answer.output[2]
    assert (call.name, json.loads(call.arguments)) == ("look", {"what": "a cat on a mat"})
    thought: Any = answer.output[0]
    assert thought.content[0].text == "I should look."
    turns: Any = [{"role": "user", "content": "what is there?"}, *answer.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "nothing"})
    second = client.responses.create(input=turns, **asked)
    assert second.usage is not None
    assert answer.usage is not None
    assert second.usage.input_tokens > answer.usage.input_tokens + 40


def test_a_streamed_response_is_the_same_in_events(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "caller", "input": "what is there?", "tools": [FUNCTION], "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"what": "a cat on a mat"}
    assert len(deltas) >= 3
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            continue
        final = stream.get_final_response()
    for one in (final, events[-1].response):
        assert [item.type for item in one.output] == [item.type for item in whole.output]
        assert one.output_text == whole.output_text
        assert one.output[2].arguments == whole.output[2].arguments
        assert one.usage.output_tokens == whole.usage.output_tokens


def test_a_response_bound_to_a_schema_and_a_forced_call(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
    answer = client.responses.create(model="thinker", input="hi", text=form, temperature=0, max_output_tokens=900)
    assert json.loads(answer.output_text) == {"answer": "17"}
    for choice in (
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]},
    ):
        asked: dict[str, Any] = {
            "tools": [FUNCTION, FUNCTION | {"name": "leap"}],
            "tool_choice": choice,
            "max_output_tokens": 900,
        }
        forced = client.responses.create(model="thinker", input="hi", parallel_tool_calls=False, **asked)
        calls = [item for item in forced.output if item.type == "function_call"]
        assert len(calls) == 1
        if choice != "required":
            assert calls[0].name == "look"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0]"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ],
)
def test_what_a_response_cannot_do_is_refused_by_its_name(client: OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as failed:
        client.responses.create(**{"model": "talker", "input": "hi", **options})
    assert failed.value.param == param


def test_a_message(claude: Anthropic) -> None:
    hello: Any = [{"role": "user", "content": "hi"}]
    answer = claude.messages.create(model="talker", max_tokens=50, extra_body=COLD, system="Be kind.", messages=hello)
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("Hello there.", "end_turn", None)
    short = claude.messages.create(model="talker", max_tokens=1, messages=hello, extra_body=COLD)
    assert (short.content[0].text, short.stop_reason, short.usage.output_tokens) == ("Hello", "max_tokens", 1)
    stops = ["never", "there"]
    stopped = claude.messages.create(
        model="talker", max_tokens=50, extra_body=COLD, stop_sequences=stops, messages=hello
    )
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Hello ", "stop_sequence", "there")
    count = claude.messages.count_tokens(model="talker", messages=hello).input_tokens
    assert count == short.usage.input_tokens + (short.usage.cache_read_input_tokens or 0)


def test_a_last_assistant_message_starts_the_answer(claude: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say: Hello"}]
    plain = claude.messages.count_tokens(model="talker", messages=turns[:1]).input_tokens
    assert claude.messages.count_tokens(model="talker", messages=turns).input_tokens < plain + len("I say: Hello")


def test_a_message_with_thoughts_and_a_call_and_its_result(claude: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "what is there?"}]
    asked: dict[str, Any] = {"model": "caller", "max_tokens": 100, "extra_body": COLD, "tools": [TOOL]}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 50}
    answer = claude.messages.create(messages=turns, **asked)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.stop_reason == "tool_use"
    call: Any = answer.content[2]
    assert (call.name, call.input) == ("look", {"what": "a cat on a mat"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "nothing"}]}
    said: Any = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    second = claude.messages.create(messages=[*turns, {"role": "assistant", "content": answer.content}, said], **asked)
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens + 40
    with claude.messages.stream(messages=turns, **asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == call.input
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", answer.usage.output_tokens)
    assert sum(event.type == "input_json" for event in events) >= 3


def test_without_thinking_the_template_closes_the_thoughts(claude: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "hi"}]
    off = claude.messages.count_tokens(model="caller", messages=turns).input_tokens
    on = claude.messages.count_tokens(
        model="caller", messages=turns, thinking={"type": "enabled", "budget_tokens": 1024}
    ).input_tokens
    assert off != on


def test_a_message_bound_to_a_schema_and_a_forced_call(claude: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "hi"}]
    form: Any = {"format": {"type": "json_schema", "schema": ANSWER}}
    answer = claude.messages.create(
        model="thinker", max_tokens=900, extra_body=COLD, messages=turns, output_config=form
    )
    assert json.loads(answer.content[-1].text) == {"answer": "17"}
    choice: Any = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    forced = claude.messages.create(
        model="thinker", max_tokens=900, extra_body=COLD, messages=turns, tools=[TOOL], tool_choice=choice
    )
    assert [block.name for block in forced.content if block.type == "tool_use"] == ["look"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]\.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]},
            r"content\[0\]\.type",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers is not supported"),
    ],
)
def test_what_a_message_cannot_do_is_refused_by_its_name(claude: Anthropic, options: Any, says: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says) as failed:
        claude.messages.create(
            **{"model": "talker", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **options}
        )
    assert failed.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_errors_of_messages_have_their_own_shape(server: Server) -> None:
    body = {"model": "nobody", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    status, _, document = server.ask("POST", "/v1/messages", body)
    assert (status, document["type"], document["error"]["type"]) == (404, "error", "not_found_error")
    shown = {"Authorization": None, "X-Api-Key": server.token}
    assert server.ask("POST", "/v1/messages", body | {"model": "talker"}, headers=shown)[0] == 200
    assert server.ask("POST", "/v1/messages", body, headers=shown | {"X-Api-Key": "wrong"})[0] == 401


def test_calls_of_a_chat_as_clients_of_openai_read_them(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {key: FUNCTION[key] for key in ("name", "description", "parameters")}}
    asked: dict[str, Any] = {
        "model": "caller",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "temperature": 0,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"what": "a cat on a mat"}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            continue
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == answer.message.tool_calls[0].function.arguments
    unclosed = client.chat.completions.create(**asked, stop=["</tool_call>"]).choices[0]
    assert unclosed.finish_reason == "tool_calls"
