"""This process as a tenant of the local service: it tells what it holds of the machine's memory, and gives back when it
is asked to.

A process that is killed says nothing any more, and the service gives its lease back after LATE seconds.
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

# Seconds between two signs of life, after how many the service takes the process for dead, and for an answer.
BEAT, LATE, _ANSWER = 1.5, 5.0, 5.0


class Tenancy:
    """A lease of this process at the service. `held` tells the bytes that it holds, `free` is asked for bytes; both
    in a thread of ours.
    """

    def __init__(self, owner: str, held: Callable[[], int], free: Callable[[int], object]) -> None:
        self._owner = owner
        self._held = held
        self._free = free
        self._ended = threading.Event()
        self._lease: tuple[PeerAddress, str] | None = None

    def begin(self, find: Callable[[], PeerAddress | None]) -> None:
        """Tell whichever service `find` finds, from now on."""
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
                # What `find`, `held` and `free` of a host may raise is not known here, and without a heartbeat the
                # lease is lost.
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
    """The answer, or {} where there is none."""
    try:
        document = ask(address, method, route, body, seconds=_ANSWER)
    except OnedeskError as error:
        log.debug("%s: %s", address.title, error)
        return {}
    return document if isinstance(document, dict) else {}
