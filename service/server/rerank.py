"""/v1/rerank: documents by their relevance to a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from ..api import OpenModel
from ..core import CancelCheck
from ..errors import Cancelled, RequestError
from .body import read_json
from .error_documents import ApiError, to_json
from .models import Uses
from .requests import spec_of, whole
from .schemas import RERANK
from .service import Service

_Pairs = tuple[list[list[int]], tuple[int, int]]


async def rerank(service: Service, request: web.Request) -> web.StreamResponse:
    """The documents with the probability of yes for each, the most relevant first; equal ones in the order given."""
    body = await read_json(service, request, RERANK)
    texts = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
    with service.models.using() as uses:
        name, model, (prompts, answers) = await service.prepare(
            body.get("model"), lambda cancel: _begin(service, body, texts, uses, cancel)
        )
        scores: Sequence[float] = await service.work_out(
            name, model, lambda ranker, stopping: ranker.rank(prompts, answers, cancel=stopping)
        )
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: whole(body.get("top_n"))]
    shown = bool(body.get("return_documents"))
    results = [
        {"index": at, "relevance_score": scores[at]} | ({"document": {"text": texts[at]}} if shown else {})
        for at in order
    ]
    count = sum(map(len, prompts))
    document = {"model": name, "results": results, "usage": {"prompt_tokens": count, "total_tokens": count}}
    return web.Response(body=to_json(document), content_type="application/json")


def _begin(
    service: Service, body: Mapping[str, Any], texts: Sequence[str], uses: Uses, cancel: CancelCheck
) -> tuple[str, OpenModel, _Pairs]:
    """The model, and the prompt of every document, checked before anything is queued."""
    name, model = service.find(spec_of(body, service.models.served.usual), uses)
    pairs = model.pair_prompts(body["query"], body.get("instruction") or "")
    most = whole(body.get("max_tokens_per_doc"))
    prompts: list[list[int]] = []
    for at, text in enumerate(texts):
        if cancel():
            raise Cancelled("stopped before the documents were read")
        try:
            prompts.append(pairs.of(text, most, model.context))
            model.check_fits(prompts[-1])
        except RequestError as error:
            message = f"documents[{at}]: {error}"
            raise ApiError(400, message, code="wrong_value", param="documents") from error
    return name, model, (prompts, pairs.answers)
