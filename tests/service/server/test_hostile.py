"""Whatever comes over the wire: a status and OpenAI's shape, never a crash, never a path, never a server error."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.server.routes import ROUTES
from onedesk.service.vision.encode import uri_of_picture
from pictures import drawn
from serving import MODEL, Server

CHAT = "/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 2}


def refused(server: Server, status: int, body: Any, path: str = CHAT, **headers: str | None) -> dict[str, Any]:
    found, _, document = server.ask(
        "POST", path, body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert found == status, document
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert str(server.tree) not in json.dumps(document)
    return document["error"]


def raw(server: Server, data: bytes, *, half: bool = False) -> bytes:
    """What comes back for these bytes; `half`: the client hangs up without waiting."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        if half:
            return b""
        return connection.recv(65536)


def head(server: Server, *lines: str) -> bytes:
    own = (f"Host: 127.0.0.1:{server.port}", f"Authorization: Bearer {server.token}", "Content-Type: application/json")
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", *own, *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"null", "wrong_value"),
        (b"[]", "wrong_value"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"a": 1e999, "messages": Infinity}', "invalid_json"),
        (b'{"messages": "\xff\xfe"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_request"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + b"9" * 400 + b"}", "wrong_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e300}', "wrong_value"),
    ],
)
def test_a_body_that_is_wrong(server: Server, body: bytes, code: str) -> None:
    assert refused(server, 400, body)["code"] == code


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "text"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"model": 5}, "model"),
        ({"model": "x" * 10_000}, "model"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"chat_template_kwargs": {"enable_thinking": 5}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_value_is_named(server: Server, change: dict[str, Any], param: str) -> None:
    assert refused(server, 400, ASK | change)["param"] == param


def test_values_that_only_look_odd_are_taken(server: Server) -> None:
    odd = {
        "unknown": {"deep": [1]},
        "n": None,
        "max_tokens": 2.0,
        "stop": None,
        "user": "😀",
        "metadata": 5,
        "stream": False,
    }
    assert server.ask("POST", CHAT, ASK | odd)[0] == 200
    assert server.ask("POST", CHAT, ASK | {"stop": [f"stop {place}" for place in range(10_000)]})[0] == 200
    assert server.ask("POST", CHAT, ASK | {"logit_bias": {str(token): -1.5 for token in range(256)}})[0] == 200


def test_too_much_is_refused(server: Server) -> None:
    assert refused(server, 400, ASK | {"stop": ["x" * 150_000, "y" * 150_000]})["code"] == "invalid_request"
    assert refused(server, 400, ASK | {"logit_bias": {"999999999": 1}})["code"] == "invalid_request"
    assert refused(server, 413, ASK | {"user": "x" * 34_000_000})["code"] == "body_too_large"
    assert (
        refused(server, 400, ASK | {"messages": [{"role": "user", "content": "x" * 7_000_000}]})["code"]
        == "invalid_request"
    )


def test_images_are_never_fetched_or_sent_to_a_text_model(server: Server) -> None:
    for url, says in (
        ("http://127.0.0.1:1/cat.png", "never fetched"),
        ("file:///etc/passwd", "never fetched"),
        ("data:image/png;base64,iVBORw0K", "messages[0].content[1] is not a picture that can be decoded"),
        ("data:image/png;base64,====", "not valid base64"),
        ("data:text/html;base64,iVBORw0K", "is not a data: URL in base64"),
        ("data:image/png,iVBORw0K", "is not a data: URL in base64"),
        (uri_of_picture(drawn(8, 8)), "writer reads no pictures: model_type 'qwen3' has none; models that see are"),
        ("../../etc/passwd", "never fetched"),
    ):
        parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": url}}]
        error = refused(server, 400, ASK | {"messages": [{"role": "user", "content": parts}]})
        assert says in error["message"]
        assert "passwd" not in error["message"]


@pytest.mark.parametrize(
    "name", ["../thinker", "/etc/passwd", "models/../writer", ".", "", "writer\x00", "\ud800", "x" * 600]
)
def test_names_of_models_are_no_paths(server: Server, name: str) -> None:
    status, _, document = server.ask("POST", CHAT, ASK | {"model": name})
    assert status in (400, 404), document
    assert "passwd" not in document["error"]["message"] or name in document["error"]["message"]


def test_content_types_and_encodings(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        assert refused(server, 415, ASK, Content_Type=kind)["code"] == "wrong_content_type"
    assert refused(server, 415, b"\x1f\x8b", Content_Encoding="gzip")["code"] == "wrong_content_type"
    assert server.ask("POST", CHAT, ASK, headers={"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_routes_and_methods_that_do_not_exist(server: Server) -> None:
    for method, path, status in (
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
        ("GET", "/../etc/passwd", 404),
    ):
        found, _, document = server.ask(method, path)
        assert (found, "error" in document) == (status, True)


def test_requests_that_are_not_http(server: Server) -> None:
    for data in (
        b"\x00\xff\x16\x03\x01\n\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G" * 20_000 + b" / HTTP/1.1\r\n\r\n",
        head(server, f"X: {'y' * 20_000}"),
    ):
        assert b" 400 " in raw(server, data).split(b"\r\n")[0]
    assert b" 400 " in raw(server, head(server, "Content-Length: 5", "Content-Length: 6")).split(b"\r\n")[0]
    assert server.ask("GET", "/health")[0] == 200


def test_half_a_request_and_then_nothing(server: Server) -> None:
    body = json.dumps(ASK).encode()
    for data in (
        b"POST ",
        head(server)[:-2],
        head(server, f"Content-Length: {len(body)}") + body[:10],
        head(server, "Transfer-Encoding: chunked") + b"10\r\nabc",
    ):
        raw(server, data, half=True)
    broken = raw(server, head(server, "Transfer-Encoding: chunked") + b"zz\r\nabc\r\n0\r\n\r\n")
    assert b" 400 " in broken.split(b"\r\n")[0]
    assert server.ask("POST", CHAT, ASK)[0] == 200


def test_a_chunked_body_cannot_be_endless(server: Server) -> None:
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    assert b" 413 " in raw(server, head(server, "Transfer-Encoding: chunked") + chunk * 33).split(b"\r\n")[0]


@pytest.fixture(scope="session")
def described(server: Server) -> Any:
    """The service's own OpenAPI document, as schemathesis reads it."""
    status, _, document = server.ask("GET", "/openapi.json")
    assert status == 200
    assert len(document["paths"]) == len({route.path for route in ROUTES})
    return schemathesis.openapi.from_dict(document)


# Sleeping would let every later test wait; it has tests of its own.
OPERATIONS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/models/{name}"),
    *("/v1/memory/release", "/v1/memory/policy", "/v1/memory/leases", "/v1/memory/leases/{key}"),
)
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", OPERATIONS)
def test_no_generated_body_is_a_server_error(server: Server, described: Any, path: str, mode: Any) -> None:
    operation = described[path]["GET" if "{name}" in path else "POST"]
    statuses = operation.definition.raw["responses"]

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        if path.endswith("completions") and isinstance(case.body, dict):
            case.body = {"model": MODEL, "max_tokens": 2, **case.body}
        # 40 choices of a whole context take more than the client's 10 s on a busy machine.
        answer = case.call(
            base_url=f"http://127.0.0.1:{server.port}",
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=120,
        )
        # A lease of more than the machine has is refused with 503, as the document says.
        assert answer.status_code < 500 or answer.json()["error"]["code"] == "memory_full", answer.text
        assert str(answer.status_code) in statuses, answer.text
        if path.endswith("leases") and answer.status_code == 200:
            assert server.ask("DELETE", f"{path}/{answer.json()['id']}")[0] == 200

    run()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)
def test_any_value_in_any_field(server: Server, value: Any) -> None:
    for name in ("messages", "n", "stop", "logit_bias", "response_format", "tools", "seed", "top_p", "onedesk"):
        data = json.dumps({**ASK, name: value}).encode()
        status, _, document = server.ask("POST", CHAT, data)
        assert status in (200, 400), document
