"""An independent server that speaks OpenAI's API, by its entry's name in onedesk.toml. It manages its own memory."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..config import PeerSettings
from ..core import CancelCheck
from ..errors import FileError
from .peer import Peer, PeerAddress
from .token_file import read_token


class OtherServer(Peer):
    """The server of a [peers.NAME] of kind "openai"."""

    def __init__(self, settings: PeerSettings) -> None:
        self.title = f"the server {settings.name}"
        self._settings = settings

    def reach(self, cancel: CancelCheck | None = None) -> PeerAddress:
        """Its address, from its entry. Raises FileError for an invalid url or key; messages contain neither."""
        entry = f"[peers.{self._settings.name}] in onedesk.toml"
        try:
            url = urlsplit(self._settings.url)
            host, port = url.hostname, url.port
        except ValueError:
            host, port, url = None, None, urlsplit("")
        if (
            url.scheme not in ("http", "https")
            or not host
            or "@" in url.netloc
            or url.query
            or url.fragment
            or not _is_host(host)
        ):
            raise FileError(f"url in {entry} is not an address of a server; write it as http://HOST:PORT/v1")
        key_file = self._settings.key_file
        tls = url.scheme == "https"
        return PeerAddress(
            self.title,
            host=host,
            port=port or (443 if tls else 80),
            path=url.path.rstrip("/"),
            tls=tls,
            key=None if key_file is None else read_token(key_file, shortest=1, advice=f"correct key_file in {entry}"),
        )

    def close(self) -> None:
        """Nothing to do: the server is not ours."""


def _is_host(host: str) -> bool:
    return (
        host.isascii()
        and host.isprintable()
        and " " not in host
        and all(0 < len(part) < 64 for part in host.strip(".").split("."))
    )
