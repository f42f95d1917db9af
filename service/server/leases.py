"""/v1/memory/leases: another process registers the memory that it takes, so that both sides account for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from .body import read_json
from .error_documents import to_json
from .requests import whole
from .schemas import HEARTBEAT_OF_LEASE, LEASE
from .service import Service
from .tenants import HEARTBEAT, Tenant

log = logging.getLogger(__name__)


async def take_lease(service: Service, request: web.Request) -> web.Response:
    """Free memory for another process, and count it as taken until it is given back or its heartbeat is late."""
    body = await read_json(service, request, LEASE)
    heartbeat = HEARTBEAT if body.get("heartbeat") is None else float(body["heartbeat"])
    tenant = Tenant(
        body["owner"], int(body["bytes"]), whole(body.get("held")) or 0, heartbeat, bool(body.get("gives_way"))
    )
    released = await service.giving_back(service.tenants.take, tenant)
    service.figures.returned(released)
    _watch(service, tenant)
    rows = [
        {"owner": one.owner, "asked": one.asked, "measured": one.measured, "seconds": one.seconds} for one in released
    ]
    return _answer(tenant.document() | {"released": rows})


async def tell_lease(service: Service, request: web.Request) -> web.Response:
    """A heartbeat. The response says how many bytes to give back, and when the next heartbeat is due."""
    body = await read_json(service, request, HEARTBEAT_OF_LEASE)
    tenant = service.tenants.tell(request.match_info["key"], whole(body.get("held")), whole(body.get("bytes")))
    _watch(service, tenant)
    return _answer(tenant.document())


async def give_back_lease(service: Service, request: web.Request) -> web.Response:
    """The process gives the lease back."""
    return _answer(service.tenants.give_back(request.match_info["key"]).document())


def _watch(service: Service, tenant: Tenant) -> None:
    """Check the lease again when its next heartbeat would be late."""

    def look() -> None:
        for late in service.tenants.expire():
            log.warning("the lease of %s has ended: no heartbeat for %g s", late.owner, late.heartbeat)

    if tenant.timer is not None:
        tenant.timer.cancel()
    tenant.timer = asyncio.get_running_loop().call_later(tenant.heartbeat + 0.05, look)


def _answer(document: dict[str, Any]) -> web.Response:
    return web.Response(body=to_json(document), content_type="application/json")
