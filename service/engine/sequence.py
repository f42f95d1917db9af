"""What the engine knows of one request: pure Python, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ..core import Finish


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a sequence ends. `room` is how many tokens the context leaves behind the prompt."""

    answer: int
    reasoning: int
    room: int
    eos: frozenset[int]


@dataclass(slots=True)
class Sequence:
    """The state of one request. Only `settle` changes it once it runs."""

    prompt: tuple[int, ...]
    limits: Limits
    ids: list[int] = field(default_factory=list)
    completion: int = 0
    answer: int = 0
    reasoning: int = 0
    finish: Finish | None = None
    forced: deque[int] = field(default_factory=deque)

    def settle(self, token: int, *, in_reasoning: bool) -> None:
        """Take in one token, sampled or forced; `in_reasoning` says whether it belongs to the reasoning."""
        self.completion += 1
        if token in self.limits.eos:
            self.finish = "stop"
            return
        self.ids.append(token)
        if in_reasoning:
            self.reasoning += 1
        else:
            self.answer += 1
        if self.answer >= self.limits.answer or self.completion >= self.limits.room:
            self.finish = "length"

    def end(self, finish: Finish) -> None:
        """End for a reason that lies outside the tokens themselves; an earlier or stronger reason stays."""
        if self.finish is None or (self.finish == "length" and finish != "cancelled"):
            self.finish = finish

    def next_forced(self, *, in_reasoning: bool, closing: Items[int]) -> int | None:
        """The token that must come next although nobody sampled it: once reasoning has used its budget, `closing` ends it."""
        if not self.forced and in_reasoning and self.reasoning >= self.limits.reasoning:
            self.forced.extend(closing)
        return self.forced.popleft() if self.forced else None
