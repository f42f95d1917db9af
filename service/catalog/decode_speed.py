"""The decode speed to expect: from the bytes a token reads, the memory's read rate, and what this engine reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..memory.read_bandwidth import keep_figure, known_figure

# Share of the read bandwidth that decode of one sequence reached, by bits per weight: Qwen3-0.6B on 2 cores with AVX2,
# Qwen3-4B on an H200 (docs/performance.md). `onedesk bench decode` measures this machine's own.
REACHED: Mapping[str, Mapping[int, float]] = {
    "cpu": {16: 0.86, 8: 0.73, 4: 0.65},
    "cuda": {16: 1.0, 8: 0.92, 4: 0.68},
}
# Seconds per layer that do not depend on its bytes: the launches of a CUDA graph. From the two sizes of Qwen3 in BF16
# on the H200, 0.6B with 28 layers and 4B with 36.
LAYER_SECONDS: Mapping[str, float] = {"cpu": 0.0, "cuda": 10e-6}


@dataclass(frozen=True, slots=True)
class TokenReads:
    """What one token of one sequence reads: `nbytes` of weights, `parameters` of them, in `layers` layers."""

    nbytes: int
    parameters: int
    layers: int

    @property
    def bits(self) -> int:
        """Bits per weight, as the nearest of 16, 8 and 4."""
        mean = 8 * self.nbytes / max(1, self.parameters)
        return 16 if mean > 12 else 8 if mean > 6 else 4


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """A machine's `bandwidth` in bytes per second of `device` (cpu or cuda), and what it reached in the cache folder
    `cache` (None: another machine).
    """

    device: str
    bandwidth: float
    cache: Path | None = None

    def tokens_per_second(self, reads: TokenReads) -> float:
        """Expected at batch 1 after a short text, without draft tokens."""
        return 1 / (reads.nbytes / (self.bandwidth * self._share(reads.bits)) + self._fixed(reads))

    def keep(self, reads: TokenReads, measured: float) -> None:
        """Save the share that `measured` tokens per second reached, for later estimates on this machine."""
        left = 1 / measured - self._fixed(reads)
        if self.cache is not None and left > 0:
            keep_figure(self.cache, self.device, reads.nbytes / left / self.bandwidth, _name(reads.bits))

    def _share(self, bits: int) -> float:
        here = None if self.cache is None else known_figure(self.cache, self.device, _name(bits))
        return REACHED[self.device][bits] if here is None else here

    def _fixed(self, reads: TokenReads) -> float:
        return reads.layers * LAYER_SECONDS[self.device]


def _name(bits: int) -> str:
    return f"decode share at {bits} bits"


def shown_speed(tokens_per_second: float | None) -> str:
    """For a table: about 28; - where there is no estimate."""
    if tokens_per_second is None:
        return "-"
    return f"{tokens_per_second:.1f}" if tokens_per_second < 10 else f"{tokens_per_second:,.0f}"
