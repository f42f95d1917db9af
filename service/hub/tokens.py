"""Finds the hubs' tokens. They are read for a pull only, and never shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..config import Config
from ..errors import FileError
from ..peers.token_file import FILE_LIMIT, read_token
from .remote import HubKind

SHORTEST = 8  # characters
_FILES: Mapping[HubKind, str] = {"hf": "huggingface.token", "modelscope": "modelscope.token"}


def token_file(config: Config, hub: HubKind) -> Path:
    """The file in which Onedesk looks for a hub's token."""
    folder = config.tree / "data" if config.tree else config.cache
    return folder / _FILES[hub]


def find_token(config: Config, hub: HubKind, environment: Mapping[str, str]) -> str | None:
    """The token for a hub: from our file (mode 0600), otherwise from the hub's own variables and files, otherwise None.

    Raises FileError for a file of ours that others can read, and for a token that is not valid in an HTTP header.
    """
    path = token_file(config, hub)
    if path.exists() or path.is_symlink():
        return read_token(path, shortest=SHORTEST, advice="write the token into it, or remove it")
    if hub == "modelscope":
        return _checked(environment.get("MODELSCOPE_API_TOKEN"), "MODELSCOPE_API_TOKEN")
    given = environment.get("HF_TOKEN")
    if given and given.strip():
        return _checked(given, "HF_TOKEN")
    named = environment.get("HF_TOKEN_PATH")
    home = environment.get("HF_HOME")
    default = (
        Path(home).expanduser()
        if home
        else Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    file = Path(named).expanduser() if named else default / "token"
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_LIMIT).decode("latin-1")
    except OSError:
        return None
    return _checked(text, file.name)


def _checked(text: str | None, where: str) -> str | None:
    token = (text or "").strip()
    if not token:
        return None
    if not token.isascii() or not token.isprintable() or any(c in token for c in ' ";,\\'):
        raise FileError(f"the token in {where} has characters that no token has; write it again")
    return token
