"""The service's counters: plain numbers without dependencies. /metrics and Retry-After read them."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..core import Result
from ..memory.pool import Released

# Upper bounds in seconds: a token takes 1 ms on a fast GPU, a long answer minutes on a CPU.
BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    180.0,
    600.0,
    math.inf,
)
RETRY_LIMIT = 600  # seconds
_LATEST = 0.2  # weight of the latest call in the running mean


@dataclass(slots=True)
class Histogram:
    """Counts of observations per upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of a bound and the number of observations up to it, as in Prometheus."""
        sums = [float(sum(self.counts[: at + 1])) for at in range(len(BOUNDS))]
        return [
            ("+Inf" if math.isinf(bound) else f"{bound:g}", count) for bound, count in zip(BOUNDS, sums, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Times:
    """When a call was made, started, had its first token and ended, in perf_counter time; None if it did not."""

    made: float
    entered: float | None
    first_token: float | None
    ended: float


class Figures:
    """Counters of one service. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.tokens: Counter[tuple[str, str]] = Counter()  # by model, of: prompt, cached, completion, reasoning
        self.finishes: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)  # by model and stage
        self.faults: Counter[tuple[str, str]] = Counter()  # of decode, by model and kind
        self.shares: dict[str, float] = {}  # of the read bandwidth, by model
        self.released: Counter[str] = Counter()  # bytes requested, bytes measured, and number of releases
        self.renewals = 0
        self._mean_seconds: dict[str, float] = {}

    def answered(self, route: str, status: int) -> None:
        """Count a response."""
        with self._lock:
            self.answers[route, status] += 1

    def finished(self, model: str, times: Times) -> None:
        """Count a call that has ended."""
        entered = times.ended if times.entered is None else times.entered
        with self._lock:
            self.seconds[model, "queue"].observe(entered - times.made)
            self.seconds[model, "total"].observe(times.ended - times.made)
            if times.first_token is not None:
                self.seconds[model, "first_token"].observe(times.first_token - times.made)
            before, taken = self._mean_seconds.get(model), times.ended - entered
            self._mean_seconds[model] = taken if before is None else before + _LATEST * (taken - before)

    def wrote(self, model: str, choice: int, result: Result) -> None:
        """Count one finished choice of a call; all choices share one prompt."""
        usage, decode = result.usage, result.stages.get("decode")
        with self._lock:
            if choice == 0:
                self.tokens[model, "prompt"] += usage.prompt
                self.tokens[model, "cached"] += usage.cached
                for name, stage in result.stages.items():
                    self.seconds[model, name].observe(stage.seconds)
            self.tokens[model, "completion"] += usage.completion
            self.tokens[model, "reasoning"] += usage.reasoning
            self.finishes[model, result.finish] += 1
            if decode is not None:
                self.faults[model, "major"] += decode.major_faults
                self.faults[model, "minor"] += decode.minor_faults
                if decode.bandwidth_share is not None:
                    self.shares[model] = decode.bandwidth_share

    def returned(self, released: Iterable[Released]) -> None:
        """Count released bytes."""
        with self._lock:
            for one in released:
                self.released["asked"] += one.asked
                self.released["measured"] += one.measured
                self.released["times"] += 1

    def renewed(self) -> None:
        """Count a reload of an idle model."""
        with self._lock:
            self.renewals += 1

    def wait_seconds(self, model: str, ahead: int, at_once: int) -> int:
        """Estimated seconds until `ahead` calls of a model have run, `at_once` at a time; whole and at least 1, for
        Retry-After.
        """
        each = self._mean_seconds.get(model, 1.0)
        return max(1, min(RETRY_LIMIT, math.ceil(each * ahead / max(1, at_once))))
