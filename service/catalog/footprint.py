"""What a model's files hold by kind, and how much context and which pictures the machine can hold with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..loader.checkpoint import Checkpoint
from ..memory.budget import Budget, MemorySettings

STEP = 256  # tokens; contexts are multiples of it
_TABLE = re.compile(r"(^|\.)ngram_embedding\.")
# The vision tower, which is not opened, and the multi-token prediction layer, which may be left out.
_BESIDE = re.compile(r"(^|\.)visual\.|^mtp\.")


@dataclass(frozen=True, slots=True)
class Here:
    """This machine now: available bytes, and the rules for using them."""

    available: int
    settings: MemorySettings
    budget: Budget

    def beside(self, wanted: int) -> int:
        """Bytes left for image models next to a model that takes `wanted`."""
        return max(0, self.available - self.settings.floor - wanted)


def stored_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the files' tensors: of the text network (`weights`) and of its n-gram table."""
    found = {"weights": 0, "table": 0}
    for name, info in checkpoint.tensors.items():
        if not _BESIDE.search(name):
            found["table" if _TABLE.search(name) else "weights"] += info.nbytes
    return found


def longest(fits: Callable[[int], bool], allowed: int) -> int:
    """The longest context that fits: `allowed`, or the largest multiple of STEP below it; 0 where none fits."""
    if fits(allowed):
        return allowed
    low, high = 0, -(-allowed // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP
