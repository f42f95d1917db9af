"""Talks to the service of this tree: for the command, and for hosts that keep no model of their own."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import PeerError
from .note import Note, running
from .token_file import read_token

ANSWER_SECONDS = 10.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """A way to one running service."""

    note: Note
    token: str | None

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = ANSWER_SECONDS) -> Any:
        """The document of an answer. Raises PeerError with what the service says, or why it does not answer within `seconds`."""
        with self.answering(method, path, body, seconds=seconds) as response:
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise PeerError(f"the service at {self.note.where} answers what is no JSON; is it another program?") from error

    @contextmanager
    def answering(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = ANSWER_SECONDS
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer while it comes; `seconds` bounds each wait. The connection ends with the block. Raises PeerError as `ask` does."""
        connection = self._connection(seconds)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise PeerError(_message(response, self.note.where))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"the service at {self.note.where} does not answer ({error}); start it anew with `onedesk serve`") from error
        finally:
            connection.close()

    def _connection(self, seconds: float | None) -> http.client.HTTPConnection:
        if self.note.uds is not None:
            return _UnixConnection(self.note.uds, seconds)
        return http.client.HTTPConnection(self.note.host or "127.0.0.1", self.note.port, timeout=seconds)


def find_service(cache: Path) -> ServiceClient | None:
    """The service of the tree with this cache, None where none runs. Raises FileError for a token that cannot be read."""
    note = running(cache)
    if note is None:
        return None
    return ServiceClient(note, None if note.token_file is None else read_token(Path(note.token_file)))


def with_service(report: dict[str, Any], config: Config) -> dict[str, Any]:
    """The document of `onedesk memory` with the budget, leases and counters of this tree's service, where one runs."""
    client = find_service(config.cache)
    if client is None:
        return report
    theirs = client.ask("GET", "/v1/memory")
    service = {"pid": client.note.pid, "where": client.note.where, "asleep": theirs["asleep"]}
    kept = {key: theirs[key] for key in ("budget", "leases", "counters", "leaks")}
    return report | kept | {"service": service}


def _message(response: http.client.HTTPResponse, where: str) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service at {where} answers with status {response.status}"
