"""Hugging Face over HTTP, and mirrors with the same API: the tree of a commit, and the addresses of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from yarl import URL

from ..errors import ModelError, PeerError, RequestError
from ..loader.files import short
from .remote import RemoteFile, RepositorySnapshot, is_repo
from .web import HubResponse, Web

PAGES_LIMIT = 1000  # per tree; one page has up to 1,000 rows
FILES_LIMIT = 100_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^<>]+)>\s*;[^,<]*\brel="?next"?')


async def read_snapshot(web: Web, repo: str, revision: str | None) -> RepositorySnapshot:
    """The repository at the commit that `revision` (default: main) points to now.

    Raises PeerError, ModelError, RequestError.
    """
    asked = revision or "main"
    answer = await web.json(_api(web, repo).joinpath("revision", quote(asked, safe=""), encoded=True))
    info = _accepted(web, answer, repo, asked)
    commit = info.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise PeerError(f"{web.endpoint.title} does not say which commit {short(asked)} of {repo} is; is it a hub?")
    name = info.get("id") or info.get("modelId")
    name = name if isinstance(name, str) and answer.redirected and is_repo(name) else repo
    return RepositorySnapshot(
        hub="hf",
        endpoint=web.endpoint.url,
        repo=name,
        asked=repo,
        commit=commit,
        revision=commit,
        files=await _read_tree(web, name, commit),
        license=_license(info),
        gated=bool(info.get("gated")),
    )


def file_url(endpoint: URL, repo: str, commit: str, path: str) -> URL:
    """The address of a commit's file; it may redirect to the storage."""
    return endpoint.joinpath(*repo.split("/"), "resolve", commit, *path.split("/"))


def _api(web: Web, repo: str) -> URL:
    return web.endpoint.url.joinpath("api", "models", *repo.split("/"))


async def _read_tree(web: Web, repo: str, commit: str) -> tuple[RemoteFile, ...]:
    url: URL | None = _api(web, repo).joinpath("tree", commit).with_query({"recursive": "true", "expand": "false"})
    files: list[RemoteFile] = []
    for _ in range(PAGES_LIMIT):
        answer = await web.json(url)
        rows = _accepted(web, answer, repo, commit) if isinstance(answer.document, dict) else answer.document
        if not isinstance(rows, list):
            raise PeerError(f"{web.endpoint.title} answers without a list of the files of {repo}; is it a hub?")
        files += [_file(web, row) for row in rows if not (isinstance(row, dict) and row.get("type") == "directory")]
        if len(files) > FILES_LIMIT:
            break
        following = _NEXT.search(answer.headers.get("Link", ""))
        if following is None:
            return tuple(files)
        url = answer.url.join(URL(following[1], encoded=True))
        if url.origin() != web.endpoint.url.origin():
            url = web.endpoint.url.joinpath(*url.parts[1:]).with_query(
                url.query
            )  # a mirror that passes on the original's links
    raise ModelError(f"{repo} has more than {FILES_LIMIT} files; name a smaller repository")


def _file(web: Web, row: Any) -> RemoteFile:
    if isinstance(row, dict) and isinstance(row.get("path"), str) and _size(row.get("size")):
        lfs = row.get("lfs")
        if isinstance(lfs, dict):
            oid = str(lfs.get("oid") or lfs.get("sha256") or "").removeprefix("sha256:")
            if _SHA256.fullmatch(oid) and _size(lfs.get("size", row["size"])):
                return RemoteFile(row["path"], int(lfs.get("size", row["size"])), sha256=oid)
        elif _COMMIT.fullmatch(str(row.get("oid"))):
            return RemoteFile(row["path"], row["size"], git_sha1=row["oid"])
    raise PeerError(f"{web.endpoint.title} lists a file without a path, size or hash; is it a hub?")


def _size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**50


def _license(info: Mapping[str, Any]) -> str | None:
    card = info.get("cardData")
    found = card.get("license") if isinstance(card, dict) else None
    if (
        isinstance(found, str)
        and found == "other"
        and isinstance(card, dict)
        and isinstance(card.get("license_name"), str)
    ):
        found = card["license_name"]
    if not isinstance(found, str):
        tags = info.get("tags")
        named = (
            [tag for tag in tags if isinstance(tag, str) and tag.startswith("license:")]
            if isinstance(tags, list)
            else []
        )
        found = named[0].removeprefix("license:") if named else None
    return found[:80] if isinstance(found, str) and found.isprintable() else None


def _accepted(web: Web, answer: HubResponse, repo: str, revision: str) -> dict[str, Any]:
    if answer.status < 400 and isinstance(answer.document, dict):
        return answer.document
    raise refusal(web, answer.status, answer.headers, repo, revision, None)


def refusal(
    web: Web, status: int, headers: Mapping[str, str], repo: str, revision: str, path: str | None
) -> PeerError | ModelError | RequestError:
    """What a refused request means and what to do, in one line."""
    code, hub = headers.get("X-Error-Code", ""), web.endpoint.title
    has_token = web.endpoint.token is not None
    page = web.endpoint.url.joinpath(*repo.split("/"))
    if code == "GatedRepo" or (status == 403 and not code):
        token = "the token's account has not" if has_token else "no token is set, so the hub cannot know who has"
        return PeerError(
            f"{repo} is gated, and {token} accepted its terms: accept them on {page}, "
            f"put a token of that account into {web.endpoint.token_hint}, and run the command again"
        )
    if code == "RevisionNotFound":
        return ModelError(f"{repo} has no revision {short(revision)}; leave --revision out for its main branch")
    if code == "EntryNotFound" or (path is not None and status == 404):
        return ModelError(f"{repo} has no file {short(path or '')} at {revision[:12]}; run the command again")
    if code == "RepoNotFound" or status in (401, 404):
        if has_token and status == 401:
            return PeerError(f"{hub} does not accept the token; put a valid one into {web.endpoint.token_hint}")
        private = "" if has_token else f"; a private one needs a token in {web.endpoint.token_hint}"
        return ModelError(f"{hub} has no model {repo}: check the name{private}")
    return PeerError(f"{hub} answers {status} for {repo}; run the command again later, or use another --from")
