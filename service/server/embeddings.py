"""/v1/embeddings: one vector per text."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ..api import OpenModel
from ..core import CancelCheck
from ..errors import Cancelled
from .body import read_json
from .error_documents import ApiError, to_json
from .models import Uses
from .pending import Work
from .requests import prompts, spec_of, whole
from .schemas import EMBEDDINGS
from .service import Service


async def embeddings(service: Service, request: web.Request) -> web.StreamResponse:
    """Vectors of length 1: the last token's state after the final norm, cut to `dimensions` if that is given."""
    body = await read_json(service, request, EMBEDDINGS)
    dimensions = whole(body.get("dimensions"))
    with service.models.using() as uses:
        name, model, ids = await service.prepare(
            body.get("model"), lambda cancel: _begin(service, body, dimensions, uses, cancel)
        )
        vectors = await service.work_out(name, model, _embed(ids, dimensions))
    as_base64 = body.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": at, "embedding": _written(vector, as_base64)}
        for at, vector in enumerate(vectors)
    ]
    count = sum(map(len, ids))
    document = {"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return web.Response(body=to_json(document), content_type="application/json")


def _begin(
    service: Service, body: Mapping[str, Any], dimensions: int | None, uses: Uses, cancel: CancelCheck
) -> tuple[str, OpenModel, list[list[int]]]:
    """The model and the token ids of every input, checked before anything is queued."""
    name, model = service.find(spec_of(body, service.models.served.usual), uses)
    if dimensions is not None and dimensions > model.hidden_size:
        message = f"dimensions is {dimensions}, and this model has {model.hidden_size}; use at most that"
        raise ApiError(400, message, code="wrong_value", param="dimensions")
    ids: list[list[int]] = []
    instruction = body.get("instruction") or ""
    for one in prompts(body["input"]):
        if cancel():
            raise Cancelled("stopped before the inputs were read")
        if instruction and not isinstance(one, str):
            message = "instruction goes with texts; token ids are read as they are"
            raise ApiError(400, message, code="wrong_value", param="instruction")
        ids.append(model.encode_for_vector(one, instruction) if isinstance(one, str) else [int(token) for token in one])
        model.check_fits(ids[-1])
    return name, model, ids


def _embed(ids: Sequence[Sequence[int]], dimensions: int | None) -> Work:
    return lambda model, stopping: [_cut(model.embed(one, cancel=stopping), dimensions) for one in ids]


def _cut(vector: Sequence[float], dimensions: int | None) -> list[float]:
    kept = list(vector[:dimensions])
    norm = math.sqrt(math.fsum(value * value for value in kept))
    return [value / norm for value in kept] if norm else kept


def _written(vector: Sequence[float], as_base64: bool) -> Any:
    """float32 little-endian in base64, or numbers."""
    return base64.b64encode(array("f", vector).tobytes()).decode("ascii") if as_base64 else vector
