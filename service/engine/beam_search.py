"""Beam search: the most probable completions of a prompt. Forks of a KV cache carry the hypotheses.

Definition. A hypothesis is a sequence of chosen tokens. Its total is the sum of their log-probabilities in the raw
model (logit_bias added first), an end token included; its score is the total divided by the number of tokens. `width`
hypotheses run. Each step ranks all their continuations by total and looks at the best 2 * width in that order. One that
ends (an end token, or the limit of tokens) is found if it is among the first `width`, and dropped otherwise; the first
`width` of those that go on run next. Of the found ones the `width` with the best scores stay. The search ends when
nothing runs, or when `width` are found and the best running total, divided by its tokens, is no better than the worst
score found. This is beam search as transformers does it with length_penalty 1 and early_stopping off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..cache.paged import PagedKV, SequenceKV, blocks_for
from ..core import Event, Finish
from ..kernels.forward_batch import BLOCK
from .completion import Completion, Prepared
from .runner import Runner


@dataclass(frozen=True, slots=True)
class Candidate:
    """Running hypothesis number `parent` continued by `token`, and the total it would have."""

    total: float
    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens without a final end token, their total, how it ended (None: it runs), and the number of the hypothesis it
    continues."""

    ids: tuple[int, ...]
    total: float
    finish: Finish | None = None
    parent: int = 0

    @property
    def score(self) -> float:
        """The total per token; an end token counts."""
        return self.total / max(1, len(self.ids) + (self.finish == "stop"))


class Hypotheses:
    """The hypotheses of one search: `running`, and `found`, the best first. Pure Python."""

    def __init__(self, width: int, ends: Iterable[int], most: int) -> None:
        """`ends`: tokens that end a hypothesis. `most`: tokens that one may have."""
        self.width = width
        self._ends = frozenset(ends)
        self._most = most
        self.running: list[Hypothesis] = [Hypothesis((), 0.0)]
        self.found: list[Hypothesis] = []

    @property
    def looked_at(self) -> int:
        """Candidates that a step needs."""
        return 2 * self.width

    @property
    def done(self) -> bool:
        """Whether no running hypothesis can become one of the best."""
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
        """The `count` best: those found, then, if the search was stopped with too few, the best that ran."""
        return [*self.found, *sorted(self.running, key=lambda hypothesis: -hypothesis.score)][:count]


@dataclass(frozen=True, slots=True)
class BeamResult:
    """A completion that a search found, the events that writing it would have given, and the sum of its
    log-probabilities."""

    completion: Completion
    events: Sequence[Event]
    total: float


class BeamSearch:
    """One request's search. Blocks for all its beams are reserved from the start. `begin` follows the prefill, then
    `step`."""

    def __init__(self, prepared: Prepared, runner: Runner, kv: SequenceKV) -> None:
        """`kv`: the prompt's sequence, with blocks for the whole completion. Raises MemoryFull; see `blocks`."""
        self._prepared = prepared
        self._runner = runner
        self._hypotheses = Hypotheses(prepared.beams or 1, prepared.limits.eos, prepared.limits.room)
        # Tokens whose blocks a hypothesis may need besides shared ones; reserved where fewer run than may.
        self._own = _own_blocks(len(prepared.ids), prepared.limits.room) * BLOCK
        self._kvs = [kv]
        self._reserved = [runner.kv.open(self._own) for _ in range(self._hypotheses.width - 1)]
        bias = {token: value for token, value in prepared.sampling.logit_bias.items() if token < prepared.choosable}
        self._biased = (
            torch.tensor(list(bias), dtype=torch.int64),
            torch.tensor(list(bias.values()), dtype=torch.float32),
        )

    @staticmethod
    def blocks(tokens: int, room: int, width: int) -> int:
        """Blocks for a search after a prompt of `tokens`, with `width` hypotheses of `room` tokens each."""
        return blocks_for(tokens + room) + (width - 1) * _own_blocks(tokens, room)

    @classmethod
    def fits(cls, kv: PagedKV, prepared: Prepared) -> bool:
        """Whether enough blocks are free now."""
        width = prepared.beams or 1
        return cls.blocks(len(prepared.ids), prepared.limits.room, width) <= kv.available and width <= kv.openable

    @property
    def length(self) -> int:
        """Tokens of the running hypotheses."""
        return len(self._hypotheses.running[0].ids) if self._hypotheses.running else self._prepared.limits.room

    @property
    def done(self) -> bool:
        """Whether the best completions are found."""
        return self._hypotheses.done

    def begin(self, scores: torch.Tensor) -> None:
        """The first step, from the scores [vocab] after the prompt."""
        self._advance(scores[None])

    def step(self) -> None:
        """The next token of every hypothesis that runs."""
        tokens = [hypothesis.ids[-1] for hypothesis in self._hypotheses.running]
        self._advance(self._runner.decode(self._kvs, tokens))

    def best(self, count: int) -> list[BeamResult]:
        """The `count` best completions; those that still ran are marked cancelled."""
        return [self._found(hypothesis) for hypothesis in self._hypotheses.best(count)]

    def _found(self, hypothesis: Hypothesis) -> BeamResult:
        completion = Completion(self._prepared)
        events = [event for token in hypothesis.ids if (event := completion.take(token))]
        if hypothesis.finish == "stop":
            completion.take(min(self._prepared.limits.eos))
        if hypothesis.finish is None:
            completion.end("cancelled")
        return BeamResult(completion, events, hypothesis.total)

    def close(self) -> None:
        """Return all blocks."""
        for kv in (*self._kvs, *self._reserved):
            kv.close()
        self._kvs, self._reserved = [], []

    def _advance(self, scores: torch.Tensor) -> None:
        """Rank the continuations by scores [running, vocab], then give each new hypothesis its cache."""
        hypotheses = self._hypotheses
        wide = scores.float().cpu().clone()
        if len(self._biased[0]):
            wide.index_add_(1, self._biased[0], self._biased[1].expand(len(wide), -1).contiguous())
        totals = wide.log_softmax(-1)[:, : self._prepared.choosable]
        totals = totals + torch.tensor([hypothesis.total for hypothesis in hypotheses.running])[:, None]
        best, indices = totals.reshape(-1).topk(min(hypotheses.looked_at, totals.numel()))
        width = totals.shape[1]
        ranked = zip(best.tolist(), indices.tolist(), strict=True)
        hypotheses.advance([Candidate(total, index // width, index % width) for total, index in ranked])
        self._follow([hypothesis.parent for hypothesis in hypotheses.running])

    def _follow(self, parents: Sequence[int]) -> None:
        """Give each running hypothesis a cache: its parent's own to the first child of one, forks to the others."""
        before, spare = self._kvs, self._hypotheses.width - len(parents)
        for index, kv in enumerate(before):
            if index not in parents:
                kv.close()
        while len(self._reserved) > spare:
            self._reserved.pop().close()
        firsts = [parents.index(parent) == index for index, parent in enumerate(parents)]
        self._kvs = [
            before[parent] if first else before[parent].fork() for parent, first in zip(parents, firsts, strict=True)
        ]
        while len(self._reserved) < spare:
            self._reserved.append(self._runner.kv.open(self._own))


def _own_blocks(tokens: int, room: int) -> int:
    """Blocks of a hypothesis that it cannot share with others of the same prompt."""
    return blocks_for(tokens + room) - tokens // BLOCK
