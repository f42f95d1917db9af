"""Rotation speed of each pair of a head's numbers in the rotary embedding (Su et al. 2021), also beyond the positions
of training.

Source of the extension: YaRN (Peng et al. 2023), sections 3.2 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rotary embeddings that reach `factor` times the `original` positions of training.

    Pairs that rotate more than `fast` times in `original` positions stay as they are. Pairs that rotate less than
    `slow` times rotate `factor` times slower. Those between are mixed. `attention` multiplies cos and sin. `whole`: the
    bounds are rounded to whole pairs.
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
        """Share, 0 to 1, by which each of the dim / 2 pairs rotates slower: fp32."""
        first, last = self._pair(self.fast, dim, theta), self._pair(self.slow, dim, theta)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001
        return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)

    def _pair(self, turns: float, dim: int, theta: float) -> float:
        """The pair, as a fraction, that rotates `turns` times in the original positions."""
        return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """The factor of cos and sin if a config does not state it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def turns_per_position(dim: int, theta: float, yarn: Yarn | None = None) -> torch.Tensor:
    """Radians by which each pair rotates per position: fp32 [dim / 2]."""
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if yarn is None:
        return plain
    slowed = yarn.slowed(dim, theta)
    return plain / yarn.factor * slowed + plain * (1 - slowed)
