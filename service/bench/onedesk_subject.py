"""Onedesk as the subject of a measurement, through the one door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..api import OpenModel, open_model
from ..core import Request, Result
from ..engine.runner import CHUNK
from ..errors import ModelError
from ..memory.budget import MemorySettings
from ..memory.machine_pool import make_pool
from .samplings import ASKED, GREEDY, SAMPLINGS
from .subject import DecodeSample, FirstToken, Prefix, SubjectSpec, Wake

NEVER = -1e9  # added to the score of an end token


def lead_tokens(prompt: int, batch: int) -> int:
    """Tokens that the first sequence of a batch may decode before the last has read its prompt: one per chunk."""
    return (batch - 1) * (-(-prompt // CHUNK) + 1)


class OnedeskSubject:
    """See Subject."""

    def __init__(self, task: SubjectSpec) -> None:
        values: dict[str, Any] = dict(task.memory)
        self._task = task
        self._pool = make_pool(task.device, MemorySettings(**values))
        self._model: OpenModel | None = None

    def load(self) -> None:
        self._model = self._opened(load=True)

    def _opened(self, *, load: bool) -> OpenModel:
        task = self._task
        return open_model(
            task.model,
            pool=self._pool,
            context=task.context,
            quant=task.quant,
            device=task.device,
            load=load,
            kernel_cache=task.cache,
            sequences=task.sequences,
        )

    def unload(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = None

    def first_token(self, ids: Sequence[int], *, overlap: bool) -> FirstToken:
        started = time.perf_counter()
        self._model = self._opened(load=not overlap)
        times, result = self._run(ids, 1)
        prefetch = result.stages.get("prefetch")
        return FirstToken(times[0] - started, result.stages["prefill"].seconds, prefetch.seconds if prefetch else None)

    def wake(self, ids: Sequence[int]) -> Wake:
        self._model_there.give_way()
        started = time.perf_counter()
        times, result = self._run(ids, 1)
        return Wake(times[0] - started, result.stages["load"].seconds)

    def prefill(self, ids: Sequence[int]) -> float:
        started = time.perf_counter()
        times, _ = self._run(ids, 1)
        return times[0] - started

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: str = GREEDY) -> DecodeSample:
        """Sequences begin one after the other, so the first get more tokens; only the time in which all decode
        counts.
        """
        written = tokens + lead_tokens(len(prompts[0]), len(prompts))
        seen, times = set(), []
        result: Result | None = None
        for event in self._model_there.generate_batch(
            [self._request(ids, written, sampling=sampling) for ids in prompts]
        ):
            if event.token is not None:
                seen.add(event.request)
                if len(seen) == len(prompts) and result is None:
                    times.append(time.perf_counter())
            result = event.result or result
        steps = (len(times) - 1) // len(prompts)
        if result is None or steps < 1:
            raise ModelError(
                f"{len(prompts)} rows of {tokens} tokens never wrote together; ask for fewer, or for a shorter prompt"
            )
        stage = result.stages["decode"]
        return DecodeSample(steps, times[steps * len(prompts)] - times[0], stage.major_faults, stage.allocations)

    def prefix(self, ids: Sequence[int], tails: Sequence[Sequence[int]]) -> Prefix:
        """First tokens after `ids` and a tail, a different tail each time: all of it read, then with the prefix
        cached.
        """
        read = self._first((*ids, *tails[0]))[0]
        self._first((*ids, *tails[1]), keep=True)
        kept, result = self._first((*ids, *tails[2]), keep=True)
        return Prefix(read, kept, result.usage.cached)

    def _first(self, ids: Sequence[int], *, keep: bool = False) -> tuple[float, Result]:
        started = time.perf_counter()
        times, result = self._run(ids, 1, keep=keep)
        return times[0] - started, result

    def _run(self, ids: Sequence[int], tokens: int, *, keep: bool = False) -> tuple[list[float], Result]:
        """The time at which each token was there, and the result."""
        times: list[float] = []
        result: Result | None = None
        for event in self._model_there.generate(self._request(ids, tokens, keep=keep)):
            if event.token is not None:
                times.append(time.perf_counter())
            result = event.result or result
        if result is None or len(times) != tokens:
            raise ModelError(
                f"{tokens} tokens were to be measured and {len(times)} came; raise --context or ask for fewer"
            )
        return times, result

    @property
    def _model_there(self) -> OpenModel:
        if self._model is None:
            raise ModelError("nothing is loaded; load before measuring")
        return self._model

    def _request(self, ids: Sequence[int], tokens: int, *, keep: bool = False, sampling: str = GREEDY) -> Request:
        """Without a prefix cache (unless that is measured) and draft tokens: they would count as computed tokens."""
        chosen, never = SAMPLINGS[sampling], dict.fromkeys(self._task.end_tokens, NEVER)
        chosen = replace(chosen, logit_bias={**chosen.logit_bias, **never})
        same: dict[str, Any] = {"max_tokens": tokens, "prefix_reuse": keep, "speculation": False}
        return Request(ids=tuple(ids), sampling=chosen, **same, **ASKED.get(sampling, {}))

    def device_peak(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self._task.device == "cuda" else None
