"""How a service ends: when it is asked to, and when it is killed. Nothing is left behind, and the next one starts."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from onedesk.service.core import Message, ModelSpec, Request
from onedesk.service.peers.remote import RemoteModel
from onedesk.service.peers.service import LocalService
from serving import MODEL, Server, alive, write_tree

LONG: Any = {"model": MODEL, "max_tokens": 4000, "temperature": 2.0, "top_p": 1.0, "top_k": 0, "seed": 1}
SHORT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two services that start beside each other: one on a port, one on a unix socket without a token."""
    base = tmp_path_factory.mktemp("end")
    settings = "deadline = 0.4\nqueue = 8\nconcurrency = 1\ngrace = 0.5\n"
    made = (
        Server(write_tree(base / "port", settings), ("--port", "0", "--model", MODEL)),
        Server(write_tree(base / "socket"), ("--uds", str(base / "it.sock"), "--no-token")),
    )
    for server in made:
        server.begin()
    yield made
    for server in made:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.wait()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def ask_socket(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    assert server.note is not None
    connection = UnixConnection(Path(server.note.uds or ""))
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def test_named_models_are_loaded_before_it_is_ready(
    starting: tuple[Server, Server],
) -> None:
    server = starting[0].wait()
    until = time.monotonic() + 60
    while server.ask("GET", "/health")[0] == 503:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert [model.id for model in server.client().models.list()] == [MODEL]
    assert server.client().models.retrieve(MODEL).onedesk["loaded"] is True  # type: ignore[attr-defined]
    assert server.ask("POST", "/v1/chat/completions", SHORT | {"model": None})[0] == 200


def test_waiting_longer_than_the_deadline(starting: tuple[Server, Server]) -> None:
    server = starting[0].wait()
    server.ask("POST", "/v1/memory/sleep", {"wake": "manual"})
    status, headers, document = server.ask("POST", "/v1/chat/completions", SHORT)
    assert (status, document["error"]["code"], document["error"]["type"]) == (503, "deadline", "server_error")
    assert int(headers["Retry-After"]) >= 1
    with pytest.raises(openai.APIError, match="without its turn coming"):
        list(server.client().chat.completions.create(**SHORT, stream=True))
    server.until("onedesk_waiting", 0)
    server.ask("POST", "/v1/memory/wake", {})
    assert server.ask("POST", "/v1/chat/completions", SHORT)[0] == 200


def test_asked_to_end_it_finishes_what_it_can(starting: tuple[Server, Server]) -> None:
    server = starting[0].wait()
    assert server.process is not None
    with closing(server.open_stream(LONG)) as running:
        received = running.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        while more := running.recv(65536):
            received += more
    lines = [line for line in received.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2][6:])
    assert (last["choices"][0]["finish_reason"], last["onedesk"]["finish"]) == ("length", "cancelled")
    assert server.process.wait(60) == 0
    assert not (server.cache / "service.json").exists()
    assert server.token  # it is kept for the next start
    assert "Traceback" not in server.log()


def test_a_unix_socket_that_only_its_owner_reaches(starting: tuple[Server, Server]) -> None:
    server = starting[1].wait()
    assert server.note is not None
    path = Path(server.note.uds or "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (server.note.port, server.note.token_file) == (None, None)
    assert not (server.cache / "service.token").exists()
    assert ask_socket(server, "POST", "/v1/chat/completions", SHORT)[0] == 200
    remote = RemoteModel(ModelSpec(MODEL, 512), LocalService(server.cache, []))
    events = list(remote.generate(Request((Message("user", "a cat"),), max_tokens=4)))
    assert events[-1].result is not None
    assert events[-1].result.usage.completion == 4


def test_it_starts_again_after_a_kill_during_an_answer(starting: tuple[Server, Server]) -> None:
    server = starting[1].wait()
    assert server.process is not None
    assert server.note is not None
    path = Path(server.note.uds or "")
    connection = UnixConnection(path)
    body = json.dumps(SHORT | LONG | {"stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(100)
    children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    assert children  # the template's process
    server.process.kill()
    server.process.wait()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    until = time.monotonic() + 30
    while any(map(alive, children)):
        assert time.monotonic() < until, "a child of the dead service lives on"
        time.sleep(0.02)
    assert path.is_socket()  # nobody could take it away
    server.start()
    assert ask_socket(server, "POST", "/v1/chat/completions", SHORT)[0] == 200
    assert server.stop(signal.SIGINT) == 0
    assert not path.exists()
