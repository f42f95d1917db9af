"""A server of somebody else that speaks OpenAI's API: what it can be made to do wrong, and what must never be seen
of it.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from onedesk.service.config import PeerSettings
from onedesk.service.core import Message, ModelSpec, Request, Result, Sampling
from onedesk.service.errors import (
    FileError,
    MemoryFull,
    ModelError,
    OnedeskError,
    PeerError,
    RequestError,
)
from onedesk.service.peers.openai_server import OtherServer
from onedesk.service.peers.peer import PeerAddress
from onedesk.service.peers.remote import RemoteModel
from onedesk.service.peers.wire import failure

KEY = "sk-very-secret-0123456789"
HOST = "localhost"
Script = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Does what the fake's script says, and remembers what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        fake: Any = self.server
        fake.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        fake.keys.append(self.headers.get("Authorization"))
        fake.paths.append(self.path)
        self.close_connection = True
        fake.script(self)

    def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def say(self, *documents: Any, done: bool = True) -> None:
        for document in documents:
            self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        if done:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Script = lambda handler: None
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []

    def handle_error(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    made = Fake()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def model(fake: Fake, tmp_path: Path) -> RemoteModel:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    settings = PeerSettings(
        "big", "openai", url=f"http://{HOST}:{fake.server_address[1]}/v1", key_file=key_file, model="Qwen-big"
    )
    fake.bodies.clear()
    fake.keys.clear()
    fake.paths.clear()
    return RemoteModel(ModelSpec("Qwen-big"), OtherServer(settings))


def delta(text: str = "", *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": ({"content": text} if text else {}) | more, "finish_reason": finish}]}


def asked(text: str = "a cat", **more: Any) -> Request:
    return Request(
        (Message("system", "short"), Message("user", text)),
        **{"sampling": Sampling(seed=2**64 - 1), "max_tokens": 9, **more},
    )


def write(model: RemoteModel, request: Request | None = None) -> Result:
    results = [event.result for event in model.generate(request or asked()) if event.result is not None]
    assert len(results) == 1
    return results[0]


def refusal(model: RemoteModel, request: Request | None = None) -> OnedeskError:
    """The error, after nothing of address and key was found in it, its traceback and the log."""
    with pytest.raises(OnedeskError) as caught:
        list(model.generate(request or asked()))
    shown = "".join(traceback.format_exception(caught.value))
    assert KEY not in shown
    assert HOST not in shown
    assert not model.busy
    return caught.value


def test_an_answer_and_what_it_was_asked(fake: Fake, model: RemoteModel) -> None:
    def script(handler: Handler) -> None:
        handler.head()
        handler.wfile.write(b": a comment\n\n")
        handler.say(
            delta(role="assistant"),
            delta(reasoning_content="hm"),
            delta("a red"),
            delta(" cat \U0001f431"),
            delta(finish="length"),
        )

    fake.script = script
    stopping = asked(
        stop=("X",), thinking="off", sampling=Sampling(seed=2**64 - 1, temperature=0.5, top_k=3, logit_bias={7: -1.0})
    )
    result = write(model, stopping)
    assert (result.text, result.reasoning, result.finish, result.seed) == (
        "a red cat \U0001f431",
        "hm",
        "length",
        2**64 - 1,
    )
    (body,) = fake.bodies
    assert fake.paths == ["/v1/chat/completions"]
    assert fake.keys == [f"Bearer {KEY}"]
    assert body["model"] == "Qwen-big"
    assert body["messages"] == [{"role": "system", "content": "short"}, {"role": "user", "content": "a cat"}]
    assert {name: body[name] for name in ("temperature", "top_k", "logit_bias", "stop", "max_tokens", "stream")} == {
        "temperature": 0.5,
        "top_k": 3,
        "logit_bias": {"7": -1.0},
        "stop": ["X"],
        "max_tokens": 9,
        "stream": True,
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert 0 <= body["seed"] < 2**31
    assert "onedesk" not in body
    assert "top_p" not in body


def test_usage_comes_behind_the_last_choice(fake: Fake, model: RemoteModel) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 40, "completion_tokens_details": {"reasoning_tokens": 1}}

    def script(handler: Handler) -> None:
        handler.head()
        handler.say(delta("cat", finish="stop"), {"choices": [], "usage": usage})

    fake.script = script
    found = write(model).usage
    assert (found.prompt, found.completion, found.reasoning) == (5, 40, 1)


def test_thoughts_that_a_server_leaves_in_the_text_are_taken_out(fake: Fake, model: RemoteModel) -> None:
    for pieces, text, reasoning in (
        (["<th", "ink>\nwell, ", "a cat</thi", "nk>\n\nA cat."], "A cat.", "well, a cat"),
        (["a cat?", "\n</think>\n\nA cat."], "A cat.", "a cat?"),
        (["<think>never closed"], "", "never closed"),
    ):

        def script(handler: Handler, pieces: list[str] = pieces) -> None:
            handler.head()
            handler.say(*map(delta, pieces), delta(finish="stop"))

        fake.script = script
        result = write(model)
        assert (result.text, result.reasoning) == (text, reasoning)


def test_half_characters_are_joined_and_lone_ones_replaced(fake: Fake, model: RemoteModel) -> None:
    def script(handler: Handler) -> None:
        handler.head()
        for half in (r"\ud83d", r"\udc31!", r"\ud83d", "x"):
            handler.wfile.write(b'data: {"choices": [{"delta": {"content": "' + half.encode() + b'"}}]}\n\n')
        handler.say(delta(reasoning_content="\ud83d"), delta(reasoning_content="\udc31\udc31"), delta(finish="stop"))

    fake.script = script
    result = write(model)
    assert (result.text, result.reasoning) == ("\U0001f431!\ufffdx", "\U0001f431\ufffd")


def test_a_server_without_a_key_and_with_one_model(fake: Fake) -> None:
    fake.bodies.clear()
    fake.keys.clear()

    def script(handler: Handler) -> None:
        handler.head()
        handler.say(delta("cat", finish="stop"))

    fake.script = script
    url = f"http://{HOST}:{fake.server_address[1]}/"
    plain = RemoteModel(ModelSpec(""), OtherServer(PeerSettings("plain", "openai", url=url)))
    assert write(plain).text == "cat"
    assert (fake.keys, "model" in fake.bodies[0], plain.name) == ([None], False, "the server plain")


def status(code: int, body: Any, **headers: str) -> Script:
    def script(handler: Handler) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.head(code, "application/json", **{"Content-Length": str(len(raw)), **headers})
        handler.wfile.write(raw)

    return script


def stream(*pieces: bytes) -> Script:
    def script(handler: Handler) -> None:
        handler.head()
        for piece in pieces:
            handler.wfile.write(piece)

    return script


FAULTS: dict[str, tuple[Script, type[OnedeskError], str]] = {
    "a refused key": (status(401, {"error": {"message": f"wrong key {KEY}"}}), PeerError, "refuses the key"),
    "a bad request": (
        status(400, {"error": {"message": f"{HOST}: too long"}}),
        RequestError,
        r"refuses the request .*\[...\]: too long",
    ),
    "an unknown model": (status(404, {"error": {"message": "no such model"}}), RequestError, "no such model"),
    "too many": (status(429, {"error": {"message": "slow down"}}), PeerError, "takes nothing now"),
    "a failure": (status(500, b"\x00<html>"), PeerError, r"failed \(status 500\): it does not say why"),
    "an error as a text": (status(500, {"error": "out of\nmemory"}), PeerError, "out of memory"),
    "a list for an error": (status(500, [1, 2]), PeerError, "failed"),
    "elsewhere": (status(307, {}, Location=f"http://{HOST}/"), PeerError, "sends elsewhere"),
    "a whole document": (status(200, {"choices": []}), PeerError, "not with a stream"),
    "no JSON": (stream(b"data: {oops\n\n"), PeerError, "not JSON"),
    "no UTF-8": (stream(b'data: {"x": "\xff"}\n\n'), PeerError, "not JSON"),
    "nested": (stream(b"data: " + b"[" * 100_000 + b"\n\n"), PeerError, "not JSON"),
    "a number": (stream(b"data: 1\n\n"), PeerError, "not an object"),
    "no events at all": (stream(b"hello\n" * 50), PeerError, "ended in the middle of an answer, after 0 tokens"),
    "cut": (
        stream(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'),
        PeerError,
        "ended in the middle of an answer, after 1 tokens",
    ),
    "done too early": (stream(b"data: [DONE]\n\n"), PeerError, "ended in the middle"),
    "an error event": (
        stream(b'data: {"error": {"message": "engine died"}}\n\n'),
        PeerError,
        "failed in the middle of an answer: engine died",
    ),
    "odd types": (stream(b'data: {"choices": [3], "usage": [], "onedesk": 1}\n\n'), PeerError, "ended in the middle"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_error_that_says_what_to_do(
    fake: Fake, model: RemoteModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, kind, words = FAULTS[name]
    fake.script = script
    with caplog.at_level(logging.DEBUG):
        error = refusal(model)
    assert type(error) is kind
    assert error.args[0].startswith("the server big ")
    assert re.search(words, str(error))
    assert KEY not in caplog.text
    assert HOST not in caplog.text


def test_no_http_a_closed_door_and_silence(fake: Fake, model: RemoteModel) -> None:
    fake.script = lambda handler: handler.connection.close()
    assert "closed the connection" in str(refusal(model))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://{HOST}:{listening.getsockname()[1]}/v1"
        other = RemoteModel(ModelSpec("m"), OtherServer(PeerSettings("big", "openai", url=url)))

        def babble() -> None:
            made, _ = listening.accept()
            made.recv(65536)
            made.sendall(b"SSH-2.0-nothing\r\n\r\n")
            made.close()

        thread = threading.Thread(target=babble)
        thread.start()
        assert "not HTTP" in str(refusal(other))
        thread.join()
    assert "no program listens there" in str(refusal(other))


def test_silence_has_an_end(fake: Fake, model: RemoteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    fake.script = lambda handler: release.wait(10)  # type: ignore[assignment, return-value]
    reach = OtherServer.reach
    monkeypatch.setattr(OtherServer, "reach", lambda self, cancel=None: replace(reach(self, cancel), silence=0.2))
    assert "said nothing for 0.2 s" in str(refusal(model))
    release.set()


def test_stop_ends_a_silent_answer_on_both_sides(fake: Fake, model: RemoteModel) -> None:
    gone = threading.Event()

    def script(handler: Handler) -> None:
        handler.head()
        handler.say(delta("so far"), done=False)
        handler.connection.settimeout(10)
        if handler.connection.recv(1) == b"":
            gone.set()

    fake.script = script
    stop = threading.Event()
    came = []
    for event in model.generate(asked(), cancel=stop.is_set):
        came.append(event)
        stop.set()
    result = came[-1].result
    assert result is not None
    assert (result.finish, result.text) == ("cancelled", "so far")
    assert gone.wait(10)


def test_one_of_a_list_is_dropped_and_the_others_go_on(fake: Fake, model: RemoteModel) -> None:
    def script(handler: Handler) -> None:
        body = fake.bodies[-1]
        handler.head()
        if body["messages"][-1]["content"] == "drop me":
            handler.connection.settimeout(10)
            handler.connection.recv(1)
        else:
            handler.say(delta("kept", finish="stop"))

    fake.script = script
    results = {}
    for event in model.generate_batch(
        [asked("one"), asked("drop me")], cancel_request=lambda place: place == 1 and 0 in results
    ):
        if event.result is not None:
            results[event.request] = event.result
    assert (results[0].finish, results[1].finish) == ("stop", "cancelled")


def test_what_a_foreign_server_cannot_be_asked(model: RemoteModel) -> None:
    for more in ({"thinking_budget": 3}, {"best_of": 2}, {"logprobs": 1}, {"json_schema": "{}"}):
        with pytest.raises(RequestError, match=r"the server big"):
            model.generate(asked(**more))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="item 2 of 2"):
        model.generate_batch([asked(), asked(max_tokens=0)])
    with pytest.raises(RequestError, match="by its id"):
        model.encode("cat")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nowhere",
        "ftp://h/v1",
        "http:///v",
        "http://u:p@h/v1",
        "http://:p@h/v1",
        "http://h:x/v1",
        "http://h/v1?key=1",
        "http://a b/",
    ],
)
def test_a_url_that_is_none_is_told_without_it(url: str) -> None:
    with pytest.raises(
        FileError, match=r"url in \[peers.big\] in onedesk.toml is not an address of a server"
    ) as caught:
        OtherServer(PeerSettings("big", "openai", url=url)).reach()
    assert not url or url not in str(caught.value)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.raises(FileError, match="can be read by others"):
        OtherServer(PeerSettings("big", "openai", url="http://h/v1", key_file=path)).reach()


def test_a_key_of_another_server_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "key"
    settings = PeerSettings("big", "openai", url="http://h/v1", key_file=path)
    path.write_text("token-abc123\n")
    path.chmod(0o600)
    assert OtherServer(settings).reach().key == "token-abc123"
    path.write_text("\n")
    with pytest.raises(FileError, match=r"1 or more printable characters; correct key_file in \[peers.big\]"):
        OtherServer(settings).reach()


def test_nothing_secret_is_in_what_is_printed_of_an_address() -> None:
    assert KEY not in repr(PeerAddress("the server big", host=HOST, key=KEY))
    assert HOST not in repr(PeerAddress("the server big", host=HOST, key=KEY))


def test_the_services_own_errors_come_back_as_what_they_were() -> None:
    address = PeerAddress("the local service", dialect="onedesk")
    for code, kind in (("memory_full", MemoryFull), ("model_not_found", ModelError), ("invalid_request", RequestError)):
        error = failure(address, 503, {"error": {"message": "what it said", "code": code}})
        assert (type(error), str(error)) == (kind, "what it said")
