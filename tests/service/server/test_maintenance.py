"""A service that was started on demand ends when nobody uses it, and not before."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from onedesk.service.server.unused import end_when_unused


def test_it_ends_once_there_is_no_lease_and_nobody_asks() -> None:
    async def run() -> None:
        service: Any = SimpleNamespace(
            tenants=["an image server"], requests=0, last_request=0.0, settings=SimpleNamespace(linger=0.1)
        )
        stopped = asyncio.Event()
        watching = asyncio.create_task(end_when_unused(service, stopped))
        await asyncio.sleep(0.3)
        assert not stopped.is_set()  # a lease is alive
        service.tenants, service.requests = [], 1
        await asyncio.sleep(0.3)
        assert not stopped.is_set()  # an answer is written
        service.requests, service.last_request = 0, time.monotonic()
        await asyncio.wait_for(stopped.wait(), 30)
        await watching

    asyncio.run(run())
