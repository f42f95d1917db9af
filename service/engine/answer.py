"""One choice of a request while it is written: its tokens, what a reader sees of them, and why it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
from ..text.reasoning import CLOSE
from ..text.repetition import RepetitionCheck
from ..text.stops import StopStrings
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .picture_reader import PictureTask
from .sampler import Adjustments
from .sequence import Limits, Sequence

# Put behind reasoning that has used up its budget, so that the answer can begin (our wording).
CLOSING = "\n\nThat is enough thinking; the answer follows.\n</think>\n\n"


class Guide(Protocol):
    """What binds an answer to a grammar; it is asked and told of nothing while the model thinks."""

    def allowed(self) -> np.ndarray:
        """Which ids may come next: bool, at least one true."""
        ...

    def accept(self, token: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check: token ids, complete sampling, seed, limits. `reserve` are the tokens of an answer for which
    room is made at once; an answer whose thinking has no bound of its own may outgrow it, up to `limits.room`. `keys` are the ids as kept
    prefixes know them: rows of `pictures` by their pixels.

    Its choices share what is here: `stop`, `closing` (the tokens of CLOSING) and `adjustments` are made once, before the model's turn.
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


class Answer:
    """The state of one choice. `take` is the one way in for a token, sampled or forced."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._sequence = Sequence(prepared.ids, prepared.limits)
        self._repetition = RepetitionCheck() if prepared.repetition_stop else None
        tokenizer = prepared.tokenizer
        self._text = TextStream(tokenizer, stop=prepared.stop, in_reasoning=prepared.in_reasoning) if tokenizer else None
        self._close = tokenizer.id_of(CLOSE) if tokenizer else None
        self._guide = prepared.guide() if prepared.guide else None
        # The token that must come next although nobody samples it; None: sample.
        self.coming = self._next_forced()

    @property
    def ids(self) -> list[int]:
        """The tokens so far, without the final EOS."""
        return self._sequence.ids

    @property
    def completion(self) -> int:
        """How many tokens were taken, the final EOS included."""
        return self._sequence.completion

    @property
    def finish(self) -> Finish | None:
        """Why it ended, None while it goes on."""
        return self._sequence.finish

    @property
    def in_reasoning(self) -> bool:
        """Whether the model is thinking."""
        return self._text.in_reasoning if self._text else False

    @property
    def left(self) -> int:
        """Tokens after which it ends by its limits, if it does not begin to think."""
        limits, sequence = self._prepared.limits, self._sequence
        room = limits.room - sequence.completion
        return room if self.in_reasoning else min(room, limits.answer - sequence.answer)

    @property
    def guided(self) -> bool:
        """Whether a grammar binds it."""
        return self._guide is not None

    def allowed(self) -> np.ndarray | None:
        """Which ids may come next by its grammar, None for all."""
        return None if self._guide is None or self.in_reasoning else self._guide.allowed()

    def corrected(self, token: int) -> int:
        """What is taken in place of a sampled `token`: a turn that ends inside the thoughts of an answer bound to a grammar goes on
        behind them."""
        closes = self._guide is not None and self.in_reasoning and token in self._prepared.limits.eos
        return self._close if closes and self._close is not None else token

    def take(self, token: int, *, forced: bool = False) -> Event | None:
        """Take the next token in; returns what became visible, None for an EOS."""
        inside = self.in_reasoning
        piece = self._text.push(token) if self._text and token not in self._prepared.limits.eos else None
        # What opens reasoning, and what closes it by force, belongs to it: neither may eat the answer's budget.
        self._sequence.settle(token, in_reasoning=inside or self.in_reasoning or forced)
        if self.finish == "stop":
            return None
        if self._guide is not None and not inside and not forced:
            self._guide.accept(token)
        if self._text and self._text.stopped:
            self._sequence.end("stop_string")
        if self._repetition and self._repetition.push(token):
            self._sequence.end("repetition")
        self.coming = self._next_forced()
        return Event(piece.text, piece.reasoning, token) if piece else Event(token=token)

    def end(self, finish: Finish) -> None:
        """End for a reason that lies outside the tokens."""
        self._sequence.end(finish)

    def last(self) -> Event | None:
        """The answer has ended: what was held back of its text, if anything."""
        piece = self._text.finish() if self._text else None
        return Event(piece.text, piece.reasoning) if piece and (piece.text or piece.reasoning) else None

    def result(
        self, seed: int, cached: int, seconds: Mapping[str, float], stages: Mapping[str, Stage], logprob: float | None = None
    ) -> Result:
        """The whole of it, after `last`; `cached` are the prompt's tokens that were not read anew."""
        sequence = self._sequence
        return Result(
            self._text.text if self._text else "",
            self._text.reasoning if self._text else "",
            tuple(sequence.ids),
            sequence.finish or "length",
            seed,
            Usage(len(sequence.prompt), sequence.completion, sequence.reasoning, cached),
            seconds,
            stages,
            logprob,
            self._prepared.in_force,
        )

    def _next_forced(self) -> int | None:
        if self.finish is not None:
            return None
        return self._sequence.next_forced(in_reasoning=self.in_reasoning, closing=self._prepared.closing)


def cancelled_result(prepared: Prepared, choice: int, seconds: float) -> Result:
    """The result of a choice that was stopped before its first token."""
    times = {"load": seconds, "first_token": seconds, "total": seconds}
    return Result("", "", (), "cancelled", prepared.seed_of(choice), Usage(len(prepared.ids), 0, 0), times, {}, sampling=prepared.in_force)
