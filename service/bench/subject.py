"""What can be measured: an engine with one model, behind the same four calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """Which model an engine is measured with. `end_tokens` are never to be chosen, so that every run has the same length."""

    model: Path
    device: str
    quant: str
    context: int
    cache: Path
    memory: dict[str, float]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode: steps after the first token, the seconds they took, and the counts of the whole of them (None: not known)."""

    steps: int
    seconds: float
    major_faults: int
    allocations: int | None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """From a closed model to its first token: seconds in all, of which `prefill` with its waits, and the waits for weights in it (None:
    nothing was waited for).
    """

    seconds: float
    prefill: float
    waited: float | None


class Subject(Protocol):
    """An engine in a process of its own. `load` and `unload` alternate; the others need a loaded model."""

    def load(self) -> None:
        """Bring the model into memory, ready to run."""
        ...

    def unload(self) -> None:
        """Give its memory back."""
        ...

    def first_token(self, ids: Sequence[int], *, overlap: bool) -> FirstToken:
        """Open the model and read the prompt; `overlap` false: all of it is in memory before the prompt is read. Leaves it loaded."""
        ...

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds from the prompt's ids to the first token, greedy."""
        ...

    def decode(self, ids: Sequence[int], tokens: int) -> DecodeSample:
        """Write `tokens` tokens behind the prompt, greedy."""
        ...

    def device_peak(self) -> int | None:
        """The most bytes held on a device of its own memory, None on the CPU."""
        ...
