"""What a session works on: requests as jobs, their choices as rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..cache.paged import SequenceKV
from ..core import Event, Stage
from ..errors import OnedeskError
from .answer import Answer, Prepared
from .sampler import Sampler
from .scheduler import Ticket
from .speculate import Speculator


class Row:
    """One choice at work: what it wrote, where it stands in the cache, what it waits to read."""

    def __init__(self, prepared: Prepared, ticket: Ticket) -> None:
        self.prepared = prepared
        self.ticket = ticket
        self.answer = Answer(prepared)
        # A sum of log-probabilities needs each one.
        top = 0 if prepared.compares and prepared.logprobs is None else prepared.logprobs
        seed, shared = prepared.seed_of(ticket.choice), prepared.adjustments
        self.sampler = Sampler(prepared.sampling, seed, (), prepared.choosable, top=top, adjustments=shared)
        if self.answer.guided:
            self.sampler.allowed = self.answer.allowed
            self.sampler.corrected = self.answer.corrected
        self.kv: SequenceKV | None = None
        # Tokens of the answer that are not behind the cache yet: the latest one, or after being set back all of them.
        self.feed: deque[int] = deque()
        # Steps under way that count for it; those launched in an earlier epoch do not.
        self.launched = 0
        self.epoch = 0
        self.speculator: Speculator | None = None
        self.reading = 0.0  # seconds that its prompt took
        self.first_token: float | None = None
        self.logprob = 0.0
        # Why it could not enter, where its ticket has ended without it.
        self.error: OnedeskError | None = None
        # What was written and is told of only when the choices were compared.
        self.untold: list[Event] = []

    @property
    def capacity(self) -> int:
        """Tokens that it needs room for at once."""
        return len(self.prepared.ids) + max(self.prepared.reserve, len(self.answer.ids))

    @property
    def most(self) -> int:
        """Tokens that it may ever need room for."""
        return len(self.prepared.ids) + self.prepared.limits.room

    @property
    def ends_next(self) -> bool:
        """Whether the steps under way bring it to its limit of tokens."""
        return self.answer.left <= self.launched

    @property
    def known(self) -> list[int]:
        """The tokens that its cache certainly holds, as kept prefixes know them."""
        if self.kv is None:
            return []
        ids = [*self.prepared.keys, *self.answer.ids]
        return ids[: self.kv.length - self.launched]

    def leave(self) -> None:
        """Return its place in the cache; steps under way count no longer."""
        if self.kv is not None:
            self.kv.close()
        self.kv = None
        self.epoch += 1
        self.launched = 0

    def set_back(self) -> None:
        """Leave, to read and to be fed everything again."""
        self.leave()
        self.feed = deque(self.answer.ids)


@dataclass(slots=True, eq=False)
class Base:
    """A prompt that was read, for choices that have yet to enter: its cache, and the scores [vocab] behind it."""

    kv: SequenceKV
    scores: torch.Tensor


@dataclass(slots=True, eq=False)
class Job:
    """A request: its choices that have not ended, and what they share."""

    index: int
    prepared: Prepared
    rows: list[Row]
    base: Base | None = None
    begun: bool = False
    cached: int = 0
    load_seconds: float = 0.0
    # When it came, in perf_counter time, and what the stages had cost by then.
    joined: float = 0.0
    before: Mapping[str, Stage] = field(default_factory=dict)
    unwanted: bool = False
    # Choices that are compared when all have ended; None where each is told of as it is written.
    ended: list[Row] | None = None

    @property
    def waiting(self) -> Sequence[Row]:
        """Choices that have not entered."""
        return [row for row in self.rows if row.ticket.state == "waiting"]

    def drop_base(self) -> None:
        """Choices that enter later read the prompt anew."""
        if self.base is not None:
            self.base.kv.close()
        self.base = None
