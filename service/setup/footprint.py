"""What a model's files and its config say of memory, whether or not this version opens it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..loader.checkpoint import Checkpoint
from ..memory.budget import Budget, MemorySettings, Need, show
from .census import Census
from .plan import STEP, TABLE_CACHE, Machine, load_of, longest_context

_TABLE = re.compile(r"(^|\.)ngram_embedding\.")
# The picture tower and the draft layer, which are not opened.
_BESIDE = re.compile(r"(^|\.)visual\.|^mtp\.")


@dataclass(frozen=True, slots=True)
class Here:
    """This machine now: bytes available, what of them may be used, and the device that would compute."""

    available: int
    settings: MemorySettings
    budget: Budget
    device: str

    def beside(self, wanted: int) -> int:
        """Bytes that are left for image models beside a model that takes `wanted`."""
        return max(0, self.available - self.settings.floor - wanted)


def stored_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the files' tensors: of the text network (`weights`) and of its n-gram table."""
    found = {"weights": 0, "table": 0}
    for name, info in checkpoint.tensors.items():
        if not _BESIDE.search(name):
            found["table" if _TABLE.search(name) else "weights"] += info.nbytes
    return found


def longest(need_at: Callable[[int], Need], allowed: int, here: Here) -> int:
    """The longest context, at most `allowed`, whose need the budget has room for: a multiple of STEP, or all; 0 where none has."""

    def fits(context: int) -> bool:
        return need_at(context).with_headroom(here.settings.headroom) <= here.budget.spendable

    if fits(allowed):
        return allowed
    low, high = 0, -(-allowed // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def planned(checkpoint: Checkpoint, census: Census, context: int, here: Here) -> dict[str, Any]:
    """The keys of a row for a family that is only counted: `context` the longest that would fit, `images` what is left at `context`."""
    sizes = stored_bytes(checkpoint)
    machine = Machine(here.available, None, here.settings, here.device)
    load = load_of(sizes["weights"], min(sizes["table"], TABLE_CACHE), census, machine)
    headroom, room = here.settings.headroom, here.budget.spendable
    wanted = load.wanted(min(context, census.max_position), headroom)
    would = "there would be room" if wanted <= room else "there would be no room"
    return {
        "bytes": {**sizes, "kv_per_1k": 1000 * load.kv_token},
        "context": longest_context(load, census.max_position, headroom, room),
        "images": here.beside(wanted),
        "reason": f"{would}: {show(wanted)} with headroom for {min(context, census.max_position)} tokens, of {show(room)} in the budget",
    }
