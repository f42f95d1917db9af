"""The service of this tree, as the command shows it."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..peers.service import find_service
from ..peers.wire import ask


def with_service(report: dict[str, Any], config: Config) -> dict[str, Any]:
    """The document of `onedesk memory` with the budget, leases and counters of this tree's service, where one runs. Raises PeerError."""
    found = find_service(config.cache)
    if found is None:
        return report
    theirs = ask(found.address, "GET", "/memory")
    service = {"pid": found.note.pid, "where": found.note.where, "asleep": theirs["asleep"]}
    kept = {key: theirs[key] for key in ("budget", "leases", "counters", "leaks")}
    return report | kept | {"service": service}
