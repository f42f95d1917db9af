"""Bodies: counted before they are parsed, parsed off the event loop, and nothing in them is multiplied before it is
checked.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import Inside
from onedesk.service.server import body as body_module
from onedesk.service.server import bounded_json
from onedesk.service.server.body import BODY_LIMIT, SMALL_BODY
from onedesk.service.server.bounded_json import ITEMS_LIMIT, LISTS_LIMIT, TEXTS_LIMIT, parse
from serving import MODEL, Server, write_tree

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a cat"}
ASK: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 2}


def filled(head: bytes, piece: bytes, tail: bytes) -> bytes:
    """As many pieces as a body may have bytes."""
    return head + piece * ((BODY_LIMIT - len(head) - len(tail) - 100) // len(piece)) + tail


HEAD = b'{"messages":[{"role":"user","content":"x"}],'
LARGE = {
    "messages": filled(b'{"messages":[', b'{"role":"user","content":"x"},', b'{"role":"user","content":"x"}]}'),
    "parts": filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text"},', b'{"type":"text"}]}]}'),
    "lists that no schema names": filled(HEAD + b'"junk":[', b"[],", b"[]]}"),
    "numbers that no schema names": filled(HEAD + b'"junk":[', b"1,", b"1]}"),
    "biases": HEAD + b'"logit_bias":{' + b",".join(b'"%d":1' % token for token in range(600_000)) + b"}}",
    "stop strings": filled(HEAD + b'"stop":[', b'"a",', b'"a"]}'),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_body_of_many_small_pieces_is_refused_unparsed(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    status, _, document = server.ask("POST", CHAT, LARGE[name])
    assert (status, document["error"]["code"]) == (400, "invalid_json")
    assert " at most " in document["error"]["message"]
    monkeypatch.setattr(bounded_json.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match=r"at most [0-9,]+ are read"):
        parse(LARGE[name])


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": [USER] * 10_001}, "messages", "10001"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
            "messages[0].content",
            "1025",
        ),
        ({"stop": ["a"] * 10_001}, "stop", "10001"),
        ({"logit_bias": {str(token): 1 for token in range(10_001)}}, "logit_bias", "10,001"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 257}, "tools", "257"),
        ({"n": 129}, "n", "128"),
    ],
)
def test_what_would_be_multiplied_is_bounded_with_figures(
    server: Server, change: dict[str, Any], param: str, says: str
) -> None:
    status, _, document = server.ask("POST", CHAT, ASK | change)
    assert (status, document["error"]["param"]) == (400, param)
    assert says in document["error"]["message"]


def test_prompts_times_choices_are_bounded(server: Server) -> None:
    for more in ({"n": 128}, {"best_of": 128}, {"n": 2}):
        status, _, document = server.ask(
            "POST", "/v1/completions", {"model": MODEL, "prompt": ["a"] * 127, "max_tokens": 1, **more}
        )
        assert (status, document["error"]["param"]) == (400, "n")
        assert f"{127 * next(iter(more.values())):,}" in document["error"]["message"]


def test_the_arguments_of_a_call_are_counted_too(server: Server) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":[' + "[]," * 100_000 + "[]]}"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
    status, _, document = server.ask("POST", CHAT, ASK | {"messages": messages})
    assert (status, document["error"]["code"]) == (400, "wrong_value")
    assert "at most 65,536 are read" in document["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[]{},: \n\u20ac', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,', max_size=4), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.booleans(), st.sampled_from([(0, 0, 0), (2, 3, 4), (LISTS_LIMIT, TEXTS_LIMIT, ITEMS_LIMIT)]))
def test_what_is_counted_is_what_is_there(document: Any, ascii_only: bool, limits: tuple[int, int, int]) -> None:
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    lists, texts, commas = counted(document)
    fits = lists <= limits[0] and texts <= limits[1] and commas <= limits[2]
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in zip(("LISTS_LIMIT", "TEXTS_LIMIT", "ITEMS_LIMIT"), limits, strict=True):
            patch.setattr(bounded_json, name, limit)
        if fits:
            assert parse(raw) == document
        else:
            with pytest.raises(ValueError, match="are read"):
                parse(raw)


def counted(document: Any) -> tuple[int, int, int]:
    """Lists and objects, texts, and commas between their items."""
    if isinstance(document, str):
        return 0, 1, 0
    if not isinstance(document, list | dict):
        return 0, 0, 0
    inner = [counted(item) for item in (document.values() if isinstance(document, dict) else document)]
    lists, texts, commas = (sum(column) for column in zip((0, 0, 0), *inner, strict=True))
    return lists + 1, texts + (len(document) if isinstance(document, dict) else 0), commas + max(0, len(document) - 1)


@pytest.mark.parametrize("depth", [129, 700, 960])
def test_a_deep_document_is_refused_with_the_limit(server: Server, depth: int) -> None:
    deep = '{"properties": ' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "a", "parameters": {deep}}}}}'
    data = json.dumps({**ASK, "tools": []})[:-2] + tool + "]}"
    status, _, document = server.ask("POST", CHAT, data.encode())
    assert (status, document["error"]["code"]) == (400, "invalid_json")
    assert "at most 128 levels" in document["error"]["message"]


def test_a_document_of_the_deepest_level_is_parsed() -> None:
    assert parse(b"[" * 128 + b"]" * 128)
    with pytest.raises(RecursionError, match="more than 128"):
        parse(b"[" * 129 + b"]" * 129)


def test_long_texts_and_long_lists_of_tokens_are_taken() -> None:
    text = "".join(random.Random(1).choices('[]{},:"\\ab', k=4 << 20))
    assert parse(json.dumps({"a": text}).encode()) == {"a": text}
    ids = list(range(1_000_000))
    assert parse(json.dumps(ids).encode()) == ids


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(write_tree(tmp_path_factory.mktemp("bodies"), context=256)).start()
    yield made
    made.stop()


def test_a_larger_body_is_parsed_and_checked_off_the_event_loop(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    real = body_module._checked

    def checked(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(body_module, "_checked", checked)
    own = inside.on_loop(lambda: threading.current_thread().name)
    for size in (10, SMALL_BODY + 1):
        assert inside.ask("POST", CHAT, ASK | {"user": "x" * size})[0] == 200
    assert threads[0] == own
    assert threads[1].startswith("onedesk-parse")
    assert inside.on_loop(lambda: inside.service.bodies) == {}


def test_large_bodies_of_all_requests_are_bounded_together(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODIES_LIMIT", 3 * SMALL_BODY)
    inside.on_loop(lambda: inside.service.bodies.update({-1: 2 * SMALL_BODY}))
    status, headers, document = inside.ask("POST", CHAT, ASK | {"user": "x" * (SMALL_BODY + 1)})
    assert (status, document["error"]["code"]) == (429, "too_many_requests")
    assert "Retry-After" in headers
    inside.on_loop(lambda: inside.service.bodies.pop(-1))
    assert inside.ask("POST", CHAT, ASK | {"user": "x" * (SMALL_BODY + 1)})[0] == 200
    assert inside.on_loop(lambda: inside.service.bodies) == {}
