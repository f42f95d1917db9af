"""One HTTP request to a server, its response whole or as server-sent events, and failures as errors of our family.

Every request has a connection of its own: closing it tells the server that the response is no longer wanted. Errors
contain no address and no key. Redirects are not followed, so that no key goes to another server.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import (
    Cancelled,
    MemoryFull,
    ModelError,
    OnedeskError,
    PeerError,
    RequestError,
)
from .peer import PeerAddress

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 10.0
DOCUMENT_LIMIT = 64 << 20  # bytes of a complete response
LINE_LIMIT = 16 << 20  # bytes of one event
_PIECE = 1 << 16  # most bytes per read, and of a request that a socket accepts at once
_HERE = ("127.0.0.1", "::1", "localhost")
_SAID_LIMIT = 400  # characters quoted from a server's error
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
# Our service's error codes and their classes. Other servers' errors are classified by status.
_BY_CODE: Mapping[str, type[OnedeskError]] = {
    "memory_full": MemoryFull,
    "model_unusable": ModelError,
    "model_not_found": ModelError,
    "invalid_request": RequestError,
    "wrong_value": RequestError,
    "missing_field": RequestError,
    "unknown_field": RequestError,
    "unsupported": RequestError,
}


class _Plain(http.client.HTTPConnection):
    """Sends headers and body together. Separately they are two packets and two wake-ups, and the server needs one more
    waiting task.
    """

    _parts: list[Any] | None = None

    def ask(self, method: str, route: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        """As `request`, on an open connection."""
        self._parts = parts = []
        try:
            self.request(method, route, body, headers)
        finally:
            self._parts = None
        super().send(b"".join(parts))

    def send(self, data: Any) -> None:
        if self._parts is None:
            super().send(data)
        else:
            self._parts.append(data)


class _Encrypted(http.client.HTTPSConnection, _Plain):
    """The same over TLS."""


class _Unix(_Plain):
    """The same over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Exchange:
    """A request and its response. `abort` may be called from any thread, everything else from one thread.

    `silence` is the longest time in seconds without a byte; None: the address's own value. A context manager that
    closes the connection.
    """

    def __init__(
        self,
        address: PeerAddress,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        silence: float | None = None,
    ) -> None:
        self._address = address
        self._method = method
        self._route = address.path + route
        self._body = None if body is None else json.dumps(body).encode()
        self._silence = address.silence if silence is None else silence
        self._lock = threading.Lock()
        self._aborted = False
        self._socket: socket.socket | None = None
        self._connection: _Plain | None = None
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def document(self) -> Any:
        """The complete response, which must be JSON. Raises PeerError, or the error that the server sent."""
        with self._telling():
            raw = self._open().read(DOCUMENT_LIMIT + 1)
        if len(raw) > DOCUMENT_LIMIT:
            raise PeerError(
                f"{self._address.title} answers with more than {DOCUMENT_LIMIT} bytes; is it another program?"
            )
        return self._parsed(raw)

    def documents(self) -> Iterator[dict[str, Any]]:
        """The response, event by event, until [DONE] or its end. Raises as `document`."""
        with self._telling():
            response = self._open()
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise PeerError(
                f"{self._address.title} answers with {_shown(kind, self._address)} and not with a stream; does it speak"
                " OpenAI's API?"
            )
        data: list[bytes] = []
        for line in self._lines(response):
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                raw, data = b"\n".join(data), []
                if raw == b"[DONE]":
                    return
                document = self._parsed(raw)
                if not isinstance(document, dict):
                    raise PeerError(
                        f"{self._address.title} sends an event that is not an object; does it speak OpenAI's API?"
                    )
                yield document

    def abort(self) -> None:
        """End it at once, even while another thread waits for the response; that thread gets Cancelled. The server
        frees its slot.
        """
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                _shut(self._socket)

    def close(self) -> None:
        """Close the connection."""
        for part in (self._response, self._connection):
            if part is not None:
                part.close()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @property
    def near(self) -> bool:
        """Whether sending the request does not block: it fits the buffer of a socket on this machine."""
        here = self._address.uds is not None or (self._address.host in _HERE and not self._address.tls)
        return here and len(self._body or b"") <= _PIECE

    def send(self) -> None:
        """Connect and send the request. If it was not called before, reading the response calls it. Raises PeerError,
        Cancelled.
        """
        with self._telling():
            self._send()

    def _send(self) -> _Plain:
        address = self._address
        connection = self._connection = _connection(address)
        connection.connect()
        with self._lock:
            self._socket = connection.sock
            if self._aborted:
                _shut(connection.sock)
        connection.sock.settimeout(self._silence)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "Connection": "close",
        }
        if address.key is not None:
            headers["Authorization"] = f"Bearer {address.key}"
        connection.ask(self._method, self._route, self._body, headers)
        return connection

    def _open(self) -> http.client.HTTPResponse:
        address, connection = self._address, self._connection or self._send()
        response = self._response = connection.getresponse()
        if response.status != 200:
            raise failure(address, response.status, response.read(DOCUMENT_LIMIT))
        return response

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The complete lines, without line ends. Reads everything available at once; the response's own readline makes
        several calls per line and chunk. A last line without an end is dropped.
        """
        rest = b""
        while True:
            with self._telling():
                came = response.read1(_PIECE)
            if not came:
                return
            *lines, rest = (rest + came).split(b"\n")
            for line in lines:
                yield line.removesuffix(b"\r")
            if len(rest) > LINE_LIMIT:
                raise PeerError(
                    f"{self._address.title} sends an event of more than {LINE_LIMIT} bytes; does it speak OpenAI's API?"
                )

    def _parsed(self, raw: bytes) -> Any:
        try:
            return json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            raise PeerError(f"{self._address.title} answers what is not JSON; does it speak OpenAI's API?") from None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn exceptions of the connection into PeerError, or into Cancelled after `abort`."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self._check_aborted()
            raise PeerError(f"{self._address.title} {self._why(error)}") from None
        self._check_aborted()

    def _check_aborted(self) -> None:
        if self._aborted:
            raise Cancelled(f"stopped while waiting for {self._address.title}") from None

    def _why(self, error: OSError | http.client.HTTPException) -> str:
        """What happened and what to do, without addresses that the exception may contain."""
        if isinstance(
            error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError | http.client.IncompleteRead
        ):
            return "closed the connection in the middle; look at its log, then run again"
        if isinstance(error, http.client.HTTPException):
            return "answers what is not HTTP; is it another program?"
        if isinstance(error, TimeoutError):
            return (
                f"said nothing for {(self._silence if self._socket else CONNECT_SECONDS):g} s; look whether it works,"
                " then run again"
            )
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return "does not answer: no program listens there; start it, or correct its entry in onedesk.toml"
        if isinstance(error, socket.gaierror):
            return "cannot be found by its name; correct its url in onedesk.toml"
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                "shows a certificate that is not accepted; correct its url, or let this machine trust the certificate"
            )
        if isinstance(error, ssl.SSLError):
            return "does not speak TLS as its url says; correct its url in onedesk.toml"
        return (
            f"cannot be reached ({error.strerror or type(error).__name__}); look at the network and its entry in"
            " onedesk.toml"
        )


def ask(
    address: PeerAddress,
    method: str,
    route: str,
    body: Mapping[str, Any] | None = None,
    *,
    seconds: float = ANSWER_SECONDS,
) -> Any:
    """The document of a response, waiting at most `seconds` for each part. Raises as Exchange.document."""
    with Exchange(address, method, route, body, silence=seconds) as exchange:
        return exchange.document()


def failure(address: PeerAddress, status: int, raw: bytes | Mapping[str, Any]) -> OnedeskError:
    """The error for a response of `status` with the body `raw`, or for an error event within a stream (status 200)."""
    error = _error_of(raw)
    message, code = error.get("message"), error.get("code")
    said = _shown(message, address) if isinstance(message, str) and message.strip() else ""
    if status in (401, 403):
        return PeerError(
            f"{address.title} refuses the key (status {status}); correct key_file in onedesk.toml, or the server's own"
        )
    if address.dialect == "onedesk" and isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code](said)
    if status == 200:
        return PeerError(
            f"{address.title} failed in the middle of an answer: {said or 'it does not say why'}; look at its log"
        )
    if 300 <= status < 400:
        return PeerError(
            f"{address.title} sends elsewhere (status {status}), and keys are not sent on; write its final url"
        )
    if status in (400, 404, 409, 413, 422):
        return RequestError(f"{address.title} refuses the request (status {status}): {said or 'it does not say why'}")
    if status in (429, 503):
        return PeerError(
            f"{address.title} takes nothing now (status {status}): {said or 'it does not say why'}; run again later"
        )
    return PeerError(f"{address.title} failed (status {status}): {said or 'it does not say why'}; look at its log")


def _error_of(raw: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """The `error` of a body in OpenAI's shape; parts may be missing."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            return {}
    error = raw.get("error", raw) if isinstance(raw, Mapping) else None
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, Mapping) else {}


def _shown(text: str, address: PeerAddress) -> str:
    """A server's text for people and logs: one short line, without its address and key."""
    names = (address.key, address.host if address.uds is None else address.uds)
    for secret in (name for name in names if name):
        text = text.replace(secret, "[...]")
    line = _UNPRINTABLE.sub(" ", text).strip()
    return line if len(line) <= _SAID_LIMIT else line[:_SAID_LIMIT] + "..."


def _connection(address: PeerAddress) -> _Plain:
    if address.uds is not None:
        return _Unix(address.uds)
    kind = _Encrypted if address.tls else _Plain
    return kind(address.host, address.port, timeout=CONNECT_SECONDS)


def _shut(made: socket.socket) -> None:
    try:
        made.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has already ended
        return
