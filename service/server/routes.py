"""The list of all routes, from which the application and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from .check import Schema
from .embeddings import embeddings
from .generate import chat, completions
from .health import health, model, models
from .leases import give_back_lease, take_lease, tell_lease
from .memory import release, set_policy, show_memory, sleep, wake
from .messages_api import count_tokens, messages
from .messages_requests import COUNT_TOKENS, MESSAGES
from .metrics import metrics
from .rerank import rerank
from .responses_api import responses
from .responses_requests import RESPONSES
from .schemas import CHAT, COMPLETION, EMBEDDINGS, HEARTBEAT_OF_LEASE, LEASE, NOTHING, POLICY, RELEASE, RERANK, SLEEP
from .service import Service

Handler = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `failures` are the statuses that it may respond with, besides those of every route."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Schema | None = None
    failures: tuple[int, ...] = ()
    answer: str = "application/json"
    streams: bool = False


_GENERATING = (404, 429, 500, 503)

ROUTES = (
    Route("GET", "/health", health, "Whether the service lives and is ready.", failures=(503,)),
    Route("GET", "/v1/models", models, "The models that can be asked for."),
    Route(
        "GET", "/v1/models/{name:.+}", model, "One of the models; ?context=N&quant=Q: in that form.", failures=(404,)
    ),
    Route("POST", "/v1/chat/completions", chat, "Answer a conversation.", CHAT, _GENERATING, streams=True),
    Route("POST", "/v1/completions", completions, "Go on with a text.", COMPLETION, _GENERATING, streams=True),
    Route("POST", "/v1/embeddings", embeddings, "A vector for each text.", EMBEDDINGS, _GENERATING),
    Route("POST", "/v1/rerank", rerank, "Documents by their relevance to a query.", RERANK, _GENERATING),
    Route(
        "POST", "/v1/responses", responses, "Answer as OpenAI's Responses API.", RESPONSES, _GENERATING, streams=True
    ),
    Route("POST", "/v1/messages", messages, "Answer as Anthropic's Messages API.", MESSAGES, _GENERATING, streams=True),
    Route("POST", "/v1/messages/count_tokens", count_tokens, "Tokens of a conversation.", COUNT_TOKENS, _GENERATING),
    Route("GET", "/v1/memory", show_memory, "What memory there is, and who holds it."),
    Route("POST", "/v1/memory/release", release, "Let owners give way.", RELEASE, (404, 409)),
    Route("POST", "/v1/memory/policy", set_policy, "When a model gives way.", POLICY, (404, 500)),
    Route("POST", "/v1/memory/sleep", sleep, "Give everything back until it is woken.", SLEEP),
    Route("POST", "/v1/memory/wake", wake, "Load again and work.", NOTHING, (500, 503)),
    Route("POST", "/v1/memory/leases", take_lease, "Room for another process.", LEASE, (503,)),
    Route("POST", "/v1/memory/leases/{key}", tell_lease, "Its heartbeat.", HEARTBEAT_OF_LEASE, (404,)),
    Route("DELETE", "/v1/memory/leases/{key}", give_back_lease, "It has ended.", failures=(404,)),
    Route("GET", "/metrics", metrics, "Figures for Prometheus.", failures=(501,), answer="text/plain"),
)
