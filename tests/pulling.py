"""Pulls from the stand-in hub, in this process, with short waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hub_server import Hub
from onedesk.service.config import Config, load_config
from onedesk.service.hub.fetch import Fetch
from onedesk.service.hub.hubs import Hubs
from onedesk.service.hub.limits import HubLimits
from onedesk.service.hub.local_files import LocalFiles
from onedesk.service.hub.plan import Fit, PullPlan
from onedesk.service.hub.planner import Planner, PullRequest

LIMITS = HubLimits(stall=0.5, backoff=0.01, longest_backoff=0.02, sync=32 << 10, progress=1, reserve=1 << 20)


@dataclass
class Desk:
    """A tree with a configuration that knows only the stand-in."""

    tree: Path
    hub: Hub
    limits: HubLimits = LIMITS
    environment: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    on_event: Callable[[dict[str, Any]], None] = lambda event: None
    data: Path | None = None

    @property
    def config(self) -> Config:
        return load_config(self.tree / "onedesk.toml")

    @property
    def models(self) -> Path:
        return self.tree / "models"

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def pull(self, name: str = "tiny/model", *, local: Path | None = None, **more: Any) -> dict[str, Any]:
        """Plan and fetch; returns the last event."""
        return asyncio.run(self._pull(PullRequest(name, **more), local, fetch=True))

    def plan(self, name: str = "tiny/model", **more: Any) -> PullPlan:
        return asyncio.run(self._pull(PullRequest(name, **more), None, fetch=False))

    async def _pull(self, request: PullRequest, local: Path | None, *, fetch: bool) -> Any:
        def report(event: dict[str, Any]) -> None:
            self.events.append(event)
            self.on_event(event)

        def verdict(name: str, described: Any, images: int) -> Fit:
            return Fit(True, f"{name} fits beside {images} bytes")

        files = None if local is None else LocalFiles(local)
        more = {} if self.data is None else {"data": self.data}
        async with Hubs(self.limits, report, self.environment, files) as hubs:
            plan = await Planner(request, self.config, hubs, verdict, report, lambda: False, **more).plan()
            return await Fetch(plan, hubs, self.limits, report, lambda: False).run() if fetch else plan

    def limited(self, **changes: Any) -> None:
        self.limits = replace(self.limits, **changes)

    def same_files(self, repository: str = "tiny/model", folder: str = "model") -> bool:
        """Whether every fetched file equals the hub's, with no other files but the pull's own two."""
        files = self.hub.repositories[repository].files
        found = {
            path.relative_to(self.models / folder).as_posix()
            for path in (self.models / folder).rglob("*")
            if path.is_file()
        }
        own = {"onedesk.json", ".lock"}
        return own <= found and all((self.models / folder / name).read_bytes() == files[name] for name in found - own)


def make_desk(tree: Path, hub: Hub, order: str = "hf") -> Desk:
    """A tree whose configuration knows only the stand-in, with `order` as its order of hubs."""
    (tree / "models").mkdir(parents=True)
    text = f'[hub]\nendpoints = ["{hub.address}"]\nmodelscope = "{hub.address}"\norder = ["{order}"]\n'
    (tree / "onedesk.toml").write_text(text)
    return Desk(tree, hub)
