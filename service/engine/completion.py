"""One completion while it is written: its tokens, the text that a reader sees, and why it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..core import (
    SEED_LIMIT,
    Event,
    Finish,
    Result,
    Sampling,
    SamplingValue,
    Stage,
    Usage,
)
from ..text.grammar import Guide
from ..text.reasoning import CLOSE
from ..text.repetition import RepetitionCheck
from ..text.stops import StopStrings
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .picture_reader import PictureTask
from .sampler import Adjustments

# Forced after reasoning that has used up its budget, so that the answer can begin (our wording).
CLOSING = "\n\nThat is enough thinking; the answer follows.\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a completion ends, in tokens. `room` is what the context leaves after the prompt."""

    answer: int
    reasoning: int
    room: int
    eos: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check: token ids, complete sampling, seed, limits.

    `reserve`: tokens of an answer for which KV blocks are reserved at once. An answer whose reasoning has no budget of
    its own may outgrow it, up to `limits.room`. The choices share what is here: `stop`, `closing` (the tokens of
    CLOSING) and `adjustments` are made once, before the request waits for the model. `keys` are the ids as keys of the
    prefix cache, with the rows of `pictures` by their pixels.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    limits: Limits
    reserve: int
    stop: StopStrings
    in_reasoning: bool
    repetition_stop: bool
    tokenizer: Tokenizer | None
    choosable: int
    adjustments: Adjustments
    in_force: Mapping[str, SamplingValue] = field(default_factory=dict)
    closing: tuple[int, ...] = ()
    n: int = 1
    best_of: int | None = None
    beams: int | None = None
    prefix_reuse: bool = True
    speculation: bool = True
    logprobs: int | None = None
    guide: Callable[[], Guide] | None = None
    pictures: PictureTask | None = None
    keys: tuple[int, ...] = ()

    @property
    def compares(self) -> bool:
        """Whether choices are compared by their summed log-probability."""
        return self.best_of is not None

    def seed_of(self, choice: int) -> int:
        """The seed of a choice."""
        return (self.seed + choice) % SEED_LIMIT


class Completion:
    """The tokens and the text of one choice. `take` is the only way in for a token, sampled or forced."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        # The tokens so far, without the final EOS.
        self.ids: list[int] = []
        # Tokens taken, the final EOS included, and those of them that belong to the answer and to the reasoning.
        self.taken = 0
        self.answer_tokens = 0
        self.reasoning_tokens = 0
        # Why it ended; None while it goes on.
        self.finish: Finish | None = None
        self._repetition = RepetitionCheck() if prepared.repetition_stop else None
        tokenizer = prepared.tokenizer
        self._text = (
            TextStream(tokenizer, stop=prepared.stop, in_reasoning=prepared.in_reasoning) if tokenizer else None
        )
        self._close = tokenizer.id_of(CLOSE) if tokenizer else None
        self._guide = prepared.guide() if prepared.guide else None
        self._forced: deque[int] = deque()
        # The token that must come next although it was not sampled; None: sample.
        self.forced_token = self._next_forced()

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to the model's reasoning."""
        return self._text.in_reasoning if self._text else False

    @property
    def left(self) -> int:
        """Tokens until a limit ends it, if it does not begin to reason."""
        limits = self._prepared.limits
        room = limits.room - self.taken
        return room if self.in_reasoning else min(room, limits.answer - self.answer_tokens)

    @property
    def guided(self) -> bool:
        """Whether it follows a grammar."""
        return self._guide is not None

    def allowed(self) -> np.ndarray | None:
        """Which ids may come next by the grammar: bool [limit], None for all. Reasoning is free."""
        return None if self._guide is None or self.in_reasoning else self._guide.allowed()

    def corrected(self, token: int) -> int:
        """The token to take instead of a sampled one: an EOS inside the reasoning of a completion bound to a grammar
        closes the reasoning instead."""
        closes = self._guide is not None and self.in_reasoning and token in self._prepared.limits.eos
        return self._close if closes and self._close is not None else token

    def take(self, token: int, *, forced: bool = False) -> Event | None:
        """Append the next token; returns what became visible, None for an EOS."""
        inside, ends = self.in_reasoning, token in self._prepared.limits.eos
        piece = self._text.push(token) if self._text and not ends else None
        self.taken += 1
        if ends:
            self.finish = "stop"
            return None
        self.ids.append(token)
        # The tokens that open reasoning, and those that close it by force, count as reasoning: neither uses up the
        # answer's limit.
        self._count(in_reasoning=inside or self.in_reasoning or forced)
        if self._guide is not None and not inside and not forced:
            self._guide.accept(token)
        if self._text and self._text.stopped:
            self.end("stop_string")
        if self._repetition and self._repetition.push(token):
            self.end("repetition")
        self.forced_token = self._next_forced()
        return Event(piece.text, piece.reasoning, token) if piece else Event(token=token)

    def end(self, finish: Finish) -> None:
        """End for a reason other than an EOS or a limit. An earlier reason stays, but "length" gives way to all except
        "cancelled"."""
        if self.finish is None or (self.finish == "length" and finish != "cancelled"):
            self.finish = finish

    def flush(self) -> Event | None:
        """After the end: the text that was still held back, if any."""
        piece = self._text.finish() if self._text else None
        return Event(piece.text, piece.reasoning) if piece and (piece.text or piece.reasoning) else None

    def result(
        self,
        seed: int,
        cached: int,
        seconds: Mapping[str, float],
        stages: Mapping[str, Stage],
        logprob: float | None = None,
    ) -> Result:
        """The whole of it, after `flush`; `cached` are the prompt's tokens that came from the prefix cache."""
        return Result(
            self._text.text if self._text else "",
            self._text.reasoning if self._text else "",
            tuple(self.ids),
            self.finish or "length",
            seed,
            Usage(len(self._prepared.ids), self.taken, self.reasoning_tokens, cached),
            seconds,
            stages,
            logprob,
            self._prepared.in_force,
        )

    def _count(self, *, in_reasoning: bool) -> None:
        if in_reasoning:
            self.reasoning_tokens += 1
        else:
            self.answer_tokens += 1
        if self.answer_tokens >= self._prepared.limits.answer or self.taken >= self._prepared.limits.room:
            self.finish = "length"

    def _next_forced(self) -> int | None:
        """The next token of CLOSING once reasoning has used up its budget."""
        if self.finish is not None:
            return None
        if not self._forced and self.in_reasoning and self.reasoning_tokens >= self._prepared.limits.reasoning:
            self._forced.extend(self._prepared.closing)
        return self._forced.popleft() if self._forced else None


def cancelled_result(prepared: Prepared, choice: int, seconds: float) -> Result:
    """The result of a choice that was stopped before its first token."""
    times = {"load": seconds, "first_token": seconds, "total": seconds}
    usage = Usage(len(prepared.ids), 0, 0)
    return Result("", "", (), "cancelled", prepared.seed_of(choice), usage, times, {}, sampling=prepared.in_force)
