"""What can be measured: an engine with one model, with one set of calls for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .samplings import GREEDY


@dataclass(frozen=True, slots=True)
class SubjectSpec:
    """The model an engine is measured with. `end_tokens` are never sampled, so that every run has the same length; the
    KV cache holds
    `sequences` of `context` tokens.
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
    """One decode: steps while the whole batch decoded, the seconds they took, and the counts over all of them (None:
    unknown).
    """

    steps: int
    seconds: float
    major_faults: int
    allocations: int | None


@dataclass(frozen=True, slots=True)
class Prefix:
    """First tokens of an open model after prompts with one prefix: seconds when all of it is read, seconds when the
    prefix is cached, and how many tokens were cached.
    """

    read: float
    kept: float
    cached: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """From a closed model to its first token: seconds in total, the part `prefill` with its waits, and its waits for
    weights (None: no waits).
    """

    seconds: float
    prefill: float
    waited: float | None


@dataclass(frozen=True, slots=True)
class Wake:
    """From a model that gave way to its first token: seconds in total, and those of its load, which overlaps the
    prompt.
    """

    seconds: float
    load_seconds: float


class Subject(Protocol):
    """An engine in a process of its own. `load` and `unload` alternate; the others need a loaded model."""

    def load(self) -> None:
        """Bring the model into memory, ready to run."""
        ...

    def unload(self) -> None:
        """Give its memory back."""
        ...

    def first_token(self, ids: Sequence[int], *, overlap: bool) -> FirstToken:
        """Open the model and read the prompt; `overlap` false: all of it is in memory before the prompt is read.
        Leaves it loaded.
        """
        ...

    def wake(self, ids: Sequence[int]) -> Wake:
        """Give way, then come back for the first token after `ids`. Raises PeerError for an engine that cannot."""
        ...

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds from the prompt's ids to the first token, greedy."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: str = GREEDY) -> DecodeSample:
        """Decode after all prompts as one batch: about `tokens` steps. `sampling`: a key of SAMPLINGS; other engines
        are measured greedy only, and raise PeerError.
        """
        ...

    def prefix(self, ids: Sequence[int], tails: Sequence[Sequence[int]]) -> Prefix:
        """First tokens after `ids` and each of three tails. Raises PeerError for an engine without a prefix cache."""
        ...

    def device_peak(self) -> int | None:
        """Peak bytes on a device with its own memory, None on the CPU."""
        ...
