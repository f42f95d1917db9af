"""Sends a request to an open model through its public API, and collects the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onedesk.service.api import OpenModel
from onedesk.service.core import Event, Message, Request, Result, Sampling

CONTEXT = 1024


def ask(text: str = "a red cat", **changes: Any) -> Request:
    return replace(Request(messages=(Message("user", text),), sampling=Sampling(seed=7), max_tokens=24), **changes)


def run(model: OpenModel, request: Request, cancel: Callable[[], bool] | None = None) -> tuple[list[Event], Result]:
    events = list(model.generate(request, cancel=cancel))
    assert events[-1].result is not None
    assert all(event.result is None for event in events[:-1])
    return events, events[-1].result
