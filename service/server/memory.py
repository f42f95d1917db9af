"""/v1/memory: memory in use per owner, and releasing it for other programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from ..api import OpenModel
from ..catalog.memory_report import memory_report
from ..core import CancelCheck
from ..memory.budget import show
from ..memory.pool import Released
from .body import read_json
from .error_documents import ApiError, to_json
from .requests import policy_of, spec_of
from .schemas import NOTHING, POLICY, RELEASE, SLEEP
from .service import Service, Waking


async def show_memory(service: Service, request: web.Request) -> web.Response:
    """The document of `onedesk memory` for this process."""
    report = await service.in_thread(_report, service)
    return web.Response(body=to_json(report), content_type="application/json")


def _report(service: Service) -> dict[str, Any]:
    report = memory_report(service.registry.config, device=service.models.served.usual.device, proc=None)
    return report | {
        "leases": [*report["leases"], *service.tenants.rows()],
        "asleep": service.asleep,
        "wake": service.waking,
    }


async def release(service: Service, request: web.Request) -> web.Response:
    """Release one owner, or as many owners as `bytes` needs. Responds once the bytes are back, measured."""
    body = await read_json(service, request, RELEASE)
    owner, nbytes = body.get("owner"), body.get("bytes")
    if (owner is None) == (nbytes is None):
        raise ApiError(400, "give either owner or bytes", code="wrong_value", param="owner")
    if nbytes is not None:
        return _answer(service, *await service.giving_back(_make_room, service, int(nbytes)))
    if body.get("context") is not None or body.get("quant") is not None:
        spec = spec_of({"model": owner, "onedesk": body}, service.models.served.usual)
        _, model = await service.in_thread(service.find, spec)
        return _answer(service, await service.giving_back(model.give_way), [model])
    models = [model for model in service.registry.models() if model.name == owner]
    return _answer(service, await service.giving_back(_release, service, str(owner)), models)


def _make_room(service: Service, nbytes: int) -> tuple[list[Released], list[OpenModel]]:
    """The bytes that came back and the owners that were asked; none if there is enough memory already. Raises ApiError
    409 for more than the pool's limit: nothing is released in vain."""
    pool = service.registry.pool(service.models.served.usual.device)
    if nbytes > pool.budget.limit:
        message = f"{show(nbytes)} can never be leased here, where the limit is {show(pool.budget.limit)}; ask for less"
        raise ApiError(409, message, code="too_much", param="bytes")
    lacking = nbytes - max(0, pool.room().now)
    return (pool.make_room(lacking), service.registry.models()) if lacking > 0 else ([], [])


def _release(service: Service, owner: str) -> list[Released]:
    """Ask everything of that name: a lease of another process may have the name of a model."""
    tenants = {tenant.owner for tenant in service.tenants.all}
    models = {model.name for model in service.registry.models()}
    if owner not in tenants | models:
        known = ", ".join(sorted(tenants | models)) or "none"
        raise ApiError(404, f"no owner has that name; the owners are: {known}", code="unknown_owner", param="owner")
    released = service.registry.release(owner) if owner in models else []
    return [*released, *(service.tenants.release(owner) if owner in tenants else [])]


async def set_policy(service: Service, request: web.Request) -> web.Response:
    """Set when a model gives way. A time that has already passed counts."""
    own = {"onedesk": await read_json(service, request, POLICY)}
    policy = policy_of(own)
    name, model = await service.in_thread(
        service.find, spec_of({"model": own["onedesk"]["owner"], **own}, service.models.served.usual)
    )
    if policy is not None:
        model.policy = policy
    return web.Response(body=to_json({"owner": name, "policy": str(model.policy)}), content_type="application/json")


async def sleep(service: Service, request: web.Request) -> web.Response:
    """Release everything after running requests have ended. With "wake": "request" the next request for a model wakes
    it; with "manual" requests stay queued until `wake`.
    """
    body = await read_json(service, request, SLEEP)
    # A client that disconnects meanwhile must not leave it half asleep.
    return await asyncio.shield(asyncio.ensure_future(_sleep(service, body.get("wake") or "request")))


async def _sleep(service: Service, waking: Waking) -> web.Response:
    service.fall_asleep(waking)
    await asyncio.gather(*(worker.idle() for worker in service.workers))
    loaded = [model for model in service.registry.models() if model.loaded]
    service.slept += [model for model in loaded if model not in service.slept]
    return _answer(service, await service.giving_back(service.registry.release), service.registry.models())


async def wake(service: Service, request: web.Request) -> web.Response:
    """Load what was loaded before sleep, and accept work again."""
    await read_json(service, request, NOTHING)
    slept, service.slept = service.slept, []
    try:
        woken = await service.giving_back(lambda: [_load(model, lambda: service.aborting) for model in slept])
    finally:
        service.wake_up()
    return web.Response(body=to_json({"woken": woken}), content_type="application/json")


def _load(model: OpenModel, cancel: CancelCheck) -> dict[str, Any]:
    began = time.perf_counter()
    model.load(cancel=cancel)
    return {"owner": model.name, "bytes": model.held_bytes(), "seconds": time.perf_counter() - began}


def _answer(service: Service, released: Iterable[Released], models: Sequence[OpenModel]) -> web.Response:
    """What came back, and which of the asked `models` kept their bytes because they are generating."""
    given = list(released)
    service.figures.returned(given)
    rows = [{"owner": one.owner, "asked": one.asked, "measured": one.measured, "seconds": one.seconds} for one in given]
    busy = sorted({model.name for model in models if model.busy})
    return web.Response(body=to_json({"released": rows, "busy": busy}), content_type="application/json")
