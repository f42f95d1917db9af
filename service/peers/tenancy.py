"""This process as a tenant of the local service: it reports the memory that it holds, and gives memory back on request.

If the process is killed, its heartbeat stops, and the service ends its lease after LATE seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..errors import OnedeskError
from .peer import PeerAddress
from .wire import ask

log = logging.getLogger(__name__)

# Seconds between two heartbeats, seconds after which the service takes the process for dead, and the response timeout.
BEAT, LATE, _ANSWER = 1.5, 5.0, 5.0


class Tenancy:
    """A lease of this process at the service. `held` returns the bytes that it holds, `free` releases bytes; both run
    in a thread of ours.
    """

    def __init__(self, owner: str, held: Callable[[], int], free: Callable[[int], object]) -> None:
        self._owner = owner
        self._held = held
        self._free = free
        self._ended = threading.Event()
        self._lease: tuple[PeerAddress, str] | None = None

    def begin(self, find: Callable[[], PeerAddress | None]) -> None:
        """Start reporting to the service that `find` finds."""
        threading.Thread(target=self._run, args=(find,), name="onedesk-tenancy", daemon=True).start()

    def end(self) -> None:
        """Give the lease back. A second call does nothing."""
        self._ended.set()
        lease, self._lease = self._lease, None
        if lease is not None:
            _try(lease[0], "DELETE", f"/memory/leases/{lease[1]}", None)

    def _run(self, find: Callable[[], PeerAddress | None]) -> None:
        failed = False
        while not self._ended.is_set():
            try:
                address = find()
                if address is None:
                    self._lease = None
                else:
                    self._tell(address)
                failed = False
            except BaseException as error:  # noqa: BLE001
                # The exceptions of a host's `find`, `held` and `free` are unknown here, and the lease is lost without a
                # heartbeat.
                log.log(logging.DEBUG if failed else logging.WARNING, "no heartbeat to the local service: %r", error)
                failed = True
            self._ended.wait(BEAT)

    def _tell(self, address: PeerAddress) -> None:
        held = max(0, self._held())
        if self._lease is None or self._lease[0] != address:
            body = {"owner": self._owner, "bytes": max(1, held), "held": held, "heartbeat": LATE, "gives_way": True}
            document = _try(address, "POST", "/memory/leases", body)
            key = document.get("id")
            self._lease = (address, key) if isinstance(key, str) else None
            return
        document = _try(address, "POST", f"/memory/leases/{self._lease[1]}", {"held": held, "bytes": max(1, held)})
        if "id" not in document:
            self._lease = None
        elif isinstance(asked := document.get("asked"), int) and asked > 0:
            self._free(asked)


def _try(address: PeerAddress, method: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The response, or {} if there is none."""
    try:
        document = ask(address, method, route, body, seconds=_ANSWER)
    except OnedeskError as error:
        log.debug("%s: %s", address.title, error)
        return {}
    return document if isinstance(document, dict) else {}
