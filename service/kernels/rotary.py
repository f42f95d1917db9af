"""How fast each pair of a head's numbers is turned by the rotary embedding (Su et al. 2021), also beyond the positions of training.

Source of the stretching: YaRN (Peng et al. 2023), sections 3.2 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rotary embeddings that reach `factor` times as far as the `original` positions of training.

    Pairs that turn more than `fast` times in `original` positions stay as they are, those that turn less than `slow` times turn `factor`
    times slower, and those between are mixed. `attention` multiplies cos and sin. `whole`: the bounds are rounded to whole pairs.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    whole: bool = True

    @property
    def reach(self) -> int:
        """Positions that it is meant for."""
        return int(self.original * self.factor)

    def slowed(self, dim: int, theta: float) -> torch.Tensor:
        """Of each of the dim / 2 pairs the share, 0 to 1, in which it turns slower: fp32."""
        first, last = self._pair(self.fast, dim, theta), self._pair(self.slow, dim, theta)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001
        return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)

    def _pair(self, turns: float, dim: int, theta: float) -> float:
        """The pair, counted as a fraction, that turns so often in the original positions."""
        return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """By what cos and sin are multiplied for a factor, where a config does not say it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def turns_per_position(dim: int, theta: float, yarn: Yarn | None = None) -> torch.Tensor:
    """Radians by which each pair is turned from one position to the next: fp32 [dim / 2]."""
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if yarn is None:
        return plain
    slowed = yarn.slowed(dim, theta)
    return plain / yarn.factor * slowed + plain * (1 - slowed)
