"""ModelScope over HTTP: the list of a revision's files, and their addresses."""

from __future__ import annotations

import re
from typing import Any

from yarl import URL

from ..errors import ModelError, PeerError
from ..loader.files import short
from .remote import RemoteFile, RepositorySnapshot
from .web import HubResponse, Web

# The list is silently truncated at this many rows.
CUT = 3000
FOLDERS_LIMIT = 2000
_SHA256 = re.compile(r"[0-9a-f]{64}")


async def read_snapshot(web: Web, repo: str, revision: str | None) -> RepositorySnapshot:
    """The repository at a revision (default: master). Raises PeerError, ModelError.

    ModelScope serves files by branch or tag. Each file's SHA-256 pins it: one that changes meanwhile is refused.
    """
    asked = revision or "master"
    info = await _data(web, web.endpoint.url.joinpath("api", "v1", "models", *repo.split("/")), repo, asked)
    rows = await _rows(web, repo, asked)
    files = tuple(_file(web, row) for row in rows if row.get("Type") != "tree")
    commits = [(row.get("CommittedDate") or 0, row["Revision"]) for row in rows if isinstance(row.get("Revision"), str)]
    dated = [pair for pair in commits if isinstance(pair[0], int)]
    license = info.get("License")
    return RepositorySnapshot(
        hub="modelscope",
        endpoint=web.endpoint.url,
        repo=repo,
        asked=repo,
        commit=max(dated)[1] if dated else asked,
        revision=asked,
        files=files,
        license=license if isinstance(license, str) and license.isprintable() and license else None,
    )


def file_url(endpoint: URL, repo: str, revision: str, path: str) -> URL:
    """The address of a revision's file; it may redirect to the storage."""
    return endpoint.joinpath("api", "v1", "models", *repo.split("/"), "repo").with_query(
        {"Revision": revision, "FilePath": path}
    )


async def _rows(web: Web, repo: str, revision: str) -> list[dict[str, Any]]:
    """Every row of the list. If it was truncated, each folder is listed separately."""
    rows = await _list(web, repo, revision, root=None, recursive=True)
    if len(rows) < CUT:
        return rows
    found: dict[str, dict[str, Any]] = {}
    waiting: list[str | None] = [None]
    for _ in range(FOLDERS_LIMIT):
        if not waiting:
            return list(found.values())
        root = waiting.pop()
        level = await _list(web, repo, revision, root=root, recursive=False)
        if len(level) >= CUT:
            raise ModelError(
                f"{repo} has {CUT} or more files in one folder, and ModelScope lists no more of them; pull it from"
                " Hugging Face"
            )
        for row in level:
            path = row.get("Path")
            if isinstance(path, str) and path not in found:
                found[path] = row
                if row.get("Type") == "tree":
                    waiting.append(path)
    raise ModelError(f"{repo} has more than {FOLDERS_LIMIT} folders; pull it from Hugging Face")


async def _list(web: Web, repo: str, revision: str, *, root: str | None, recursive: bool) -> list[dict[str, Any]]:
    query = {"Revision": revision, "Recursive": str(recursive)} | ({} if root is None else {"Root": root})
    url = web.endpoint.url.joinpath("api", "v1", "models", *repo.split("/"), "repo", "files").with_query(query)
    files = (await _data(web, url, repo, revision)).get("Files")
    if files is None:
        files = []
    if not isinstance(files, list) or not all(isinstance(row, dict) for row in files):
        raise PeerError(f"{web.endpoint.title} answers without a list of the files of {repo}; is it ModelScope?")
    return files


async def _data(web: Web, url: URL, repo: str, revision: str) -> dict[str, Any]:
    answer = await web.json(url)
    document = answer.document
    # An error may come with status 200 and be in the body.
    if (
        answer.status >= 400
        or not isinstance(document, dict)
        or document.get("Success") is False
        or document.get("Code", 200) != 200
    ):
        raise _refusal(web, answer, repo, revision)
    data = document.get("Data")
    if not isinstance(data, dict):
        raise PeerError(f"{web.endpoint.title} answers without data about {repo}; is it ModelScope?")
    return data


def _refusal(web: Web, answer: HubResponse, repo: str, revision: str) -> PeerError | ModelError:
    document = answer.document if isinstance(answer.document, dict) else {}
    code, message = document.get("Code"), document.get("Message")
    said = f" ({short(message)})" if isinstance(message, str) and message else ""
    status = answer.status if answer.status >= 400 else code
    if status in (401, 403):
        return PeerError(
            f"{web.endpoint.title} does not give {repo} without permission{said}; "
            f"put a token that may read it into {web.endpoint.token_hint}, and run the command again"
        )
    if status in (404, 10010205001, 10010205002) or answer.status == 404:
        return ModelError(
            f"{web.endpoint.title} has no model {repo} at revision {short(revision)}{said}; check the name"
        )
    return PeerError(
        f"{web.endpoint.title} answers {status} for {repo}{said}; run the command again later, or use --from hf"
    )


def _file(web: Web, row: dict[str, Any]) -> RemoteFile:
    path, size, sha256 = row.get("Path"), row.get("Size"), row.get("Sha256")
    if isinstance(path, str) and isinstance(size, int) and isinstance(sha256, str):
        digest = sha256.lower()
        if 0 <= size < 2**50 and _SHA256.fullmatch(digest):
            return RemoteFile(path, size, sha256=digest)
    raise PeerError(f"{web.endpoint.title} lists a file without a path, size or SHA-256; is it ModelScope?")
