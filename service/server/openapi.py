"""/openapi.json: the routes and their schemas, in OpenAPI 3.1."""

from __future__ import annotations

import re
from typing import Any

from .guard import OPEN_ROUTES
from .routes import ROUTES, Route

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_WORDS = {
    400: "Something in the request is wrong.",
    401: "The token is missing or wrong.",
    403: "The request comes from a web page, or names another host.",
    404: "There is nothing of that name.",
    409: "It can never be had on this machine.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait already; Retry-After says when to come again.",
    500: "The service failed.",
    501: "A package is not installed.",
    503: "Not now: the memory is full, the deadline passed, or the service starts or stops.",
}
_ALWAYS = (400, 403, 429)
_WITH_BODY = (408, 413, 415)


def document(version: str) -> dict[str, Any]:
    """The complete document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path), {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Onedesk",
            "version": version,
            "description": "OpenAI's API and a memory API over local models.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    is_open = route.path in OPEN_ROUTES
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.handler.__name__,
        "responses": _responses(route),
    }
    operation["security"] = [] if is_open else [{"token": []}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    names = re.findall(r"\{(\w+)", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _responses(route: Route) -> dict[str, Any]:
    is_open = route.path in OPEN_ROUTES
    answer: dict[str, Any] = {
        route.answer: {"schema": {"type": "string" if route.answer == "text/plain" else "object"}}
    }
    if route.streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answer}}
    failures = {
        *_ALWAYS,
        *route.failures,
        *(() if is_open else (401,)),
        *(_WITH_BODY if route.body is not None else ()),
    }
    for status in sorted(failures):
        shape = {"type": "object"} if is_open and status == 503 else {"$ref": "#/components/schemas/Error"}
        responses[str(status)] = {"description": _WORDS[status], "content": {"application/json": {"schema": shape}}}
    return responses
