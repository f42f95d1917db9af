"""/health and /v1/models."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..loader.names import ModelEntry
from .problems import ApiError, to_json
from .service import Service


async def health(service: Service, request: web.Request) -> web.Response:
    """Whether the service lives, and whether it takes work; needs no token."""
    document = {"live": True, "ready": service.ready, "version": service.version}
    return web.Response(body=to_json(document), status=200 if service.ready else 503, content_type="application/json")


async def models(service: Service, request: web.Request) -> web.Response:
    """Every model that can be asked for."""
    rows = await service.in_thread(lambda: [_document(service, entry) for entry in service.models.entries()])
    return web.Response(body=to_json({"object": "list", "data": rows}), content_type="application/json")


async def model(service: Service, request: web.Request) -> web.Response:
    """One of them."""
    name = request.match_info["name"]
    found = await service.in_thread(lambda: [_document(service, entry) for entry in service.models.entries() if entry.name == name])
    if not found:
        raise ApiError(404, "there is no model of that name; /v1/models lists them", code="model_not_found", param="model")
    return web.Response(body=to_json(found[0]), content_type="application/json")


def _document(service: Service, entry: ModelEntry) -> dict[str, Any]:
    document = service.models.document(entry)
    document["onedesk"]["at_once"] = service.places.of(entry.name)
    return document
