"""The effective batch size per model: the configured maximum; less where the machine is not faster with more; 1 while
memory is short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..api import OpenModel
from ..core import Request, Sampling
from ..engine.buffers import MAX_BATCH
from ..registry import Registry

log = logging.getLogger(__name__)

# A measurement decodes this many tokens per sequence. 12 steps of an 8B model on two CPU cores take 5 s.
_TOKENS = 12
# A batch must be faster than one sequence by this factor. Less is noise, and each sequence waits longer for its own
# tokens.
_GAIN = 1.1


class BatchSizes:
    """The effective batch size of every model of a service. Thread-safe."""

    def __init__(self, most: int, registry: Registry) -> None:
        self.most = min(most, MAX_BATCH)
        self._registry = registry
        self._measured: dict[str, int] = {}

    def now(self, model: OpenModel) -> int:
        """Sequences that may decode together now: 1 while memory is short or the machine is too hot."""
        if self._registry.watch(model.pool.device).slow:
            return 1
        return self.usual(model)

    def usual(self, model: OpenModel) -> int:
        """Sequences that decode together when nothing is short."""
        return self.of(model.name)

    def of(self, name: str) -> int:
        """The same, by a model's name."""
        return self._measured.get(name, self.most)

    def measure(self, model: OpenModel, cancel: Callable[[], bool] | None = None) -> None:
        """Measure whether a batch gives more tokens per second than sequences one at a time. Once per model, in its
        thread.
        """
        if self.most == 1 or model.name in self._measured:
            return
        one, together = _rate(model, 1, cancel), _rate(model, self.most, cancel)
        if one is None or together is None:
            return
        self._measured[model.name] = self.most if together >= _GAIN * one else 1
        words = "one after the other" if self._measured[model.name] == 1 else f"{self.most} at once"
        log.info(
            "%s: %.1f tokens a second alone, %.1f with %d rows: requests are written %s",
            model.name,
            one,
            together,
            self.most,
            words,
        )


def _rate(model: OpenModel, rows: int, cancel: Callable[[], bool] | None) -> float | None:
    """Tokens per second of decode with this batch size; None if it was stopped."""
    request = Request(ids=(0,), sampling=Sampling(seed=0), max_tokens=_TOKENS, prefix_reuse=False, speculation=False)
    began, tokens = 0.0, 0
    for event in model.generate_batch([request] * rows, cancel=cancel):
        if event.token is not None:
            began = began or time.perf_counter()
            tokens += 1
        if event.result is not None and event.result.finish == "cancelled":
            return None
    # The first token of each sequence comes from prefill; a sequence may have ended early.
    return max(0, tokens - rows) / max(1e-9, time.perf_counter() - began)
