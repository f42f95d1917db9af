"""Admission: one sequence writes, two requests wait. Queue positions are streamed; one is free at once when a client
goes away.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import openai
import pytest
from serving import MODEL, Server, write_tree

# Drawn from the whole vocabulary, so that no repetition ends it early, and with a seed that draws no end.
FREE = {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "seed": 1}
LONG = {"model": MODEL, "max_tokens": 3500, **FREE}
SHORT = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "a cat"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = "concurrency = 1\nqueue = 2\ndeadline = 60\n"
    made = Server(write_tree(tmp_path_factory.mktemp("narrow"), settings)).start()
    yield made
    made.stop()


@pytest.fixture
def clients(server: Server) -> Iterator[ExitStack]:
    """Connections that a test opens; afterwards nobody writes and nobody waits."""
    with ExitStack() as stack:
        yield stack
    server.until("onedesk_working", 0)
    server.until("onedesk_waiting", 0)


def begun(server: Server, clients: ExitStack, **options: Any) -> socket.socket:
    """A client whose answer is being written."""
    connection = clients.enter_context(closing(server.open_stream(LONG | options)))
    assert "chat.completion.chunk" in until(connection, "data: ")
    return connection


def until(connection: socket.socket, text: str) -> str:
    """Everything up to where `text` is there."""
    received = b""
    while text.encode() not in received:
        more = connection.recv(4096)
        assert more, received.decode()
        received += more
    return received.decode()


def test_places_are_told_and_the_line_is_bounded(server: Server, clients: ExitStack) -> None:
    first = begun(server, clients)
    second = clients.enter_context(closing(server.open_stream(LONG)))
    assert ": waiting, position 1\n\n" in until(second, "position")
    third = clients.enter_context(closing(server.open_stream(LONG)))
    assert ": waiting, position 2\n\n" in until(third, "position")
    status, headers, document = server.ask("POST", "/v1/chat/completions", SHORT)
    assert (status, document["error"]["code"], document["error"]["type"]) == (429, "queue_full", "rate_limit_error")
    assert int(headers["Retry-After"]) >= 1
    with pytest.raises(openai.RateLimitError):
        server.client().embeddings.create(model=MODEL, input="a cat")
    first.close()
    assert ": waiting, position 1\n\n" in until(third, "position 1")
    assert "chat.completion.chunk" in until(second, "data: ")


def test_a_client_that_goes_away_frees_its_place(server: Server, clients: ExitStack) -> None:
    cancelled = server.figure("onedesk_finishes_total")
    for _ in range(3):
        begun(server, clients).close()
        assert server.client().chat.completions.create(**SHORT).usage.completion_tokens == 2  # type: ignore[call-overload]
    assert server.figure("onedesk_finishes_total") == cancelled + 6
    text = server.ask("GET", "/metrics")[2]
    assert f'onedesk_finishes_total{{finish="cancelled",model="{MODEL}"}}' in text


def test_a_client_that_waits_and_goes_away_is_not_written_for(server: Server, clients: ExitStack) -> None:
    first = begun(server, clients)
    waiting = server.open_stream(LONG)
    until(waiting, "position 1")
    waiting.close()
    server.until("onedesk_waiting", 0)
    before = server.figure("onedesk_finishes_total")
    first.close()
    server.until("onedesk_working", 0)
    assert server.figure("onedesk_finishes_total") == before + 1


def test_disconnects_in_the_queue_log_no_traceback(server: Server, clients: ExitStack) -> None:
    first = begun(server, clients)
    for _ in range(20):
        gone = server.open_stream(LONG)
        gone.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # close by a reset, as a killed client does
        gone.close()
    first.close()
    server.until("onedesk_working", 0)
    server.until("onedesk_waiting", 0)
    assert "Traceback" not in server.log()


def test_without_a_stream_a_client_may_go_away_too(server: Server, clients: ExitStack) -> None:
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.5).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=3500,
            temperature=2.0,
            top_p=1.0,
            extra_body={"top_k": 0},
        )
    server.until("onedesk_working", 0)


def test_a_client_that_reads_slowly_holds_nobody_up(server: Server, clients: ExitStack) -> None:
    slow = clients.enter_context(
        closing(server.open_stream(LONG | {"max_tokens": 1500, "seed": 1}, receive_buffer=2048))
    )
    assert server.client().chat.completions.create(**SHORT).usage.completion_tokens == 2  # type: ignore[call-overload]
    received = until(slow, "data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert len(text) == 1500
    asked = LONG | {"max_tokens": 1500, "seed": 1, "messages": [{"role": "user", "content": "go on"}]}
    assert server.ask("POST", "/v1/chat/completions", asked)[2]["choices"][0]["message"]["content"] == text


def test_other_work_waits_its_turn(server: Server, clients: ExitStack) -> None:
    first = begun(server, clients)
    found: list[int] = []
    client = server.client()
    thread = threading.Thread(
        target=lambda: found.append(len(client.embeddings.create(model=MODEL, input="a cat").data))
    )
    thread.start()
    server.until("onedesk_waiting", 1)
    assert found == []
    first.close()
    thread.join(60)
    assert found == [1]
