"""/health and /v1/models."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..core import ModelSpec
from ..loader.names import ModelEntry
from .check import check
from .error_documents import ApiError, to_json
from .requests import spec_of
from .schemas import OWN
from .service import Service

_DIGITS = 12  # more than any context length has


async def health(service: Service, request: web.Request) -> web.Response:
    """Whether the service is alive, whether it accepts work, and whether it is asleep and what wakes it. Needs no
    token.
    """
    document = {
        "live": True,
        "ready": service.ready,
        "version": service.version,
        "asleep": service.asleep,
        "wake": service.waking,
    }
    return web.Response(body=to_json(document), status=200 if service.ready else 503, content_type="application/json")


async def models(service: Service, request: web.Request) -> web.Response:
    """Every model that is served."""
    rows = await service.in_thread(lambda: [_document(service, entry) for entry in service.models.entries()])
    return web.Response(body=to_json({"object": "list", "data": rows}), content_type="application/json")


async def model(service: Service, request: web.Request) -> web.Response:
    """One model."""
    name = request.match_info["name"]
    spec = _spec(service, request)
    found = await service.in_thread(
        lambda: [_document(service, entry, spec) for entry in service.models.entries() if entry.name == name]
    )
    if not found:
        raise ApiError(
            404, "there is no model of that name; /v1/models lists them", code="model_not_found", param="model"
        )
    return web.Response(body=to_json(found[0]), content_type="application/json")


def _spec(service: Service, request: web.Request) -> ModelSpec:
    """The requested variant: ?context=N&quant=Q, as in the `onedesk` object of a request. Raises ApiError 400."""
    asked: dict[str, Any] = dict(request.query)
    context = asked.get("context")
    if context is not None:
        asked["context"] = int(context) if context.isdecimal() and len(context) < _DIGITS else context
    check(asked, OWN)
    return spec_of({"onedesk": asked}, service.models.served.usual)


def _document(service: Service, entry: ModelEntry, spec: ModelSpec | None = None) -> dict[str, Any]:
    document = service.models.document(entry, spec)
    document["onedesk"]["at_once"] = service.batch_sizes.of(entry.name)
    return document
