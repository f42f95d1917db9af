"""Answers on a terminal while they are generated, and as documents."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

from ..console import Stop, failure, show_progress
from ..core import Event, Request, Result
from ..errors import RequestError

if TYPE_CHECKING:
    from ..api import OpenModel

ONLY_REASONING = (
    "the model only reasoned and gave no answer; raise --max-tokens, set --thinking-budget, or use --thinking off"
)


def run_request(model: OpenModel, request: Request, stop: Stop, *, quiet: bool) -> list[Result]:
    """Run one request; returns the results of the choices in order. Choices that had not begun when it was stopped are
    left out, except the first.

    Unless quiet, texts go to stdout and reasoning to stderr: the first choice's while it is generated, the others' one
    after the other.
    """
    screen = None if quiet else _Screen()
    results: dict[int, Result] = {}
    for event in model.generate(request, cancel=stop, progress=None if quiet else show_progress):
        if screen is not None:
            screen.take(event)
        if event.result is not None:
            results[event.choice] = event.result
    if not results:
        raise RuntimeError("the generation ended without a result")
    ordered = [results[choice] for choice in sorted(results)]
    return ordered[:1] + [result for result in ordered[1:] if result.finish != "cancelled" or result.usage.completion]


class _Screen:
    """Shows concurrent choices in their order: output of a later choice waits."""

    def __init__(self) -> None:
        self._shown = 0
        self._waiting: dict[int, list[Event]] = {}

    def take(self, event: Event) -> None:
        self._waiting.setdefault(event.choice, []).append(event)
        while self._shown in self._waiting:
            ended = self._show(self._waiting.pop(self._shown))
            if not ended:
                return
            self._shown += 1

    def _show(self, events: Iterable[Event]) -> bool:
        """Whether the last event is the choice's last."""
        ended = False
        for event in events:
            if event.progress:
                show_progress(event.progress)
            _write(sys.stderr, event.reasoning)
            _write(sys.stdout, event.text)
            if event.result is not None:
                ended = True
                _write(sys.stdout, "\n")
                _tell(event.result)
        return ended


def _tell(result: Result) -> None:
    first, total, usage = result.seconds["first_token"], result.seconds["total"], result.usage
    kept = f" ({usage.cached} of them kept from before)" if usage.cached else ""
    times = f"the first after {first:.2f} s, all after {total:.2f} s" if usage.completion else f"{total:.2f} s"
    _write(
        sys.stderr,
        f"[{result.finish}: {usage.prompt}{kept} + {usage.completion} tokens, {times}; seed {result.seed}]\n",
    )
    if not answered(result):
        _write(sys.stderr, f"onedesk: {ONLY_REASONING}\n")


def _write(stream: TextIO, text: str) -> None:
    if text:
        stream.write(text)
        stream.flush()


def answered(result: Result) -> bool:
    """False if the result is only reasoning and was not stopped."""
    return bool(result.text.strip() or not result.reasoning.strip() or result.finish == "cancelled")


def document(result: Result) -> dict[str, Any]:
    """The result for --json."""
    values = asdict(replace(result, seconds=dict(result.seconds), stages={}, sampling={})) | {"ids": list(result.ids)}
    values["sampling"] = {name: asdict(one) for name, one in result.sampling.items()}
    values["stages"] = {name: asdict(stage) for name, stage in result.stages.items()}
    return values if answered(result) else values | failure(RequestError(ONLY_REASONING))
