"""HTTP for a pull: redirects by our own rules, tokens for the endpoint only, waiting when a server asks for it."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from ..errors import PeerError
from .addresses import GuardedResolver, Reach, literal
from .limits import HubLimits
from .remote import PAGES, HubKind, Report

REDIRECTS = 5
JSON_BYTES = 64 << 20  # a tree of 100,000 files has about 30 MB
_RATE_LEFT = re.compile(r"(?:^|;)\s*t=(\d+)")
_REDIRECTED = (301, 302, 303, 307, 308)
# Statuses after which the same request may succeed.
PASSING = (408, 425, 429, 500, 502, 503, 504)


class TransientError(Exception):
    """A failure after which the same request may succeed; `wait` is how many seconds the server asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a hub or mirror, and the token that is sent to it and no other host.

    `token_hint` is the name of the token's file in messages.
    """

    hub: HubKind
    url: URL
    token: str | None = field(default=None, repr=False)
    token_hint: str = ""

    @property
    def title(self) -> str:
        """Its name in messages: the hub's name, or the host of a mirror."""
        host = self.url.host or ""
        return PAGES[self.hub] if host.endswith(("huggingface.co", "modelscope.cn", "modelscope.ai")) else host

    def headers_for(self, url: URL) -> dict[str, str]:
        """The headers that carry the token, for a request to the endpoint itself; none for any other origin."""
        if self.token is None or url.origin() != self.url.origin():
            return {}
        if self.hub == "modelscope":
            return {"Cookie": f"m_session_id={self.token}"}
        return {"Authorization": f"Bearer {self.token}"}


@dataclass(frozen=True, slots=True)
class HubResponse:
    """A JSON response, its headers, and the address that sent it."""

    status: int
    document: Any
    headers: Mapping[str, str]
    url: URL
    redirected: bool


