"""What a hub says about a repository: its commit, its files with sizes and hashes, its licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from yarl import URL

HubKind = Literal["hf", "modelscope"]
HUBS: tuple[HubKind, ...] = ("hf", "modelscope")
PAGES: Mapping[HubKind, str] = {"hf": "Hugging Face", "modelscope": "ModelScope"}
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


def is_repo(text: str) -> bool:
    """Whether a text is a repository's name, OWNER/NAME."""
    return bool(_REPO.fullmatch(text)) and ".." not in text and not text.endswith((".git", "."))


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. `size` is in bytes; at least one of the hashes (lower-case hex) is known.

    `git_sha1` is the hash of git's blob object: sha1("blob SIZE\\0" + content).
    """

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class RepositorySnapshot:
    """A repository at one commit. `repo` is its present name; `asked` is the name that was asked for.

    `revision` is what the addresses of its files name: the commit, or on ModelScope the branch or tag.
    """

    hub: HubKind
    endpoint: URL
    repo: str
    asked: str
    commit: str
    revision: str
    files: tuple[RemoteFile, ...]
    license: str | None = None
    gated: bool = False

    def file(self, path: str) -> RemoteFile | None:
        """The file of this path, None where there is none."""
        return next((file for file in self.files if file.path == path), None)

    @property
    def page(self) -> str:
        """The address of the repository's page, where terms are accepted."""
        return str(repository_page(self.hub, self.endpoint, self.repo))


def repository_page(hub: HubKind, endpoint: URL, repo: str) -> URL:
    """The address of a repository's page on its hub."""
    return endpoint.joinpath("models", *repo.split("/")) if hub == "modelscope" else endpoint.joinpath(*repo.split("/"))


Event: TypeAlias = dict[str, Any]


class Report(Protocol):
    """Receives each event of a pull, in order."""

    def __call__(self, event: Event) -> None: ...
