"""A ComfyUI as a child process: starting, querying and ending it."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import PeerError
from ..python_process import python_environment

LOG = logging.getLogger(__name__)
LAUNCHER = Path(__file__).with_name("launch_comfyui.py")
LOG_LINES = 25
POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0
OUTSIDE_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def operators_missing(python: Path) -> bool:
    """Whether the environment of `python` has a torchvision whose compiled operators the installer removed."""
    packages = [folder / "torchvision" for folder in python.parent.parent.glob("lib/python3*/site-packages")]
    return any(folder.is_dir() and not any(folder.glob("_C*.so")) for folder in packages)


def command(python: Path, comfyui: Path) -> list[str]:
    """The command line that runs main.py of the folder `comfyui`, without arguments; uses our launcher only where
    required.
    """
    if operators_missing(python):
        return [str(python), str(LAUNCHER), str(comfyui)]
    return [str(python), str(comfyui / "main.py")]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Client:
    """The HTTP interface of a ComfyUI on this machine."""

    port: int

    def ask(self, route: str, body: Mapping[str, Any] | None = None, *, timeout: float = ANSWER_SECONDS) -> Any:
        """GET `route`, or POST `body` to it as JSON; returns the decoded response, None for an empty one. PeerError if
        it is refused.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", data, {"Content-Type": "application/json"}
        )
        try:
            with OUTSIDE_PROXY.open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as refused:
            detail = refused.read(4000).decode(errors="replace")
            raise PeerError(f"ComfyUI refused {route} with status {refused.code}: {detail}") from refused
        except (OSError, TimeoutError) as lost:
            raise PeerError(f"ComfyUI at port {self.port} gave no answer to {route}: {lost}") from lost
        return json.loads(text) if text else None

    def queue(self, prompt: Mapping[str, Any], *, client_id: str = "onedesk") -> str:
        """Queue a workflow in API format; returns its id."""
        return self.ask("/prompt", {"prompt": prompt, "client_id": client_id})["prompt_id"]

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The entry of a finished prompt (keys outputs, status), None while it is queued or running."""
        return self.ask(f"/history/{prompt_id}").get(prompt_id)

    def wait(self, prompt_id: str, *, timeout: float) -> dict[str, Any]:
        """The history entry of `prompt_id`, waiting at most `timeout` seconds; PeerError after that."""
        end = time.monotonic() + timeout
        while (entry := self.history(prompt_id)) is None:
            if time.monotonic() > end:
                raise PeerError(
                    f"ComfyUI did not finish the workflow within {timeout:g} s; its log says what it is doing"
                )
            time.sleep(POLL_SECONDS)
        return entry


class ComfyProcess:
    """A ComfyUI as our child on a port of 127.0.0.1, ended by its process id. A context manager.

    `arguments` follow main.py; port and listen address are added here. Its output goes to the file `log`.
    """

    def __init__(
        self,
        python: Path,
        comfyui: Path,
        arguments: Sequence[str],
        *,
        log: Path,
        port: int | None = None,
        environment: Mapping[str, str],
    ) -> None:
        self.client = Client(port or free_port())
        self.log = log
        self.argv = [*command(python, comfyui), *arguments, "--listen", "127.0.0.1", "--port", str(self.client.port)]
        self.environment = {**python_environment(), **environment, "PYTHONUNBUFFERED": "1"}
        self.folder = comfyui
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout: float = 240.0) -> Client:
        """Start it and return once it responds; PeerError with the end of its log if it exits or does not respond in
        `timeout` seconds.
        """
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self.folder
            )
        answered = False
        try:
            self._await_answer(self.child, time.monotonic() + timeout, timeout)
            answered = True
        finally:
            if not answered:  # an interrupt must not leave it running either
                self.stop()
        return self.client

    def _await_answer(self, child: subprocess.Popen[bytes], end: float, timeout: float) -> None:
        while not self._answers():
            if child.poll() is not None:
                raise PeerError(f"ComfyUI ended while starting, with exit status {child.returncode}:\n{self.log_end()}")
            if time.monotonic() > end:
                raise PeerError(f"ComfyUI did not answer within {timeout:g} s:\n{self.log_end()}")
            time.sleep(POLL_SECONDS)

    def _answers(self) -> bool:
        try:
            self.client.ask("/system_stats", timeout=2.0)
        except PeerError:
            return False
        return True

    def log_end(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self, *, patience: float = 15.0) -> None:
        """End the child: SIGTERM first, SIGKILL after `patience` seconds. Does nothing if it has already ended."""
        if self.child is None or self.child.poll() is not None:
            return
        self.child.terminate()
        try:
            self.child.wait(patience)
        except subprocess.TimeoutExpired:
            LOG.warning("ComfyUI (process %d) did not end within %g s; killing it", self.child.pid, patience)
            self.child.kill()
            self.child.wait()

    def __enter__(self) -> ComfyProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
