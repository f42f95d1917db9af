"""Requests on a session: the sequences that write their choices, and what those share."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..cache.paged import SequenceKV
from ..core import Event, Stage
from ..errors import OnedeskError
from .completion import Completion, Prepared
from .sampler import Sampler
from .scheduler import Ticket
from .speculate import Speculator


class RunningSequence:
    """One choice of a request: its completion so far, its KV cache, and the tokens that the cache does not hold yet."""

    def __init__(self, request: RequestState, ticket: Ticket) -> None:
        prepared = request.prepared
        self.request = request
        self.prepared = prepared
        self.ticket = ticket
        self.completion = Completion(prepared)
        # A sum of log-probabilities needs each one.
        top = 0 if prepared.compares and prepared.logprobs is None else prepared.logprobs
        seed, shared = prepared.seed_of(ticket.choice), prepared.adjustments
        self.sampler = Sampler(prepared.sampling, seed, (), prepared.choosable, top=top, adjustments=shared)
        if self.completion.guided:
            self.sampler.allowed = self.completion.allowed
            self.sampler.corrected = self.completion.corrected
        self.kv: SequenceKV | None = None
        # Tokens of the completion that the cache does not hold yet: the latest one, or all of them after a preemption.
        self.feed: deque[int] = deque()
        # Steps in flight whose result counts; those launched in an earlier epoch do not.
        self.launched = 0
        self.epoch = 0
        self.speculator: Speculator | None = None
        self.prefill_seconds = 0.0
        self.first_token: float | None = None
        self.logprob = 0.0
        # Why it could not be admitted, where its ticket has ended for that.
        self.admission_error: OnedeskError | None = None
        # Events held back until the choices are compared.
        self.withheld: list[Event] = []

    @property
    def capacity(self) -> int:
        """Tokens for which KV blocks are reserved when it is admitted."""
        return len(self.prepared.ids) + max(self.prepared.reserve, len(self.completion.ids))

    @property
    def max_capacity(self) -> int:
        """Tokens that it may ever need KV blocks for."""
        return len(self.prepared.ids) + self.prepared.limits.room

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps in flight bring it to its limit of tokens."""
        return self.completion.left <= self.launched

    @property
    def cached_ids(self) -> list[int]:
        """The tokens that its cache certainly holds, as keys of the prefix cache."""
        if self.kv is None:
            return []
        ids = [*self.prepared.keys, *self.completion.ids]
        return ids[: self.kv.length - self.launched]

    def close_cache(self) -> None:
        """Return its KV blocks; steps in flight count no longer."""
        if self.kv is not None:
            self.kv.close()
        self.kv = None
        self.epoch += 1
        self.launched = 0

    def preempt(self) -> None:
        """Return its KV blocks; when it is admitted again its prompt and its tokens are computed again."""
        self.close_cache()
        self.feed = deque(self.completion.ids)


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prefilled prompt for choices that were not admitted yet: its cache, and the scores [vocab] after it."""

    kv: SequenceKV
    scores: torch.Tensor


@dataclass(slots=True, eq=False)
class RequestState:
    """A request: its choices that have not ended, and what they share."""

    index: int
    prepared: Prepared
    sequences: list[RunningSequence] = field(default_factory=list)
    shared_prompt: SharedPrompt | None = None
    # Whether the prompt was prefilled once, and how many of its tokens came from the prefix cache then.
    prefilled: bool = False
    cached: int = 0
    load_seconds: float = 0.0
    # When it arrived, in perf_counter time, and what the stages had cost by then.
    arrived: float = 0.0
    stages_before: Mapping[str, Stage] = field(default_factory=dict)
    cancelled: bool = False
    # With best_of: the choices that have ended, compared when all have. None where each is shown as it is written.
    ended: list[RunningSequence] | None = None

    @classmethod
    def of(cls, index: int, prepared: Prepared) -> RequestState:
        """The state of a new request, with a ticket for each of its choices. A beam search is one choice that takes
        several slots."""
        request = cls(index, prepared, ended=[] if prepared.best_of is not None else None)
        choices = 1 if prepared.beams else prepared.best_of or prepared.n
        for choice in range(choices):
            request.sequences.append(RunningSequence(request, Ticket(index, choice, prepared.beams or 1)))
        return request

    @property
    def waiting(self) -> Sequence[RunningSequence]:
        """Choices that wait for a slot."""
        return [sequence for sequence in self.sequences if sequence.ticket.state == "waiting"]

    def drop_shared_prompt(self) -> None:
        """Return the shared prompt's blocks; choices that are admitted later prefill the prompt again."""
        if self.shared_prompt is not None:
            self.shared_prompt.kv.close()
        self.shared_prompt = None
