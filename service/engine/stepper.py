"""One decode step of several sequences, the choice of their tokens included; the protocol that host and device
implement."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..cache.paged import SequenceKV
from ..core import Logprobs
from ..errors import Caught, ModelError, OnedeskError
from .runner import Runner
from .sampler import Sampler


@dataclass(frozen=True, slots=True)
class Feed:
    """A row of a step: `token` is appended to `kv`, and the sampler chooses from the scores after it.

    token None: the token that the step launched just before chose for its row `source`; the host need not have seen it.
    `draw` is the number of the sampler's draw, see Sampler.uniform. `wanted` false: nothing need be chosen, the next
    token is known.
    """

    kv: SequenceKV
    sampler: Sampler
    token: int | None
    source: int
    draw: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Picked:
    """The token chosen for a row; -1 where none was wanted, and where the choice failed with `error`, which concerns
    this row alone."""

    token: int
    logprobs: Logprobs | None = None
    error: OnedeskError | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A verify pass: scores [T, vocab] after the last known token and each draft token, valid until the next pass.

    `chosen`: the device's choices there, if it made them, with the draws from number `drawn` on.
    """

    sampler: Sampler
    scores: torch.Tensor
    chosen: Sequence[int] = ()
    drawn: int = 0

    def pick(self, position: int) -> Picked:
        """The sampler's choice at a position, after it has accepted the tokens before."""
        # A token that was forced in between took no draw: the device's draws are not the ones of these positions.
        on_device = self.sampler.allowed is None and self.sampler.top is None
        if self.chosen and on_device and self.sampler.drawn == self.drawn + position:
            return picked_by_device(self.chosen[position])
        return pick(self.sampler, self.scores[position])


class Stepper(Protocol):
    """Launches steps and collects their choices, in the order of the launches.

    A launch advances each sequence by one token. A sequence may be cut back afterwards: its row of a step in flight is
    then discarded by the caller, who cuts the sequence before its next launch.
    `ahead`: steps that may be in flight besides the oldest. With 1, step t+1 is launched before the tokens of step t
    are collected, for rows whose token is None. Where a row's choice needs the host (its grammar, or on the CPU the
    sampler itself), `runs_ahead` is false and nothing is launched ahead of that row's step: its scores are valid until
    the next launch.
    `stage`: where collecting is counted: "sample" where the step is done by then or the host samples, "decode" where it
    waits for it. `checks`: whether it verifies draft tokens. `captured`: kinds of passes it has prepared; the first of
    a kind takes longer than others.
    """

    ahead: int
    checks: bool
    stage: Literal["decode", "sample"]

    @property
    def captured(self) -> int: ...

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        """Whether a row with this sampler may be in a step that is launched ahead."""
        ...

    def launch(self, feeds: Sequence[Feed], /) -> None:
        """Launch a step of up to MAX_BATCH rows. Raises RequestError for a sequence at its capacity."""
        ...

    def collect(self) -> list[Picked]:
        """The choices of the oldest step in flight. A row's failure, such as scores that are no numbers, is in its
        choice."""
        ...

    def pick(self, sampler: Sampler, scores: torch.Tensor, /) -> Picked:
        """The choice of a sequence's first token, from the scores [vocab] after its prompt. Steps may be in flight."""
        ...

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        """Compute up to MAX_BATCH ids in one pass: the first `known` (at least one) are the text's, the others draft
        tokens.

        No step may be in flight. The sequence does not change until the caller advances it, by as many of the ids as
        were accepted.
        """
        ...

    def close(self) -> None:
        """Drop everything; it cannot be used afterwards."""
        ...


class HostStepper:
    """Scores from the runner, choices on the host: the path that works everywhere. One step at a time."""

    ahead = 0
    checks = True
    captured = 0
    stage: Literal["decode", "sample"] = "sample"

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner
        self._in_flight: deque[tuple[Sequence[Feed], torch.Tensor]] = deque()

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return False

    def launch(self, feeds: Sequence[Feed], /) -> None:
        if self._runner is None or self._in_flight:
            raise ValueError("a step is in flight, or the stepper was closed")
        tokens = [feed.token for feed in feeds if feed.token is not None]
        if len(tokens) != len(feeds):
            raise ValueError("a row without a token: nothing was launched before it")
        self._in_flight.append((feeds, self._runner.decode([feed.kv for feed in feeds], tokens)))

    def collect(self) -> list[Picked]:
        feeds, scores = self._in_flight.popleft()
        return [pick(feed.sampler, row) if feed.wanted else Picked(-1) for feed, row in zip(feeds, scores, strict=True)]

    def pick(self, sampler: Sampler, scores: torch.Tensor, /) -> Picked:
        return pick(sampler, scores)

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        if self._runner is None or self._in_flight:
            raise ValueError("a step is in flight, or the stepper was closed")
        return Checked(sampler, self._runner.check(sequence, ids)[known - 1 :])

    def close(self) -> None:
        self._runner = None
        self._in_flight.clear()


def picked_by_device(token: int) -> Picked:
    """The choice of a device; -1 stands for scores that are no numbers, which is a ModelError."""
    if token < 0:
        words = "the model computed scores that are no numbers; its weights are damaged or do not belong to this config"
        return Picked(-1, error=ModelError(words))
    return Picked(token)


def pick(sampler: Sampler, scores: torch.Tensor) -> Picked:
    """The sampler's choice from scores [vocab], or why it failed."""
    with Caught("choosing a token") as caught:
        token = sampler.choose(scores)
        return Picked(token, sampler.logprobs)
    return Picked(-1, error=caught.error)
