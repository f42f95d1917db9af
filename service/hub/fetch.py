"""Carries out a plan: fetches several files at once, checks each before its final rename, and keeps the manifest up to
date.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FileError
from ..loader.files import short
from .hubs import Hubs
from .limits import HubLimits
from .lock import locked
from .manifest import Manifest, ManifestEntry, read_manifest
from .part import Origin, PartialFile, forget
from .paths import inside
from .plan import Folder, PlannedFile, PullPlan, check_disk
from .progress import Meter
from .remote import Report
from .transfer import Pace, Transfer

TICK = 1.0  # seconds between two progress events
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Fetch:
    """One run of a plan."""

    def __init__(self, plan: PullPlan, hubs: Hubs, limits: HubLimits, report: Report, stop: Callable[[], bool]) -> None:
        self._plan = plan
        self._hubs = hubs
        self._limits = limits
        self._report = report
        self._stop = stop
        self._pace = Pace(limits.rate)
        self._slots = asyncio.Semaphore(limits.connections)
        self._parts: dict[tuple[Path, str], PartialFile] = {}
        self._finished = plan.bytes - sum(file.file.size for file in plan.files if file.state != "present")
        self._manifests: dict[Path, Manifest] = {}
        self._superseded: list[Path] = []

    async def run(self) -> dict[str, Any]:
        """Fetch what is missing; returns the event "done". Raises FileError, PeerError, ModelError, RequestError."""
        plan = self._plan
        with ExitStack() as locks, _disk_errors(plan):
            for folder in plan.folders:
                locks.enter_context(locked(folder.root))
            check_disk(plan, self._limits)
            for folder in plan.folders:
                self._begin(folder)
            await self._all()
            for folder in plan.folders:
                self._complete(folder)
        return self._done()

    def _begin(self, folder: Folder) -> None:
        """Record the wanted files, so that `onedesk models` can say how many of them are there."""
        path = folder.root / folder.manifest
        before = read_manifest(path)
        entries = {file.path: ManifestEntry(file.path, file.file.size) for file in folder.files}
        if folder.link is not None:
            name = Path(folder.link[1]).name
            size = next(file.file.size for file in self._plan.files if Path(file.path).name == name)
            entries[folder.link[0]] = ManifestEntry(folder.link[0], size)
        for entry in before.files if before else ():
            if folder.keeps:
                entries.setdefault(entry.path, entry)
            elif entry.path not in entries and entry.untouched(folder.root / entry.path):
                self._superseded.append(folder.root / entry.path)
        manifest = Manifest(folder.source, folder.repo, folder.commit, tuple(entries.values()))
        for file in folder.files:
            if file.state == "present" and file.sha256 is not None:
                manifest = manifest.with_file(file.path, folder.root / file.path, file.sha256)
                self._tell(file, file.sha256, "present")
        self._manifests[folder.root] = manifest
        manifest.write(path)

    def _complete(self, folder: Folder) -> None:
        """Link files that another folder holds, delete files of an earlier commit, and write the manifest."""
        manifest = self._manifests[folder.root]
        if folder.link is not None:
            manifest = self._manifests[folder.root] = self._link(folder.root, *folder.link)
        manifest.write(folder.root / folder.manifest)
        for file in folder.files:  # a pull that was killed after a rename could not
            forget(folder.root / file.path)
        for path in self._superseded:
            path.unlink(missing_ok=True)
            self._report({"event": "removed", "path": path.name, "reason": "the new commit does not have it"})
        self._superseded = []

    def _link(self, root: Path, name: str, target: str) -> Manifest:
        """Link `name` to weights in another folder. Returns the manifest, without the link if the disk does not support
        links.
        """
        path, manifest = root / name, self._manifests[root]
        entries = (entry for other in self._manifests.values() for entry in other.files)
        sha256 = next(
            entry.sha256 for entry in entries if entry.sha256 is not None and Path(entry.path).name == Path(target).name
        )
        try:
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        except OSError as error:
            self._report(
                {
                    "event": "warning",
                    "text": f"no link can be made on this disk ({error.strerror}): pull {manifest.repo} by itself",
                }
            )
            return replace(manifest, files=tuple(entry for entry in manifest.files if entry.path != name))
        return manifest.with_file(name, path, sha256)

    async def _all(self) -> None:
        waiting = [(folder, file) for folder in self._plan.folders for file in folder.files if file.state != "present"]
        # Small files first, then the largest: a large file alone at the end would leave connections unused.
        waiting.sort(key=lambda pair: (pair[1].file.size > 32 << 20, -pair[1].file.size))
        tasks = [asyncio.create_task(self._one(folder, file)) for folder, file in waiting]
        ticker = asyncio.create_task(self._tick())
        try:
            pending = set(tasks)
            while pending:
                ended, _ = await asyncio.wait({*pending, ticker}, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                pending -= ended
        finally:
            for task in (*tasks, ticker):
                task.cancel()
            # Each one keeps its bytes before it ends.
            await asyncio.gather(*tasks, ticker, return_exceptions=True)

    async def _one(self, folder: Folder, file: PlannedFile) -> None:
        async with self._slots:
            target = inside(folder.root, file.path)
            sha256 = None
            if self._hubs.local is not None:
                sha256 = await asyncio.to_thread(self._hubs.local.take, file.file, target)
            state = "fetched" if sha256 is None else "imported"
            if sha256 is None:
                sha256 = await self._fetch(folder, file, target)
            self._finished += file.file.size
            manifest = self._manifests[folder.root].with_file(file.path, target, sha256)
            self._manifests[folder.root] = manifest
            manifest.write(folder.root / folder.manifest)
            self._tell(file, sha256, state)

    async def _fetch(self, folder: Folder, file: PlannedFile, target: Path) -> str:
        web = self._hubs.web(file.snapshot)
        if web is None:
            raise FileError(
                f"{short(file.path)} is not in the folder of --import, and no hub can be asked; connect, or import from"
                " another folder"
            )
        part = PartialFile(
            target, file.file, Origin(file.snapshot.repo, file.snapshot.commit), self._limits.sync, self._stop
        )
        key = (folder.root, file.path)
        try:
            await asyncio.to_thread(part.open)
            self._parts[key] = part
            if part.done:
                self._report({"event": "resume", "path": file.path, "done": part.done, "size": file.file.size})
            await Transfer(web, file.snapshot, self._pace).fetch(part)
            return await asyncio.to_thread(part.finish)
        finally:
            self._parts.pop(key, None)
            await asyncio.shield(asyncio.create_task(asyncio.to_thread(part.close)))

    async def _tick(self) -> None:
        meter = Meter(self._plan.bytes, self._progress())
        checked = 0
        while True:
            await asyncio.sleep(TICK)
            reading = meter.read(self._progress())
            event = {"event": "progress", "bytes": reading.done, "total": reading.total, "rate": round(reading.rate)}
            self._report(event | {"remaining": None if reading.remaining is None else round(reading.remaining, 1)})
            if self._pace.received - checked >= self._limits.recheck:
                checked = self._pace.received
                self._check_room()

    def _check_room(self) -> None:
        """Cancel the pull if other processes have filled the disk meanwhile. Raises FileError."""
        for folder in self._plan.folders:
            if shutil.disk_usage(folder.root).free < self._limits.reserve // 4:
                raise FileError(
                    f"the disk of {folder.root.name} is nearly full; free some space, and run the command again"
                )

    def _progress(self) -> int:
        return self._finished + sum(part.done for part in self._parts.values())

    def _tell(self, file: PlannedFile, sha256: str, state: str) -> None:
        self._report({"event": "file", "path": file.path, "size": file.file.size, "sha256": sha256, "state": state})

    def _done(self) -> dict[str, Any]:
        first = self._plan.folders[0]
        found = {
            file.path: entry
            for folder in self._plan.folders
            for file in folder.files
            if (entry := self._entry(folder, file)) is not None
        }
        return {
            "event": "done",
            "folder": str(first.root),
            "commit": first.commit,
            "files": [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in found.values()],
            "bytes": self._plan.bytes,
            "fetched": self._pace.received,
        }

    def _entry(self, folder: Folder, file: PlannedFile) -> ManifestEntry | None:
        return self._manifests[folder.root].entry(file.path)


@contextmanager
def _disk_errors(plan: PullPlan) -> Iterator[None]:
    """Turn a disk error into a FileError that says what to do."""
    name = plan.folders[0].root.name
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FileError(
                f"the disk of {name} took no more ({os.strerror(error.errno or 0)}); what has arrived is kept: free "
                f"{plan.missing / 1e9:.2f} GB or raise the limit, and run the command again"
            ) from error
        raise FileError(
            f"cannot write into {name}: {error.strerror or error}; make it writable, and run the command again"
        ) from error
