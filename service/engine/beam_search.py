"""A beam search on a session: forks of the keys and values carry the hypotheses, see beams.py for what is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.paged import PagedKV, SequenceKV, blocks_for
from ..core import Event
from ..kernels.forward_batch import BLOCK
from .answer import Answer, Prepared
from .beams import BeamBook, Candidate, Hypothesis
from .runner import Runner


@dataclass(frozen=True, slots=True)
class Found:
    """An answer that a search found, the events that writing it would have been, and the sum of its log-probabilities."""

    answer: Answer
    events: Sequence[Event]
    total: float


class Search:
    """One request's search. Room for all its beams is held from the start; `begin` follows when the prompt was read, then `step`."""

    def __init__(self, prepared: Prepared, runner: Runner, kv: SequenceKV) -> None:
        """`kv` is the prompt's sequence, with room for the whole answer. Raises MemoryFull; see `blocks`."""
        self._prepared = prepared
        self._runner = runner
        self._book = BeamBook(prepared.beams or 1, prepared.limits.eos, prepared.limits.room)
        # Tokens whose blocks a hypothesis may need beside what it shares; held where fewer run than may.
        self._own = _own_blocks(len(prepared.ids), prepared.limits.room) * BLOCK
        self._kvs = [kv]
        self._held = [runner.kv.open(self._own) for _ in range(self._book.width - 1)]
        bias = {token: value for token, value in prepared.sampling.logit_bias.items() if token < prepared.choosable}
        self._biased = torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)

    @staticmethod
    def blocks(tokens: int, room: int, width: int) -> int:
        """Blocks for a search behind a prompt of so many tokens, each of `width` texts with `room` tokens."""
        return blocks_for(tokens + room) + (width - 1) * _own_blocks(tokens, room)

    @classmethod
    def fits(cls, kv: PagedKV, prepared: Prepared) -> bool:
        """Whether there is room for it now."""
        width = prepared.beams or 1
        return cls.blocks(len(prepared.ids), prepared.limits.room, width) <= kv.available and width <= kv.openable

    @property
    def length(self) -> int:
        """Tokens of the running hypotheses."""
        return len(self._book.running[0].ids) if self._book.running else self._prepared.limits.room

    @property
    def done(self) -> bool:
        """Whether the best texts are found."""
        return self._book.done

    def begin(self, scores: torch.Tensor) -> None:
        """The first step, from the scores [vocab] behind the prompt."""
        self._advance(scores[None])

    def step(self) -> None:
        """The next token of every hypothesis that runs."""
        tokens = [hypothesis.ids[-1] for hypothesis in self._book.running]
        self._advance(self._runner.decode(self._kvs, tokens))

    def best(self, count: int) -> list[Found]:
        """The `count` best answers; those that still ran are marked cancelled."""
        return [self._found(hypothesis) for hypothesis in self._book.best(count)]

    def _found(self, hypothesis: Hypothesis) -> Found:
        answer = Answer(self._prepared)
        events = [event for token in hypothesis.ids if (event := answer.take(token))]
        if hypothesis.finish == "stop":
            answer.take(min(self._prepared.limits.eos))
        if hypothesis.finish is None:
            answer.end("cancelled")
        return Found(answer, events, hypothesis.total)

    def close(self) -> None:
        """Return all it holds."""
        for kv in (*self._kvs, *self._held):
            kv.close()
        self._kvs, self._held = [], []

    def _advance(self, scores: torch.Tensor) -> None:
        """Rank the continuations by scores [running, vocab], and let the caches follow the hypotheses."""
        book = self._book
        wide = scores.float().cpu().clone()
        if len(self._biased[0]):
            wide.index_add_(1, self._biased[0], self._biased[1].expand(len(wide), -1).contiguous())
        totals = wide.log_softmax(-1)[:, : self._prepared.choosable]
        totals = totals + torch.tensor([hypothesis.total for hypothesis in book.running])[:, None]
        best, places = totals.reshape(-1).topk(min(book.looked_at, totals.numel()))
        width = totals.shape[1]
        book.advance([Candidate(t, p // width, p % width) for t, p in zip(best.tolist(), places.tolist(), strict=True)])
        self._follow([hypothesis.parent for hypothesis in book.running])

    def _follow(self, parents: Sequence[int]) -> None:
        """Give each running hypothesis a cache: its parent's own to the first child of one, forks to the others."""
        before, spare = self._kvs, self._book.width - len(parents)
        for place, kv in enumerate(before):
            if place not in parents:
                kv.close()
        while len(self._held) > spare:
            self._held.pop().close()
        firsts = [parents.index(parent) == place for place, parent in enumerate(parents)]
        self._kvs = [before[parent] if first else before[parent].fork() for parent, first in zip(parents, firsts, strict=True)]
        while len(self._held) < spare:
            self._held.append(self._runner.kv.open(self._own))


def _own_blocks(tokens: int, room: int) -> int:
    """Blocks of a text that it cannot share with others of the same prompt."""
    return blocks_for(tokens + room) - tokens // BLOCK
