"""What can be measured: an engine with one model, behind the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """Which model an engine is measured with. `end_tokens` are never to be chosen, so that every run has the same length; `sequences` of
    `context` tokens are held at once.
    """

    model: Path
    device: str
    quant: str
    context: int
    cache: Path
    memory: Mapping[str, float]
    end_tokens: tuple[int, ...]
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode: steps while all rows wrote, the seconds they took, and the counts of the whole of them (None: not known)."""

    steps: int
    seconds: float
    major_faults: int
    allocations: int | None


@dataclass(frozen=True, slots=True)
class Prefix:
    """First tokens of an open model behind prompts that begin alike: seconds where all of it is read, seconds where the beginning was kept
    from a prompt before, and how many tokens that were.
    """

    read: float
    kept: float
    cached: int


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

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> DecodeSample:
        """Write behind all prompts at once, greedy: about `tokens` steps of all of them."""
        ...

    def prefix(self, ids: Sequence[int], tails: Sequence[Sequence[int]]) -> Prefix:
        """First tokens behind `ids` and each of three tails. Raises PeerError where nothing is kept between prompts."""
        ...

    def device_peak(self) -> int | None:
        """The most bytes held on a device of its own memory, None on the CPU."""
        ...
