"""Onedesk as the subject of a measurement, through the one door."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..api import OpenModel, open_model
from ..core import Request, Result, Sampling
from ..errors import ModelError
from ..memory.budget import MemorySettings
from ..memory.pool import Pool
from ..memory.truth import read_truth
from .subject import DecodeSample, FirstToken, Task

NEVER = -1e9  # added to the score of an end token


class Onedesk:
    """See Subject."""

    def __init__(self, task: Task) -> None:
        values: dict[str, Any] = task.memory
        self._task = task
        self._pool = Pool(task.device, MemorySettings(**values), lambda: read_truth(task.device))
        self._model: OpenModel | None = None

    def load(self) -> None:
        self._model = self._opened(load=True)

    def _opened(self, *, load: bool) -> OpenModel:
        task = self._task
        return open_model(
            task.model, pool=self._pool, context=task.context, quant=task.quant, device=task.device, load=load, kernel_cache=task.cache
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

    def prefill(self, ids: Sequence[int]) -> float:
        started = time.perf_counter()
        times, _ = self._run(ids, 1)
        return times[0] - started

    def decode(self, ids: Sequence[int], tokens: int) -> DecodeSample:
        times, result = self._run(ids, tokens)
        stage = result.stages["decode"]
        return DecodeSample(len(times) - 1, times[-1] - times[0], stage.major_faults, stage.allocations)

    def _run(self, ids: Sequence[int], tokens: int) -> tuple[list[float], Result]:
        """The time at which each token was there, and the result."""
        if self._model is None:
            raise ModelError("nothing is loaded; load before measuring")
        bias = dict.fromkeys(self._task.end_tokens, NEVER)
        # A prompt that was kept, or tokens that were guessed, would be measured as if they had been read.
        greedy = Sampling(temperature=0.0, logit_bias=bias)
        request = Request(ids=tuple(ids), sampling=greedy, max_tokens=tokens, prefix_reuse=False, speculation=False)
        times: list[float] = []
        result: Result | None = None
        for event in self._model.generate(request):
            if event.token is not None:
                times.append(time.perf_counter())
            result = event.result or result
        if result is None or len(times) != tokens:
            raise ModelError(f"{tokens} tokens were to be measured and {len(times)} came; raise --context or ask for fewer")
        return times, result

    def device_peak(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self._task.device == "cuda" else None
