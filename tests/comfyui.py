"""How a test drives the real ComfyUI: queue a workflow, follow its messages, stop it, read its outputs."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from bound import bound
from onedesk.service.setup.comfyui import Client, ComfyProcess

Prompt = Mapping[str, Mapping[str, Any]]
ENDS = ("execution_success", "execution_error", "execution_interrupted")
BINARY_TEXT = 3
TIMEOUT = 120.0


@dataclass(frozen=True)
class Message:
    """One message of ComfyUI's websocket. `at` counts seconds since the workflow was queued."""

    at: float
    kind: str
    data: dict[str, Any]


class Run:
    """One queued workflow. Its websocket is open before it is queued, so that no message is missed."""

    def __init__(self, client: Client, prompt: Prompt) -> None:
        self.client = client
        self.messages: list[Message] = []
        self.id = ""
        self._client_id = uuid.uuid4().hex
        self._news = threading.Condition()
        self._open = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._listen(),), daemon=True)
        self._begin = time.monotonic()
        self._thread.start()
        if not self._open.wait(TIMEOUT):
            raise TimeoutError("the websocket of ComfyUI did not open")
        self._begin = time.monotonic()
        self.id = client.queue(prompt, client_id=self._client_id)

    async def _listen(self) -> None:
        url = f"ws://127.0.0.1:{self.client.port}/ws?clientId={self._client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            async for raw in socket:
                self._open.set()  # ComfyUI first sends its status
                message = self._read(raw)
                with self._news:
                    self.messages.append(message)
                    self._news.notify_all()
                if message.kind in ENDS:
                    return

    def _read(self, raw: aiohttp.WSMessage) -> Message:
        at = time.monotonic() - self._begin
        if raw.type == aiohttp.WSMsgType.TEXT:
            content = raw.json()
            return Message(at, content["type"], content["data"])
        (kind,) = struct.unpack(">I", raw.data[:4])
        if kind != BINARY_TEXT:
            return Message(at, "picture", {"bytes": len(raw.data)})
        (length,) = struct.unpack(">I", raw.data[4:8])
        node, text = raw.data[8 : 8 + length], raw.data[8 + length :]
        return Message(at, "text", {"node": node.decode(), "text": text.decode()})

    def wait_for(self, kind: str, *, timeout: float = TIMEOUT, **values: object) -> Message:
        """The first message of `kind` whose data has all of `values`, waiting at most `timeout` seconds for it."""

        return self.wait_until(
            lambda m: m.kind == kind and all(m.data.get(k) == v for k, v in values.items()), timeout=timeout
        )

    def wait_until(self, wanted: Callable[[Message], bool], *, timeout: float = TIMEOUT) -> Message:
        """The first message that `wanted` accepts, waiting at most `timeout` seconds; an error if the workflow ends
        before.
        """

        def found() -> Message | None:
            return next(filter(wanted, list(self.messages)), None)

        with self._news:
            if not self._news.wait_for(lambda: found() is not None or self._ended(), timeout):
                raise TimeoutError(
                    f"the message did not come within {timeout:g} s; came so far: {[m.kind for m in self.messages]}"
                )
            message = found()
        if message is None:
            raise AssertionError(f"the workflow ended without the message: {self.messages[-1]}")
        return message

    def _ended(self) -> bool:
        return any(message.kind in ENDS for message in self.messages)

    def interrupt(self) -> float:
        """Press Stop; returns the moment, in seconds since the workflow was queued."""
        at = time.monotonic() - self._begin
        self.client.ask("/interrupt", {})
        return at

    def result(self, *, timeout: float = TIMEOUT) -> Outcome:
        """Wait for the end and return the outcome."""
        with self._news:
            if not self._news.wait_for(self._ended, timeout):
                raise TimeoutError(
                    f"the workflow did not end within {timeout:g} s; came so far: {[m.kind for m in self.messages]}"
                )
        self._thread.join(timeout)
        entry = self.client.wait(self.id, timeout=timeout)
        return Outcome(self.id, self.messages[-1].kind, self.messages[-1].data, entry["outputs"], list(self.messages))


@dataclass(frozen=True)
class Outcome:
    """A workflow that has ended. `end` is the kind of its last message, `last` that message's data."""

    id: str
    end: str
    last: dict[str, Any]
    outputs: dict[str, Any]
    messages: list[Message] = field(repr=False)

    @property
    def ok(self) -> bool:
        return self.end == "execution_success"

    @property
    def error(self) -> str:
        """The message of the exception that ended it, or an empty string."""
        return str(self.last.get("exception_message", ""))

    def executed(self) -> list[str]:
        """Ids of the nodes that really ran, in order; nodes answered from the cache are not among them."""
        return [m.data["node"] for m in self.messages if m.kind == "executing" and m.data.get("node") is not None]

    def cached(self) -> list[str]:
        """Ids of the nodes whose outputs came from the cache."""
        return [node for m in self.messages if m.kind == "execution_cached" for node in m.data["nodes"]]

    def texts(self, node: str) -> list[Message]:
        """The progress texts that the node sent, oldest first."""
        return [m for m in self.messages if m.kind == "text" and m.data["node"] == node]


class BoundComfy(ComfyProcess):
    """A ComfyUI that the kernel ends when the tests are gone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.argv = bound(self.argv)


class Comfy:
    """The running ComfyUI of the test session. `base` holds models/ custom_nodes/ input/ output/ user/."""

    def __init__(self, process: ComfyProcess, base: Path) -> None:
        self.process = process
        self.client = process.client
        self.base = base

    @property
    def models(self) -> Path:
        return self.base / "models"

    def start(self, prompt: Prompt) -> Run:
        """Queue a workflow and return at once."""
        return Run(self.client, prompt)

    def run(self, prompt: Prompt, *, timeout: float = TIMEOUT) -> Outcome:
        """Queue a workflow and wait for its end, whatever its outcome."""
        return self.start(prompt).result(timeout=timeout)

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """ComfyUI's description of all nodes, or of one."""
        info = self.client.ask("/object_info" if node is None else f"/object_info/{node}")
        return info if node is None else info[node]

    def free(self) -> None:
        """Ask ComfyUI to unload its models and to drop its cached outputs."""
        self.client.ask("/free", {"unload_models": True, "free_memory": True})

    def pictures(self, outcome: Outcome) -> list[Path]:
        """The files that SaveImage wrote in this run."""
        images = [image for output in outcome.outputs.values() for image in output.get("images", [])]
        return [self.base / image["type"] / image["subfolder"] / image["filename"] for image in images]
