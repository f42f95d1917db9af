"""Connections: bounded, short for who shows no token, and told nothing of their own lines when they are malformed."""

from __future__ import annotations

import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import Inside
from onedesk.service.server import connections
from onedesk.service.server.connections import Connection, raise_descriptor_limit
from onedesk.service.server.safe_log import SafeFormatter
from serving import Server, write_tree


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(write_tree(tmp_path_factory.mktemp("connections"), context=256)).start()
    yield made
    made.stop()


def answered(server: Server, data: bytes, *, half: bool = False) -> bytes:
    """All that comes back until the service closes; `half`: after the client has closed its side, so that nothing is
    waited for.
    """
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(data)
        if half:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while more := connection.recv(65536):
            received += more
        return received


JSON = "Content-Type: application/json\r\n"


def malformed(token: str) -> dict[str, bytes]:
    host, shown = "Host: 127.0.0.1\r\n", f"Authorization: Bearer {token}"
    texts = {
        "folded": f"GET /v1/models HTTP/1.1\r\n{host}Authorization: Bearer\r\n {token}\r\n\r\n",
        "NUL": f"GET /v1/models HTTP/1.1\r\n{host}{shown}\0\r\n\r\n",
        "escape": f"GET /v1/models HTTP/1.1\r\n{host}{shown}\x1b[2J\r\n\r\n",
        "bare LF": f"GET /v1/models HTTP/1.1\nHost: 127.0.0.1\n{shown}\n\n",
        "odd method": f"GE\x01T /v1/models HTTP/1.1\r\n{shown}\r\n\r\n",
        "in the path": f"GET /{token}\x1b HTTP/1.1\r\n{host}\r\n",
        "no colon": f"GET / HTTP/1.1\r\n{host}{token}\r\n\r\n",
        "version": f"GET / HTTP/{token}\r\n{host}\r\n",
        "long": f"GET / HTTP/1.1\r\n{host}X: {token * 400}\r\n\r\n",
        "chunk": (
            f"POST /v1/completions HTTP/1.1\r\n{host}{shown}\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n{token}\r\n"
        ),
    }
    return {name: text.encode("latin-1") for name, text in texts.items()}


