"""One decode step of several rows, the choice of their tokens included: the seam between what is wanted and the device that does it."""

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
    """A row of a step: `token` goes behind `kv`, and the sampler chooses from the scores behind it.

    token None: what the step launched just before chose for its row `source`, which the host need not have seen. `draw` is the place of
    the sampler's draw, see Sampler.uniform. `wanted` false: nothing need be chosen, the next token is known.
    """

    kv: SequenceKV
    sampler: Sampler
    token: int | None
    source: int
    draw: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Picked:
    """What a row chose; -1 where nothing was wanted, and where the choice failed with `error`, which is this row's alone."""

    token: int
    logprobs: Logprobs | None = None
    error: OnedeskError | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A pass over known and guessed tokens: scores [T, vocab] behind the last known one and each guess, until the next pass.

    `chosen`: what the device chose there, where it did, with the draws from number `drawn` on.
    """

    sampler: Sampler
    scores: torch.Tensor
    chosen: Sequence[int] = ()
    drawn: int = 0

    def pick(self, place: int) -> Picked:
        """The sampler's choice at a place, once it has accepted those before."""
        # A token that was forced in between took no draw: the device's are not those that come now.
        if self.chosen and self.sampler.plain and self.sampler.drawn == self.drawn + place:
            return chosen_there(self.chosen[place])
        return pick(self.sampler, self.scores[place])


class Stepper(Protocol):
    """Launches steps and collects what they chose, in the order of the launches.

    A launch advances each sequence by one token, at the position that its length says. A sequence may be cut back afterwards, and its
    row of a step under way is then worth nothing: the one who launched it knows, and cuts the sequence before the row's next launch.
    `ahead` is how many steps may be under way beside the oldest: with 1, step t+1 is launched before the tokens of step t are collected,
    for rows whose token is None. Where the host must see a row's scores (see Sampler.plain), `runs_ahead` is false and nothing is launched
    ahead of that row's step: its scores last until the next launch only. `stage` is what
    collecting is booked to: "sample" where the device is done by then or sampling is the host's, "decode" where it waits for the step.
    `checks`: whether it takes guesses. `captured`: how many kinds of passes it has prepared; the first of a kind takes longer than others.
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
        """Begin a step of up to MAX_BATCH rows. Raises RequestError for a sequence at its capacity."""
        ...

    def collect(self) -> list[Picked]:
        """The choices of the oldest step under way. What fails of one row, such as scores that are no numbers, is in its choice."""
        ...

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        """Read up to MAX_BATCH ids in one pass, of which the first `known` are the text's (at least one) and the others guessed.

        No step may be under way. The sequence is as it was until the caller advances it, by as many of them as it wants.
        """
        ...

    def close(self) -> None:
        """Let go of everything; it cannot be used afterwards."""
        ...


class HostStepper:
    """Scores from the runner, choices on the host: the path that works everywhere. One step at a time."""

    ahead = 0
    checks = True
    captured = 0
    stage: Literal["decode", "sample"] = "sample"

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner
        self._under_way: deque[tuple[Sequence[Feed], torch.Tensor]] = deque()

    def runs_ahead(self, sampler: Sampler, /) -> bool:
        return False

    def launch(self, feeds: Sequence[Feed], /) -> None:
        if self._runner is None or self._under_way:
            raise ValueError("a step is under way, or the stepper was closed")
        tokens = [feed.token for feed in feeds if feed.token is not None]
        if len(tokens) != len(feeds):
            raise ValueError("a row without a token: nothing was launched before it")
        self._under_way.append((feeds, self._runner.decode([feed.kv for feed in feeds], tokens)))

    def collect(self) -> list[Picked]:
        feeds, scores = self._under_way.popleft()
        return [pick(feed.sampler, row) if feed.wanted else Picked(-1) for feed, row in zip(feeds, scores, strict=True)]

    def check(self, sequence: SequenceKV, sampler: Sampler, ids: Sequence[int], known: int, /) -> Checked:
        if self._runner is None or self._under_way:
            raise ValueError("a step is under way, or the stepper was closed")
        return Checked(sampler, self._runner.check(sequence, ids)[known - 1 :])

    def close(self) -> None:
        self._runner = None
        self._under_way.clear()


def chosen_there(token: int) -> Picked:
    """What a device chose; -1 stands for scores that are no numbers, which is a ModelError."""
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
