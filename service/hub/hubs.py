"""The hubs that a pull asks, in order, with one session each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from yarl import URL

from ..config import Config
from ..errors import FileError, OnedeskError, PeerError, RequestError
from ..loader.files import short
from . import huggingface, modelscope
from .limits import HubLimits
from .local_files import LocalFiles, cached_snapshot
from .names import Wanted, endpoints
from .plan import read_small
from .remote import RemoteFile, Report, RepositorySnapshot
from .web import Web

SMALL_LIMIT = 32 << 20  # bytes of a configuration or an index of shards
_OFF = ("", "0", "false", "no", "off")


class Hubs:
    """The hubs that a pull asks, in order, and the local files it may use. An asynchronous context manager."""

    def __init__(
        self, limits: HubLimits, report: Report, environment: Mapping[str, str], local: LocalFiles | None = None
    ) -> None:
        self.local = local
        self.offline = environment.get("HF_HUB_OFFLINE", "").lower() not in _OFF
        self._environment = environment
        self._limits = limits
        self._report = report
        self._stack = AsyncExitStack()
        self._webs: list[Web] = []
        self._known: dict[tuple[str, str | None], RepositorySnapshot] = {}

    async def __aenter__(self) -> Hubs:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def open(self, config: Config, wanted: Wanted, source: str | None) -> None:
        """Open a session for each hub. Raises RequestError, FileError."""
        if self.offline:
            return
        for endpoint in endpoints(config, wanted, source, self._environment):
            self._webs.append(await self._stack.enter_async_context(Web(endpoint, self._limits, self._report)))

    async def snapshot(self, repo: str, revision: str | None) -> RepositorySnapshot:
        """The repository from the first hub that can be reached, otherwise from a local cache.

        Raises PeerError, ModelError, RequestError.
        """
        if (repo, revision) not in self._known:
            self._known[repo, revision] = await self._ask(repo, revision)
        return self._known[repo, revision]

    async def _ask(self, repo: str, revision: str | None) -> RepositorySnapshot:
        failures: list[PeerError] = []
        for web in self._webs:
            read = modelscope.read_snapshot if web.endpoint.hub == "modelscope" else huggingface.read_snapshot
            try:
                return await read(web, repo, revision)
            except PeerError as error:
                # Try another hub only if this one did not respond at all: the same name may have another owner there.
                if web.answered:
                    raise
                failures.append(error)
                self._report({"event": "fallback", "host": web.endpoint.url.host, "reason": str(error)})
        cached = None if self.local is None else cached_snapshot(self.local.root, repo, revision)
        if cached is None:
            raise _unreachable(failures)
        return cached

    def web(self, snapshot: RepositorySnapshot) -> Web | None:
        """The session of a snapshot's hub; None for a local cache."""
        return next((web for web in self._webs if web.answered and web.endpoint.url == snapshot.endpoint), None)

    async def read(self, snapshot: RepositorySnapshot, file: RemoteFile) -> bytes:
        """The checked content of a small file. Raises FileError, PeerError."""
        found = None if self.local is None else self.local.content(file, SMALL_LIMIT)
        if found is not None:
            return found
        web = self.web(snapshot)
        if web is None:
            raise FileError(
                f"{short(file.path)} of {snapshot.repo} is not in the folder of --import, and no hub can be asked"
            )
        return await read_small(web, file_address(snapshot, file.path), file, SMALL_LIMIT)


def _unreachable(failures: Sequence[PeerError]) -> OnedeskError:
    """What to raise when no hub answered: the reason of each that was asked."""
    if not failures:
        return RequestError("HF_HUB_OFFLINE is set, so no hub is asked; unset it for this command")
    return failures[0] if len(failures) == 1 else PeerError("; ".join(map(str, failures)))


def file_address(snapshot: RepositorySnapshot, path: str) -> URL:
    """The address from which a file is fetched."""
    module = modelscope if snapshot.hub == "modelscope" else huggingface
    return module.file_url(snapshot.endpoint, snapshot.repo, snapshot.revision, path)
