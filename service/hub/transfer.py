"""One file over one connection at a time, with as many attempts as needed: ranges, dropped connections, stalls, changed
files.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from ..errors import ModelError, PeerError, RequestError
from ..loader.files import short
from . import huggingface, modelscope
from .part import PartialFile
from .remote import RepositorySnapshot
from .web import PASSING, TransientError, Web, reason_of, wait_asked

BLOCK = 1 << 20  # bytes written and hashed at a time
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_HASH = re.compile(r'"?([0-9a-f]{64})"?')


@dataclass(slots=True)
class Pace:
    """Counts the bytes of all connections, and slows them down to `rate` bytes per second (0: no limit)."""

    rate: float
    received: int = 0
    _next: float = field(default_factory=time.monotonic)

    async def take(self, count: int) -> None:
        self.received += count
        if self.rate <= 0:
            return
        self._next = max(self._next, time.monotonic() - 0.5) + count / self.rate
        delay = self._next - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)


class Transfer:
    """Fetches the files of one snapshot."""

    def __init__(self, web: Web, snapshot: RepositorySnapshot, pace: Pace) -> None:
        self._web = web
        self._snapshot = snapshot
        self._pace = pace

    async def fetch(self, part: PartialFile) -> None:
        """Complete an open part. Raises PeerError, ModelError, RequestError, OSError."""
        tries, limits = 0, self._web.limits
        while part.done < part.file.size:
            before = part.done
            try:
                await self._receive(part)
                return
            except TransientError as error:
                gained = part.done - before
                tries = 0 if gained >= min(limits.progress, part.file.size - before) > 0 else tries
                tries += 1
                await asyncio.to_thread(part.sync)
                await self._web.pause(error, tries, part.file.path)

    def _url(self, path: str) -> URL:
        module = modelscope if self._snapshot.hub == "modelscope" else huggingface
        return module.file_url(self._web.endpoint.url, self._snapshot.repo, self._snapshot.revision, path)

    async def _receive(self, part: PartialFile) -> None:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={part.done}-"}
        if part.done and part.etag:
            headers["If-Range"] = part.etag
        async with self._web.open(self._url(part.file.path), headers) as (response, redirects):
            self._check(response, redirects, part)
            if response.status == 416:
                self._again(part, f"{response.url.host} has fewer bytes")
                await asyncio.to_thread(part.restart)
                raise TransientError(f"{response.url.host} does not have the asked range")
            if response.status == 200 and part.done:
                self._again(part, f"{response.url.host} sends the file from its start")
                await asyncio.to_thread(part.restart)
            etag = response.headers.get("ETag")
            part.etag = etag if etag and not etag.startswith("W/") and etag.isascii() and etag.isprintable() else None
            await self._read(response, part)

    def _again(self, part: PartialFile, reason: str) -> None:
        self._web.report({"event": "restart", "path": part.file.path, "reason": reason, "lost": part.done})

    def _check(
        self, response: aiohttp.ClientResponse, redirects: list[aiohttp.ClientResponse], part: PartialFile
    ) -> None:
        """Raise if a response does not have the file's bytes from the needed offset."""
        status, host, file = response.status, response.url.host, part.file
        if status in PASSING:
            raise TransientError(f"{host} answers {status}", wait_asked(response.headers))
        if status == 416 and part.done:
            return
        if status not in (200, 206):
            # A signed address expires: the endpoint gives a new one.
            if response.url.origin() != self._web.endpoint.url.origin():
                raise TransientError(f"{host} answers {status}; the hub is asked for a new address")
            raise self._refusal(response, file.path)
        for answer in (*redirects, response):
            linked = _HASH.fullmatch(answer.headers.get("X-Linked-Etag", ""))
            if linked and file.sha256 and linked[1] != file.sha256:
                raise PeerError(
                    f"{answer.url.host} has other content for {short(file.path)} than its list says; run the command"
                    " again"
                )
        if "html" in response.content_type and not file.path.endswith((".html", ".htm")):
            raise PeerError(
                f"{host} answers with a web page instead of {short(file.path)}; does a login page intercept it?"
            )
        if status == 206:
            self._check_range(response, part)
        elif response.headers.get("Content-Encoding", "identity") == "identity":
            length = response.content_length
            if length is not None and length != file.size:
                raise PeerError(
                    f"{host} sends {length} bytes for {short(file.path)}, its list says {file.size}; run the command"
                    " again"
                )

    def _check_range(self, response: aiohttp.ClientResponse, part: PartialFile) -> None:
        host, file = response.url.host, part.file
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if (
            found is None
            or int(found[1]) != part.done
            or response.headers.get("Content-Encoding", "identity") != "identity"
        ):
            raise TransientError(f"{host} sends another range than was asked")
        if found[3] != "*" and int(found[3]) != file.size:
            raise PeerError(
                f"{host} has {found[3]} bytes of {short(file.path)}, its list says {file.size}; run the command again"
            )

    def _refusal(self, response: aiohttp.ClientResponse, path: str) -> PeerError | ModelError | RequestError:
        snapshot = self._snapshot
        return huggingface.refusal(self._web, response.status, response.headers, snapshot.repo, snapshot.commit, path)

    async def _read(self, response: aiohttp.ClientResponse, part: PartialFile) -> None:
        """Write the body as it comes. Raises TransientError if it ends early or is too slow."""
        limits, host, block = self._web.limits, response.url.host, bytearray()
        since, in_window = time.monotonic(), 0
        writing: asyncio.Task[None] | None = None
        received = part.done
        try:
            while True:
                try:
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                    raise TransientError(f"the connection to {host} ended early: {reason_of(error)}") from error
                if not chunk:
                    break
                received += len(chunk)
                in_window += len(chunk)
                if received > part.file.size:
                    raise PeerError(
                        f"{host} sends more than the {part.file.size} bytes of {short(part.file.path)}; run the command"
                        " again"
                    )
                block += chunk
                await self._pace.take(len(chunk))
                if len(block) >= BLOCK:
                    if writing is not None:
                        await writing
                    writing, block = asyncio.create_task(asyncio.to_thread(part.write, block)), bytearray()
                now = time.monotonic()
                if now - since >= limits.stall:
                    if in_window < limits.stall_rate * (now - since):
                        raise TransientError(f"{host} sent only {in_window} bytes in {now - since:.0f} s")
                    since, in_window = now, 0
            if received < part.file.size:
                raise TransientError(f"{host} ended the file after {received} of {part.file.size} bytes")
        finally:
            # Also on an interrupt: received bytes are kept.
            if writing is not None:
                await asyncio.shield(writing)
            if block:
                await asyncio.shield(asyncio.create_task(asyncio.to_thread(part.write, block)))
