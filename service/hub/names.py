"""Parses what a user names: a repository, a short name, a page's address, and the hub or mirror to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from yarl import URL

from ..config import Config
from ..errors import RequestError
from ..loader.files import short
from .remote import HUBS, HubKind, is_repo
from .tokens import find_token, token_file
from .web import Endpoint

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"
_MODELSCOPE_HOSTS = ("modelscope.cn", "modelscope.ai")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A repository, and what its address also named: hub, revision and one file."""

    repo: str
    endpoint: tuple[HubKind, URL] | None = None
    revision: str | None = None
    path: str | None = None


def parse_name(text: str) -> Wanted:
    """Read OWNER/NAME, a Qwen model's short name, or the address of a page or file on a hub. Raises RequestError."""
    text = text.strip()
    if "://" in text:
        return _from_address(text)
    if is_repo(text):
        return Wanted(text)
    if text.lower().startswith("qwen") and is_repo(f"Qwen/{text}"):
        return Wanted(f"Qwen/{text}")
    raise RequestError(
        f"{short(text)} is not the name of a model: write OWNER/NAME, such as Qwen/Qwen3-4B, or the address of its page"
    )


def _from_address(text: str) -> Wanted:
    url = read_address(text)
    parts = [unquote(part) for part in url.raw_path.split("/") if part]
    hub = hub_of(url)
    if hub == "modelscope" and parts[:1] == ["models"]:
        parts = parts[1:]
    repo, rest = "/".join(parts[:2]), parts[2:]
    if not is_repo(repo):
        raise RequestError(
            f"{short(text)} is not the address of a model's page; it looks like {HUGGING_FACE}/OWNER/NAME"
        )
    endpoint = hub, url.origin()
    if len(rest) >= 2 and rest[0] in ("tree", "blob", "resolve"):
        path = "/".join(rest[2:]) if rest[0] != "tree" else ""
        return Wanted(repo, endpoint, rest[1], path or None)
    return Wanted(repo, endpoint)


def read_address(text: str) -> URL:
    """The address in a text. Raises RequestError for one that is not http or https."""
    try:
        url = URL(text.strip().rstrip("/"))
    except ValueError:
        url = URL()
    if url.scheme not in ("https", "http") or not url.host or url.user or url.password:
        raise RequestError(f"{short(text)} is not the address of a hub; write https://HOST")
    return url


def hub_of(url: URL) -> HubKind:
    """The hub whose API an address speaks: mirrors speak that of Hugging Face."""
    host = (url.host or "").lower()
    return (
        "modelscope"
        if host in _MODELSCOPE_HOSTS or host.endswith(tuple(f".{name}" for name in _MODELSCOPE_HOSTS))
        else "hf"
    )


def endpoints(config: Config, wanted: Wanted, source: str | None, environment: Mapping[str, str]) -> list[Endpoint]:
    """The hubs to ask, in order. `source` is --from: hf, modelscope, or a mirror's address.

    Raises RequestError, FileError.
    """
    if source is not None and source not in HUBS:
        url = read_address(source)
        pairs: list[tuple[HubKind, URL]] = [(hub_of(url), url)]
    elif source is not None:
        pairs = _configured(config, source, environment)
    elif wanted.endpoint is not None:
        pairs = [wanted.endpoint]
    else:
        pairs = [pair for hub in config.hub.order for pair in _configured(config, hub, environment)]
    return [Endpoint(hub, url, _token(config, hub, url, environment), _hint(config, hub)) for hub, url in pairs]


def _configured(config: Config, hub: str, environment: Mapping[str, str]) -> list[tuple[HubKind, URL]]:
    """A hub's addresses: from onedesk.toml, otherwise from the hub's own variable, otherwise its public one."""
    if hub == "modelscope":
        return [
            ("modelscope", read_address(config.hub.modelscope or environment.get("MODELSCOPE_ENDPOINT") or MODELSCOPE))
        ]
    texts = config.hub.endpoints or (environment.get("HF_ENDPOINT") or HUGGING_FACE,)
    return [("hf", read_address(text)) for text in texts]


def _token(config: Config, hub: HubKind, url: URL, environment: Mapping[str, str]) -> str | None:
    """The token for an address. A mirror gets none, unless it was configured as the hub itself."""
    trusted = {configured.origin() for _, configured in _configured(config, hub, environment)}
    trusted |= {URL(HUGGING_FACE) if hub == "hf" else URL(MODELSCOPE)}
    return find_token(config, hub, environment) if url.origin() in trusted else None


def _hint(config: Config, hub: HubKind) -> str:
    path = token_file(config, hub)
    return f"{path.parent.name}/{path.name} (mode 600)"
