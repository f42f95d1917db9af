"""A stand-in for both hubs on 127.0.0.1: one port for the hub, one for its storage, and faults on request per path."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from aiohttp import web

REPO = "tiny/model"
TOKEN = "hf_0123456789abcdef"
SHARD_BYTES = 300_000
PAGE_ROWS = 4
LFS_FROM = 10_000  # bytes; smaller files are plain git blobs


@dataclass(frozen=True)
class Fault:
    """The fault of one response: `kind` as `Hub._send` and `Hub._fault` read it; `at` is a number of bytes."""

    kind: str
    at: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass
class Repository:
    """Files by path, at `commit`."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: Any = False
    license: str = "apache-2.0"
    moved_to: str = ""
    token: str = ""
    hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 that the list tells, where it is a lie


@dataclass
class Asked:
    """One request as received."""

    place: str
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0


def tensor_file(name: str, seed: int, size: int = SHARD_BYTES) -> bytes:
    """A safetensors file of about `size` bytes with one tensor of pseudo-random bytes."""
    body = b"".join(hashlib.sha256(f"{seed}-{i}".encode()).digest() for i in range(size // 32))
    header = json.dumps({name: {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}).encode()
    return struct.pack("<Q", len(header)) + header + body


def tiny_repository() -> Repository:
    """Two shards with their index, and the other usual files of a repository."""
    shards = {f"model-{i:05d}-of-00002.safetensors": tensor_file(f"t{i}", i) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(shards, 1)}}
    return Repository(
        {
            "config.json": b'{"model_type": "qwen3"}\n',
            "generation_config.json": b"{}\n",
            "tokenizer.json": b'{"model": {}}\n' + b" " * 20_000,
            "tokenizer_config.json": b"{}\n",
            "model.safetensors.index.json": json.dumps(index).encode(),
            **shards,
            "README.md": b"# a card\n",
            "LICENSE": b"",
            "pytorch_model.bin": b"\x80\x02}q\x00.",
            "modeling_tiny.py": b"raise SystemExit\n",
            "original/model-00001-of-00001.safetensors": tensor_file("other", 9, 32_000),
        }
    )


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub:
    """Both hubs. Its attributes may be changed while it runs; `asked` holds the received requests, in order."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {REPO: tiny_repository()}
        self.asked: list[Asked] = []
        self.faults: defaultdict[tuple[str, str], deque[Fault]] = defaultdict(deque)
        self.always: dict[tuple[str, str], Fault] = {}
        self.cut_list_at = 3000
        self.page_rows = PAGE_ROWS
        self.etag_suffix = ""
        self.address = ""
        self.storage = ""

    def fault(self, path: str, *faults: Fault, place: str = "storage") -> None:
        """Add faults for the next responses about a path."""
        self.faults[place, path] += faults

    def count(self, path: str, place: str = "storage") -> int:
        return sum(asked.place == place and asked.path == path for asked in self.asked)

    def _next(self, place: str, path: str) -> Fault | None:
        waiting = self.faults[place, path]
        return waiting.popleft() if waiting else self.always.get((place, path))

    # The hub's routes

    async def hub(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        parts = [part for part in request.path.split("/") if part]
        file = self._file_of(request, parts)
        asked = Asked("hub", request.method, file or path, dict(request.headers))
        self.asked.append(asked)
        fault = self._next("hub", file or path)
        answer = await self._fault(request, fault) if fault else None
        if answer is None:
            answer = await self._hub_answer(request, parts, fault)
        asked.status = answer.status
        return answer

    @staticmethod
    def _file_of(request: web.Request, parts: list[str]) -> str | None:
        if "FilePath" in request.query:
            return request.query["FilePath"]
        return "/".join(parts[4:]) if len(parts) > 4 and parts[2] == "resolve" else None

    async def _hub_answer(self, request: web.Request, parts: list[str], fault: Fault | None) -> web.StreamResponse:
        if parts[:3] == ["api", "v1", "models"]:
            return await self._modelscope(request, parts[3:], fault)
        if parts[:2] == ["api", "models"]:
            return self._api(request, parts[2:])
        return await self._resolve(request, parts, fault)

    def _api(self, request: web.Request, parts: list[str]) -> web.StreamResponse:
        name = "/".join(parts[:2])
        found = self.repositories.get(name)
        if found is None or (found.token and request.headers.get("Authorization") != f"Bearer {found.token}"):
            return self._error(401 if found else 404, "GatedRepo" if found and found.gated else "RepoNotFound")
        if found.moved_to:
            raise web.HTTPTemporaryRedirect(
                "/api/models/" + "/".join([found.moved_to, *parts[2:]]) + self._query(request)
            )
        if parts[2] == "revision":
            if parts[3] not in ("main", found.commit):
                return self._error(404, "RevisionNotFound")
            return web.json_response(self._info(name, found))
        if parts[2] == "tree":
            return self._tree(request, name, found, parts[3])
        return self._error(404, "EntryNotFound")

    @staticmethod
    def _query(request: web.Request) -> str:
        return f"?{request.query_string}" if request.query_string else ""

    @staticmethod
    def _info(name: str, found: Repository) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": found.commit,
            "private": False,
            "gated": found.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [f"license:{found.license}"],
            "cardData": {"license": found.license},
            "siblings": [{"rfilename": path} for path in found.files],
        }

    def _tree(self, request: web.Request, name: str, found: Repository, revision: str) -> web.StreamResponse:
        if revision not in ("main", found.commit):
            return self._error(404, "RevisionNotFound")
        first = int(request.query.get("cursor", "0"))
        paths = sorted(found.files)
        rows = [self._row(found, path) for path in paths[first : first + self.page_rows]]
        if first == 0:
            rows.append({"type": "directory", "path": "original", "oid": "d" * 40, "size": 0})
        headers = {}
        if first + self.page_rows < len(paths):
            address = f"{self.address}/api/models/{name}/tree/{revision}?recursive=true&cursor={first + self.page_rows}"
            headers["Link"] = f'<{address}>; rel="next"'
        return web.json_response(rows, headers=headers)

    @staticmethod
    def _row(found: Repository, path: str) -> dict[str, Any]:
        content = found.files[path]
        row: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
        if len(content) >= LFS_FROM:
            oid = found.hashes.get(path, sha256(content))
            row |= {"lfs": {"oid": oid, "size": len(content), "pointerSize": 134}, "xetHash": "e" * 64}
        return row

    @staticmethod
    def _error(status: int, code: str) -> web.Response:
        return web.json_response(
            {"error": code}, status=status, headers={"X-Error-Code": code, "X-Error-Message": code}
        )

    async def _resolve(self, request: web.Request, parts: list[str], fault: Fault | None) -> web.StreamResponse:
        name, path = "/".join(parts[:2]), "/".join(parts[4:])
        found = self.repositories.get(name)
        if found is None or len(parts) < 5:
            return self._error(404, "RepoNotFound")
        if found.token and request.headers.get("Authorization") != f"Bearer {found.token}":
            return self._error(401, "GatedRepo")
        if parts[3] not in ("main", found.commit):
            return self._error(404, "RevisionNotFound")
        if path not in found.files:
            return self._error(404, "EntryNotFound")
        content = found.files[path]
        headers = {"X-Repo-Commit": found.commit}
        if len(content) < LFS_FROM:
            return await self._send(request, content, headers | {"ETag": f'"{git_sha1(content)}"'}, fault)
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        location = f"{self.storage}/{name}/{found.commit}/{quote(path)}?Signature=secret"
        return web.Response(status=302, headers=headers | linked | {"Location": location})

    # ModelScope

    async def _modelscope(self, request: web.Request, parts: list[str], fault: Fault | None) -> web.StreamResponse:
        name, rest = "/".join(parts[:2]), parts[2:]
        found = self.repositories.get(name)
        if found is None:
            return web.json_response(
                {"Code": 10010205001, "Success": False, "Message": "record not found", "Data": None}
            )
        if found.token and request.cookies.get("m_session_id") != found.token:
            return web.json_response({"Code": 403, "Success": False, "Message": "no permission", "Data": None})
        if rest == ["repo", "files"]:
            return self._ok({"Files": self._list(request, found)})
        if rest == ["revisions"]:
            return self._ok({"RevisionMap": {"Branches": [{"Revision": "master", "CreatedAt": 1}], "Tags": []}})
        if rest == ["repo"]:
            path = request.query["FilePath"]
            if path not in found.files:
                return web.json_response({"Code": 404, "Success": False, "Message": "no such file"}, status=404)
            if len(found.files[path]) >= LFS_FROM:
                raise web.HTTPFound(f"{self.storage}/{name}/{found.commit}/{quote(path)}?Signature=secret")
            return await self._send(request, found.files[path], {}, fault)
        return self._ok({"Name": name, "License": found.license, "Id": 1, "Path": name.split("/")[0]})

    @staticmethod
    def _ok(data: Any) -> web.Response:
        return web.json_response({"Code": 200, "Success": True, "Message": "success", "RequestId": "1", "Data": data})

    def _list(self, request: web.Request, found: Repository) -> list[dict[str, Any]]:
        root = request.query.get("Root", "")
        recursive = request.query.get("Recursive", "False") == "True"
        below = [path for path in sorted(found.files) if not root or path.startswith(f"{root}/")]
        rows: dict[str, dict[str, Any]] = {}
        for path in below:
            inner = path[len(root) + 1 :] if root else path
            folders = inner.split("/")[:-1]
            for count in range(1, len(folders) + 1 if recursive else min(2, len(folders) + 1)):
                folder = "/".join(([root] if root else []) + folders[:count])
                rows[folder] = {
                    "Path": folder,
                    "Name": folder,
                    "Type": "tree",
                    "Size": 0,
                    "Sha256": "",
                    "Revision": found.commit,
                }
            if recursive or not folders:
                content = found.files[path]
                digest = found.hashes.get(path, sha256(content))
                row = {
                    "Path": path,
                    "Name": path.split("/")[-1],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": digest,
                }
                rows[path] = row | {
                    "Revision": found.commit,
                    "IsLFS": len(content) >= LFS_FROM,
                    "CommittedDate": 1_700_000_000,
                }
        return list(rows.values())[: self.cut_list_at]

    # The storage routes

    async def store(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.path.split("/") if part]
        path = "/".join(parts[3:])
        asked = Asked("storage", request.method, path, dict(request.headers))
        self.asked.append(asked)
        content = self.repositories["/".join(parts[:2])].files[path]
        fault = self._next("storage", path)
        answer = await self._fault(request, fault) if fault else None
        if answer is None:
            answer = await self._send(request, content, {"ETag": f'"{sha256(content)[:32]}{self.etag_suffix}"'}, fault)
        asked.status = answer.status
        return answer

    async def _fault(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """The complete response of a fault that sends no file; None for faults that spoil a file."""
        if fault.kind == "status":
            return web.Response(status=fault.status, headers=fault.headers, text=fault.text)
        if fault.kind == "html":
            return web.Response(status=200, content_type="text/html", text="<html><title>Log in</title></html>")
        if fault.kind == "redirect":
            return web.Response(status=302, headers={"Location": fault.text})
        if fault.kind == "json":
            return web.json_response(json.loads(fault.text))
        if fault.kind == "drop" and request.transport is not None:
            request.transport.abort()
            return web.Response()
        return None

    async def _send(
        self, request: web.Request, content: bytes, headers: dict[str, str], fault: Fault | None
    ) -> web.StreamResponse:
        kind = fault.kind if fault else ""
        if kind == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        first = self._first(request, len(content), headers, kind)
        if first is None:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
        status = 206 if first is not False else 200
        start = int(first) if first is not False else 0
        body = content[start:]
        if kind == "more":
            body += b"more"
        answer = web.StreamResponse(status=status, headers=headers | {"Accept-Ranges": "bytes"})
        if status == 206:
            answer.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if kind == "gzip":
            body = gzip.compress(body)
            answer.headers["Content-Encoding"] = "gzip"
        if kind in ("chunked", "more"):
            answer.enable_chunked_encoding()
        else:
            answer.content_length = len(body)
        await answer.prepare(request)
        if request.method != "HEAD":
            await self._body(request, answer, body, fault)
        return answer

    @staticmethod
    def _first(request: web.Request, size: int, headers: dict[str, str], kind: str) -> int | bool | None:
        """The first byte of a partial response; False for a whole one, None for an unsatisfiable range."""
        asked = request.headers.get("Range", "")
        condition = request.headers.get("If-Range")
        if (
            not asked.startswith("bytes=")
            or kind in ("ignore_range", "gzip")
            or (condition and condition != headers.get("ETag"))
        ):
            return False
        first = int(asked.removeprefix("bytes=").partition("-")[0])
        return None if first >= size or kind == "unsatisfied" else first

    @staticmethod
    async def _body(request: web.Request, answer: web.StreamResponse, body: bytes, fault: Fault | None) -> None:
        kind, at = (fault.kind, fault.at) if fault else ("", 0)
        if kind in ("cut", "stall", "dribble"):
            await answer.write(body[:at])
            if kind == "cut" and request.transport is not None:
                await asyncio.sleep(0.02)  # the bytes must leave before the connection is reset
                request.transport.abort()
                return
            for byte in body[at:]:
                await asyncio.sleep(0.05 if kind == "dribble" else 20)
                await answer.write(bytes([byte]))
            return
        if kind == "slow":  # so that a client can be ended half-way
            for first in range(0, len(body), at):
                await answer.write(body[first : first + at])
                await asyncio.sleep(0.002)
            return
        await answer.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A stand-in that serves for the length of the block, on its own thread."""
    hub, loop, ready = Hub(), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        runners = []
        for handler, name in ((hub.hub, "address"), (hub.store, "storage")):
            app = web.Application()
            app.router.add_route("*", "/{any:.*}", handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            setattr(hub, name, f"http://127.0.0.1:{runner.addresses[0][1]}")
            runners.append(runner)
        ready.set()
        await stop.wait()
        for runner in runners:
            await runner.cleanup()
        stalled = asyncio.all_tasks() - {asyncio.current_task()}
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    if not ready.wait(30):
        raise RuntimeError("the stand-in does not start")
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
