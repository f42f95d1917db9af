"""Whatever is raised, wherever a request is: its client gets one whole answer in OpenAI's shape, and the next one is
answered as ever.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import Inside
from onedesk.service.api import OpenModel
from onedesk.service.engine.batch_loop import BatchLoop
from onedesk.service.engine.session_owner import SessionOwner
from onedesk.service.errors import FileError, MemoryFull, ModelError, PeerError, RequestError
from onedesk.service.server import body as body_module
from onedesk.service.server import generate as generate_module
from onedesk.service.server import responses
from onedesk.service.server.concurrency import BatchSizes
from onedesk.service.server.frames import Frames
from onedesk.service.server.models import Models
from onedesk.service.server.service import Service
from onedesk.service.server.sse import EventStream
from onedesk.service.server.statistics import Figures
from onedesk.service.text.template import ChatTemplate
from onedesk.service.text.tokenizer import Tokenizer
from serving import MODEL, write_tree


def panic() -> type[BaseException]:
    """The class of a panic of a Rust library, which is not an Exception; no module has it by a name."""
    from tokenizers import Tokenizer as Backend

    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "éa": 2},
        "merges": [["a", "éa"]],
        "continuing_subword_prefix": "éé",
    }
    try:
        Backend.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    except BaseException as error:  # noqa: BLE001
        return type(error)
    raise AssertionError("no panic")


PANIC = panic()
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: OverflowError("int too large to convert to float"),
    lambda: OSError(13, "Permission denied", "/secret/path/tokenizer.json"),
    lambda: RecursionError("maximum recursion depth exceeded"),
    lambda: MemoryError(),
    lambda: ValueError("\x1b[31mwrong\n"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    lambda: StopIteration(5),
    lambda: GeneratorExit(),
    lambda: KeyboardInterrupt(),
    lambda: SystemExit(3),
    lambda: asyncio.CancelledError(),
    lambda: asyncio.TimeoutError(),
    lambda: ConnectionResetError(104, "Connection reset by peer"),
    lambda: ModelError("the model is broken"),
    lambda: FileError("a file is gone"),
    lambda: MemoryFull("there is no room"),
    lambda: RequestError("that cannot be"),
    lambda: PeerError("nobody answers"),
    lambda: PANIC("called `Option::unwrap()` on a `None` value"),
)


@dataclass(frozen=True)
class Stage:
    """A method that a request comes through; `after`: calls of it that go well first."""

    owner: Any
    name: str
    after: int = 0


STAGES = (
    Stage(body_module, "check"),
    Stage(Service, "prepare"),
    Stage(Models, "name_of"),
    Stage(Models, "find"),
    Stage(generate_module, "chat_ask"),
    Stage(OpenModel, "prepared"),
    Stage(ChatTemplate, "render"),
    Stage(Tokenizer, "encode"),
    Stage(Service, "_check_room"),
    Stage(BatchSizes, "now"),
    Stage(OpenModel, "serve"),
    Stage(SessionOwner, "opened"),
    Stage(BatchLoop, "events"),
    Stage(Figures, "wrote"),
    Stage(Figures, "finished"),
    Stage(responses, "usage"),
    Stage(responses.ChatWriter, "_parts"),
    Stage(responses.ChatWriter, "_parts", 2),
    Stage(responses.ChatWriter, "_last"),
    Stage(responses.ChatWriter, "whole"),
    Stage(Frames, "of"),
    Stage(EventStream, "send_now", 3),
    Stage(EventStream, "send", 2),
)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(write_tree(tmp_path_factory.mktemp("inside"), context=256)).start()
    assert made.ask("POST", CHAT, ASK)[0] == 200
    yield made
    made.stop()


CHAT = "/v1/chat/completions"
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "a cat"}],
    "max_tokens": 12,
    "seed": 3,
    "temperature": 1.0,
}


def answer(inside: Inside, body: Any) -> bytes:
    """Everything that comes back on a connection that the service is asked to close."""
    data = json.dumps(body).encode()
    lines = (
        f"POST {CHAT} HTTP/1.1",
        f"Host: 127.0.0.1:{inside.port}",
        f"Authorization: Bearer {inside.token}",
        "Connection: close",
    )
    head = "\r\n".join([*lines, "Content-Type: application/json", f"Content-Length: {len(data)}", "", ""])
    received = b""
    with closing(socket.create_connection(("127.0.0.1", inside.port), timeout=60)) as connection:
        connection.sendall(head.encode() + data)
        while more := connection.recv(65536):
            received += more
    return received


def check_whole(raw: bytes, *, stream: bool) -> None:
    """One response, whole; an error in OpenAI's shape, or a stream that ends with [DONE]."""
    assert raw.count(b"HTTP/1.1 ") == 1, raw
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"Transfer-Encoding: chunked" not in head:
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        assert len(rest) == length
        document = json.loads(rest)
        assert status != 499
        assert status == 200 or set(document["error"]) == {"message", "type", "param", "code"}, raw
        assert b"secret" not in raw
        return
    assert stream
    assert status == 200
    content = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content += rest[: int(size, 16)]
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    assert size == b"0", raw
    events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    errors = [document["error"] for event in events[:-1] if "error" in (document := json.loads(event))]
    assert len(errors) <= 1
    assert all(set(error) == {"message", "type", "param", "code"} for error in errors)


@settings(max_examples=110, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(st.sampled_from(STAGES), st.sampled_from(ERRORS), st.booleans(), st.booleans())
def test_one_whole_answer_whatever_is_raised_wherever(
    inside: Inside, stage: Stage, made: Callable[[], BaseException], stream: bool, named: bool
) -> None:
    real, calls = getattr(stage.owner, stage.name), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > stage.after:
            raise made()
        return real(*arguments, **options)

    body = ASK | {"stream": stream, "model": MODEL if named else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.owner, stage.name, failing)
        raw = answer(inside, body)
    check_whole(raw, stream=stream)
    assert inside.ask("POST", CHAT, ASK)[0] == 200
    assert inside.on_loop(lambda: (inside.service.working, inside.service.waiting, inside.service.bodies)) == (
        [],
        0,
        {},
    )
