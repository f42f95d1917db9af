"""Ends a service that was started on demand, once it is unused."""

from __future__ import annotations

import asyncio
import logging
import time

from .service import Service

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


async def end_when_unused(service: Service, stopped: asyncio.Event) -> None:
    """Set `stopped` when no process has held a lease and no request has come for `linger` seconds.

    The process that started the service normally ends it by its process id; this covers a killed one. A process that
    comes meanwhile takes the service over.
    """
    used = time.monotonic()
    while not stopped.is_set():
        await asyncio.sleep(min(LOOK_SECONDS, service.settings.linger / 2))
        if len(service.tenants) or service.requests:
            used = time.monotonic()
        elif time.monotonic() - max(used, service.last_request) >= service.settings.linger:
            log.warning(
                "the service was not used for %g s; it ends, as it was started on demand", service.settings.linger
            )
            stopped.set()
