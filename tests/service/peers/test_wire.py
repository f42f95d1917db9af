"""How a question goes out: whole, and where nobody has to be waited for before anybody waits for its answer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from onedesk.service.core import Message, ModelSpec, Request
from onedesk.service.peers.peer import Peer, PeerAddress
from onedesk.service.peers.remote import RemoteModel
from onedesk.service.peers.wire import Exchange


class Handler(BaseHTTPRequestHandler):
    """Answers everything with one token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[PeerAddress]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield PeerAddress("a server", port=server.server_address[1])
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("body", [{}, {"messages": ["x" * 3000]}])
def test_a_request_is_sent_whole(address: PeerAddress, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    """Headers and body apart wake the server twice."""
    sent: list[bytes] = []
    real = http.client.HTTPConnection.send

    def send(connection: http.client.HTTPConnection, data: bytes) -> None:
        sent.append(data)
        real(connection, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", send)
    with Exchange(address, "POST", "/x", body) as exchange:
        assert len(list(exchange.documents())) == 1
    assert len(sent) == 1
    assert sent[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert sent[0].endswith(b"\r\n\r\n" + json.dumps(body).encode())


class Near(Peer):
    title = "a server"

    def __init__(self, address: PeerAddress) -> None:
        self._address = address

    def reach(self, cancel: Any = None) -> PeerAddress:
        return self._address

    def close(self) -> None: ...


def test_a_local_server_gets_the_request_before_the_thread(
    address: PeerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_in: list[threading.Thread] = []
    real = Exchange._send

    def send(exchange: Exchange) -> Any:
        asked_in.append(threading.current_thread())
        return real(exchange)

    monkeypatch.setattr(Exchange, "_send", send)
    events = list(RemoteModel(ModelSpec("x"), Near(address)).generate(Request((Message("user", "a"),), max_tokens=3)))
    assert [event.result.text for event in events if event.result] == ["a"]
    assert asked_in == [threading.current_thread()]


@pytest.mark.parametrize(
    ("address", "length", "near"),
    [
        (PeerAddress("a server"), 10, True),
        (PeerAddress("a server", uds="/run/x"), 10, True),
        (PeerAddress("a server", host="10.0.0.1"), 10, False),
        (PeerAddress("a server", tls=True), 10, False),
        (PeerAddress("a server"), 1 << 17, False),
    ],
)
def test_what_goes_far_or_is_long_holds_no_caller_up(address: PeerAddress, length: int, near: bool) -> None:
    assert Exchange(address, "POST", "/x", {"prompt": "x" * length}).near is near
