"""The real service for tests: `onedesk serve` as a separate process, and clients for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from bound import bound
from kept_kernels import keep_kernels
from onedesk.service.peers.note import Note, read_note
from tiny_models import write_language_model

STARTS_WITHIN = (
    90.0  # seconds until a service that does not start fails its test; torch takes several on a busy machine
)
MODEL = "writer"
THINKER = "thinker"
# Starts reasoning on request, and shows tools and variables, as Qwen's templates do.
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{%- if mood is defined %}{{ mood }}{% endif %}{%- for message in"
    " messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{%- for call in message.tool_calls or [] %}{{"
    " call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor -%}{%- if"
    " add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif -%}"
)


def write_tree(folder: Path, settings: str = "", *, context: int = 4096) -> Path:
    """A tree with two tiny models that write printable ASCII and never end by themselves: `writer`, and `thinker`
    with TEMPLATE.
    """
    write_language_model(folder / "models" / MODEL, context=context)
    thinker = write_language_model(folder / "models" / THINKER, seed=5, context=context)
    (thinker / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    keep_kernels(folder / "cache")
    (folder / "onedesk.toml").write_text(
        f'[models]\nroots = ["models"]\ndefault = "{MODEL}"\n\n[service]\n{settings}\n', encoding="utf-8"
    )
    return folder


@dataclass
class Server:
    """A service of the tree `tree`."""

    tree: Path
    arguments: tuple[str, ...] = ("--port", "0")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    note: Note | None = field(default=None, init=False)

    @property
    def cache(self) -> Path:
        return self.tree / "cache"

    @property
    def token(self) -> str:
        return (self.cache / "service.token").read_text().strip()

    @property
    def port(self) -> int:
        assert self.note is not None
        assert self.note.port is not None
        return self.note.port

    def begin(self) -> Server:
        """Start it without waiting."""
        command = [
            sys.executable,
            "-m",
            "onedesk.service",
            "serve",
            "--config",
            str(self.tree / "onedesk.toml"),
            *self.arguments,
        ]
        with (self.tree / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(bound(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        return self

    def wait(self) -> Server:
        """Wait until it accepts connections."""
        assert self.process is not None
        until = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < until:
            note = read_note(self.cache)
            if note is not None and note.pid == self.process.pid:
                self.note = note
                return self
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise TimeoutError(f"the service does not start: {self.log()}")

    def start(self) -> Server:
        """Start it and wait until it accepts connections."""
        return self.begin().wait()

    def log(self) -> str:
        return (self.tree / "serve.log").read_text(errors="replace")

    def stop(self, kind: int = signal.SIGTERM) -> int:
        """Stop it; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(kind)
        return self.process.wait(STARTS_WITHIN)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{
                "base_url": f"http://127.0.0.1:{self.port}/v1",
                "api_key": self.token,
                "max_retries": 0,
                "timeout": 60.0,
                **options,
            }
        )

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str | None] | None = None
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and document of one plain request; a header of None is left out."""
        sent = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **(headers or {})}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, {name: value for name, value in sent.items() if value is not None})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, dict(response.headers), json.loads(raw) if is_json else raw.decode()

    def open_stream(
        self, body: Mapping[str, Any], *, receive_buffer: int | None = None, cut: bool = False
    ) -> socket.socket:
        """A raw connection with a chat request sent and nothing read yet. `cut`: all but the last byte was sent."""
        data = json.dumps({"messages": [{"role": "user", "content": "go on"}], "stream": True, **body}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer"
            f" {self.token}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        made = socket.socket()
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(60)
        made.connect(("127.0.0.1", self.port))
        made.sendall(head.encode() + (data[:-1] if cut else data))
        return made

    def figure(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.ask("GET", "/metrics")[2]
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        until = time.monotonic() + 30
        while (found := self.figure(name)) != value:
            assert time.monotonic() < until, f"{name} is {found}, not {value}"
            time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process of this id runs; an ended but unreaped one does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
