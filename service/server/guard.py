"""Access control: the token, and the Host and Origin headers, which a web page in the user's browser cannot fake."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import RequestError
from ..peers.token_file import matches
from .error_documents import ApiError

OPEN_ROUTES = frozenset({"/health"})
_LOCAL_NAMES = frozenset({"localhost"})


@dataclass(frozen=True, slots=True)
class Guard:
    """What a request must show.

    `token` None: no token is required. `names` are the accepted hosts; None on a unix socket, which no browser reaches.
    """

    token: str | None
    names: frozenset[str] | None

    def check(self, request: web.Request) -> None:
        """Raise ApiError 403 for a foreign Host or Origin, 401 without the token (on every route but /health)."""
        if self.names is not None:
            self._check_host(request.headers.getall("Host", []))
            _check_origin(request)
        if self.token is None or request.path in OPEN_ROUTES:
            return
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if "Authorization" not in request.headers:  # the header of Anthropic's clients
            scheme, shown = "bearer", request.headers.get("X-Api-Key", "")
        if scheme.lower() != "bearer" or not matches(shown.strip(), self.token):
            message = (
                "the token is missing or wrong; send Authorization: Bearer TOKEN, from the file that `onedesk serve`"
                " names"
            )
            raise ApiError(401, message, code="invalid_api_key")

    def _check_host(self, shown: Sequence[str]) -> None:
        if len(shown) != 1 or not self._is_ours(shown[0]):
            raise ApiError(
                403, "the Host header names another machine; address the service by its own name", code="wrong_host"
            )

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None or self.names is None or any(sign in host for sign in "/?#@"):
            return False
        return name in self.names or ("*" in self.names and _is_address(name))


def _check_origin(request: web.Request) -> None:
    # Browsers send the origin of a request; programs do not.
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "requests from web pages are not answered", code="wrong_origin")


def own_names(host: str) -> frozenset[str]:
    """The names that a service bound to `host` answers to; "*" stands for any numeric address."""
    if is_loopback(host):
        return _LOCAL_NAMES | {"127.0.0.1", "::1", host.lower()}
    return _LOCAL_NAMES | {socket.gethostname().lower(), socket.getfqdn().lower(), host.lower(), "*"}


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only. Raises RequestError for a name that cannot be resolved."""
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise RequestError(
            f"the host {host!r} cannot be found; use 127.0.0.1, or an address of this machine"
        ) from error
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