@pytest.mark.parametrize("name", malformed(""))
def test_a_malformed_request_never_reveals_its_token(server: Server, name: str) -> None:
    before = server.log()
    told = answered(server, malformed(server.token)[name])
    assert told.split(b" ")[:2] == [b"HTTP/1.0", b"400"]
    assert server.token.encode() not in told
    assert set(json.loads(told.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
    assert server.ask("GET", "/health")[0] == 200
    assert server.log() == before  # a client's mistake is not worth a line, and two hundred of them fill no disk


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(st.binary(max_size=60), st.sampled_from([b"\r\n\r\n", b"\n\n", b""]), st.booleans())
def test_whatever_bytes_come_the_answer_is_whole_or_none(server: Server, data: bytes, end: bytes, headed: bool) -> None:
    before = server.log()
    told = answered(
        server, (b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer " if headed else b"") + data + end, half=True
    )
    if told:
        head, _, rest = told.partition(b"\r\n\r\n")
        assert set(json.loads(rest)["error"]) == {"message", "type", "param", "code"}
        assert head.split()[1] in (b"400", b"401", b"403", b"404", b"405")
    assert server.log() == before


def head(inside: Inside, token: str | None, path: str = "/v1/memory") -> bytes:
    shown = "" if token is None else f"Authorization: Bearer {token}\r\n"
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{inside.port}\r\n{shown}\r\n".encode()


def opened(inside: Inside, stack: ExitStack) -> socket.socket:
    return stack.enter_context(closing(socket.create_connection(("127.0.0.1", inside.port), timeout=30)))


def until(inside: Inside, count: int) -> None:
    """Wait until the service has so many connections."""
    end = time.monotonic() + 30
    while inside.on_loop(lambda: len(connections_of(inside))) != count:
        assert time.monotonic() < end
        time.sleep(0.01)


def connections_of(inside: Inside) -> list[Connection]:
    return [one for one in inside.runner.server.connections if isinstance(one, Connection)]  # type: ignore[union-attr]


def test_who_shows_no_token_has_seconds_and_who_shows_it_stays(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_SECONDS", 0.5)
    with ExitStack() as stack:
        silent, slow, health, wrong, known = (opened(inside, stack) for _ in range(5))
        slow.sendall(b"GET /v1/models HT")
        health.sendall(head(inside, None, "/health"))
        wrong.sendall(head(inside, "wrong"))
        known.sendall(head(inside, inside.token))
        for connection in (health, wrong):
            assert connection.recv(65536).startswith(b"HTTP/1.1 ")
        assert known.recv(65536).startswith(b"HTTP/1.1 200")
        for connection in (silent, slow, health, wrong):
            while connection.recv(65536):
                pass
        known.sendall(head(inside, inside.token))
        assert known.recv(65536).startswith(b"HTTP/1.1 200")
    until(inside, 0)


def test_connections_are_bounded_and_strangers_give_way(inside: Inside) -> None:
    limit = 4
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(inside.runner.server, "_limit", limit)
        known = []
        for count in range(1, limit):
            known.append(opened(inside, stack))
            known[-1].sendall(head(inside, inside.token))
            assert known[-1].recv(65536).startswith(b"HTTP/1.1 200")
            until(inside, count)
        stranger = opened(inside, stack)
        until(inside, limit)
        late = opened(inside, stack)
        late.sendall(head(inside, inside.token))
        assert late.recv(65536).startswith(b"HTTP/1.1 200")
        assert stranger.recv(65536) == b""
        refused = opened(inside, stack)
        told = b""
        while more := refused.recv(65536):
            told += more
        assert told.startswith(b"HTTP/1.1 503 ")
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for connection in known:
            connection.sendall(head(inside, inside.token))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    until(inside, 0)


def test_descriptors_are_raised_to_the_hard_limit() -> None:
    code = (
        "import resource\nfrom onedesk.service.server.connections import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 900))\n"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert told.split() == [str((900 - 128) // 2), "900", "900"]
    assert raise_descriptor_limit() <= connections.CONNECTIONS_LIMIT
    assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_log_lines_have_no_control_characters_and_no_secret(text: str, raised: bool) -> None:
    info: Any = (ValueError, ValueError(text), None) if raised else None
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s and the-secret", (text,), info)
    line = SafeFormatter(logging.Formatter("onedesk: %(message)s"), "the-secret").format(record)
    assert "the-secret" not in line
    assert not [
        sign
        for sign in line
        if (ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160 or sign in "\u202e\u2066\u2028"
    ]
    assert raised or "\n" not in line


@pytest.mark.parametrize("path", ["/v1/memory", "/nowhere", "/v1/messages"])
def test_an_expectation_that_is_not_known_is_answered_as_an_api_error(server: Server, path: str) -> None:
    line = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: secret-{server.token}\r\nConnection: close\r\n\r\n"
    answer = answered(server, line.encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 417 ")
    assert b"application/json" in head
    assert b"secret" not in answer
    error = json.loads(body)
    assert error["error"]["message"] == "the header Expect may only be 100-continue; leave it out"
    assert ("type" in error) == (path == "/v1/messages")


@pytest.mark.parametrize(("path", "shaped"), [("/v1/messages", True), ("/v1/chat/completions", False)])
def test_a_wrong_token_is_refused_in_the_shape_of_the_api(server: Server, path: str, shaped: bool) -> None:
    line = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer wrong\r\nContent-Length: 0\r\n"
    line += "Connection: close\r\n\r\n"
    body = json.loads(
        answered(
            server,
            line.encode(),
        ).partition(b"\r\n\r\n")[2]
    )
    assert body["error"]["type"] == "authentication_error"
    assert (body.get("type") == "error") == shaped