class Web:
    """One session for one endpoint. Use it as an asynchronous context manager."""

    def __init__(self, endpoint: Endpoint, limits: HubLimits, report: Report) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.report = report
        self.answered = False  # whether the endpoint has responded at all
        self._proxies = urllib.request.getproxies()
        hosts = [host for text in self._proxies.values() if (host := _host(text))]
        self._reach = Reach([endpoint.url], hosts)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Web:
        resolver = GuardedResolver(self._reach, aiohttp.ThreadedResolver())
        connector = aiohttp.TCPConnector(
            resolver=resolver, ssl=ssl.create_default_context(), limit=self.limits.connections + 2
        )
        # Time limits are per connection and per read; a file may take any time.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect, sock_read=self.limits.stall)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "onedesk"},
            trust_env=False,  # it would also send passwords from ~/.netrc
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def open(
        self, url: URL, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, list[aiohttp.ClientResponse]]]:
        """Send a GET and follow redirects by the rules; yields the last response, and the redirects before it.

        Raises TransientError for a failed connection, PeerError for an address that must not be followed.
        """
        if self._session is None:
            raise RuntimeError("the session is not open")
        before: list[aiohttp.ClientResponse] = []
        came_from: URL | None = None
        for _ in range(REDIRECTS + 1):
            self._reach.check_url(url, came_from)
            response = await self._get(url, {**headers, **self.endpoint.headers_for(url)})
            target = response.headers.get("Location")
            if response.status not in _REDIRECTED or not target:
                try:
                    yield response, before
                finally:
                    response.close()
                return
            response.close()
            before.append(response)
            came_from = url
            try:
                url = url.join(URL(target, encoded=True))
            except ValueError as error:
                raise PeerError(
                    f"{came_from.host} redirects to an address that is not one; try later, or another --from"
                ) from error
        raise PeerError(f"{url.host} redirects more than {REDIRECTS} times; try later, or another --from")

    async def _get(self, url: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._session is not None  # noqa: S101 - `open` has looked
        try:
            response = await self._session.get(url, headers=headers, allow_redirects=False, proxy=self._proxy(url))
        except asyncio.TimeoutError as error:
            raise TransientError(f"{url.host} did not answer within {self.limits.stall:g} s") from error
        except aiohttp.InvalidURL as error:
            raise PeerError(f"{url.host} is not a host that can be reached; check the address") from error
        except aiohttp.ClientSSLError as error:
            raise PeerError(
                f"no safe connection to {url.host}: {reason_of(error)}; SSL_CERT_FILE names another list of authorities"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"no connection to {url.host}: {reason_of(error)}") from error
        self.answered = self.answered or response.status not in PASSING
        return response

    def _proxy(self, url: URL) -> str | None:
        address = literal(url.host or "")
        if (address is not None and address.is_loopback) or urllib.request.proxy_bypass(url.host or ""):
            return None
        return self._proxies.get(url.scheme) or self._proxies.get("all")

    async def json(self, url: URL) -> HubResponse:
        """The JSON response of an address, with any status. Retries temporary failures.

        Raises PeerError for a response that is not JSON, or a host that stays unreachable.
        """
        tries = 0
        while True:
            try:
                return await self._json(url)
            except TransientError as error:
                tries += 1
                await self.pause(error, tries, None)

    async def _json(self, url: URL) -> HubResponse:
        async with self.open(url, {"Accept": "application/json"}) as (response, redirects):
            host = response.url.host
            raw = await _body(response, JSON_BYTES)
            if response.status in PASSING:
                raise TransientError(f"{host} answers {response.status}", wait_asked(response.headers))
            try:
                document = json.loads(raw)
            except (ValueError, RecursionError) as error:
                if response.status < 400:
                    kind = "a web page" if raw.lstrip()[:1] == b"<" else "something else"
                    raise PeerError(
                        f"{host} answers with {kind} instead of JSON; is it a hub, or does a login page intercept it?"
                    ) from error
                document = {}
            return HubResponse(response.status, document, response.headers, response.url, bool(redirects))

    async def content(self, url: URL, size: int) -> bytes:
        """A small file of exactly `size` bytes. Raises PeerError."""
        tries = 0
        while True:
            try:
                async with self.open(url, {"Accept-Encoding": "identity"}) as (response, _):
                    if response.status in PASSING:
                        wait = wait_asked(response.headers)
                        raise TransientError(f"{response.url.host} answers {response.status}", wait)
                    if response.status != 200:
                        raise PeerError(
                            f"{response.url.host} answers {response.status} for a file that its list has; run the"
                            " command again"
                        )
                    raw = await _body(response, max(size, 1))
                    if len(raw) != size:
                        raise TransientError(f"{response.url.host} sends {len(raw)} bytes of {size}")
                    return raw
            except TransientError as error:
                tries += 1
                await self.pause(error, tries, None)

    async def pause(self, error: TransientError, tries: int, path: str | None) -> None:
        """Wait before attempt `tries` + 1. Raises PeerError after the last one, or if the server asks for too long."""
        limits = self.limits
        if tries >= (limits.tries if self.answered else min(limits.tries, limits.first_tries)):
            raise PeerError(f"{error}, in {tries} tries; run the command again later, or use another --from") from error
        wait = min(limits.longest_backoff, limits.backoff * 2 ** (tries - 1)) if error.wait is None else error.wait
        if wait > limits.longest_wait:
            raise PeerError(
                f"{error} and asks to wait {wait:.0f} s; run the command again then, a token raises the limits"
            ) from error
        self.report({"event": "retry", "path": path, "reason": str(error), "attempt": tries, "wait": wait})
        await asyncio.sleep(wait)


def wait_asked(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait after a 429 or 503: `t` in Hugging Face's `ratelimit` header, otherwise Retry-After."""
    left = _RATE_LEFT.search(headers.get("ratelimit", ""))
    if left:
        return float(left[1]) + 1
    after = headers.get("Retry-After", "")
    return float(after) if after.isascii() and after.isdigit() and len(after) < 10 else None


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts, size = [], 0
    try:
        async for chunk in response.content.iter_any():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise PeerError(
                    f"{response.url.host} sends more than the {limit} bytes that are possible here; run the command"
                    " again"
                )
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise TransientError(f"the connection to {response.url.host} ended early: {reason_of(error)}") from error
    return b"".join(parts)


def reason_of(error: BaseException) -> str:
    """What went wrong, without addresses: a signed one must not reach a log."""
    if isinstance(error, asyncio.TimeoutError):
        return "no bytes in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


def _host(text: str) -> str | None:
    try:
        return URL(text if "//" in text else f"http://{text}").host
    except ValueError:
        return None
