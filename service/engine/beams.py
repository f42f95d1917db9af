"""Beam search: the bookkeeping of hypotheses, in pure Python.

Definition. A hypothesis is a text of chosen tokens; its total is the sum of their log-probabilities in the raw model (logit_bias added
first), an end token included, and its score the total divided by the number of tokens. `width` hypotheses run. In each step all their
continuations are ranked by total, and the best 2 * width are looked at in that order: one that ends (an end token, or the limit of tokens)
is found if it stands among the first `width`, and dropped else; of those that go on the first `width` run next. Of the found ones the
`width` with the best scores stay. The search ends when nothing runs, or `width` are found and the best total that runs, divided by its
tokens, is no better than the worst score found. This is beam search as transformers does it with length_penalty 1 and early_stopping off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core import Finish


@dataclass(frozen=True, slots=True)
class Candidate:
    """The continuation of the running hypothesis `parent` by `token`, with the total it would have."""

    total: float
    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text: its tokens (a final end token left out), its total, and how it ended; None while it runs. `parent`: its place before."""

    ids: tuple[int, ...]
    total: float
    finish: Finish | None = None
    parent: int = 0

    @property
    def score(self) -> float:
        """The total a token; an end token is one."""
        return self.total / max(1, len(self.ids) + (self.finish == "stop"))


class BeamBook:
    """The hypotheses of one search: `running`, and `found`, the best first."""

    def __init__(self, width: int, ends: Iterable[int], most: int) -> None:
        """`ends` are the tokens that end a text, `most` the tokens that one may have."""
        self.width = width
        self._ends = frozenset(ends)
        self._most = most
        self.running: list[Hypothesis] = [Hypothesis((), 0.0)]
        self.found: list[Hypothesis] = []

    @property
    def looked_at(self) -> int:
        """How many candidates a step needs."""
        return 2 * self.width

    @property
    def done(self) -> bool:
        """Whether no running hypothesis can come among the best."""
        if not self.running:
            return True
        return len(self.found) == self.width and self.running[0].score <= self.found[-1].score

    def advance(self, candidates: Sequence[Candidate]) -> None:
        """One step: `candidates` are the best continuations, the best first."""
        following: list[Hypothesis] = []
        for rank, candidate in enumerate(candidates[: self.looked_at]):
            before = self.running[candidate.parent].ids
            if candidate.token in self._ends:
                ended = Hypothesis(before, candidate.total, "stop", candidate.parent)
            else:
                ids = (*before, candidate.token)
                ended = Hypothesis(ids, candidate.total, "length" if len(ids) >= self._most else None, candidate.parent)
            if ended.finish is None and len(following) < self.width:
                following.append(ended)
            elif ended.finish is not None and rank < self.width:
                self.found.append(ended)
        self.running = following
        self.found = sorted(self.found, key=lambda hypothesis: -hypothesis.score)[: self.width]

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best: those found, and where too few were (the search was stopped) the best that ran."""
        return [*self.found, *sorted(self.running, key=lambda hypothesis: -hypothesis.score)][:count]
