"""One request from its first token to its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..cache.paged import SequenceKV
from ..core import CancelCheck, Event, Finish, Progress, ProgressReport, Result, Sampling, Usage
from ..text.repetition import RepetitionCheck
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .leaks import LeakWatch
from .runner import Stopped
from .sampler import Sampler
from .sequence import Limits, Sequence
from .session import Session
from .stages import StageMeter

# Put behind reasoning that has used up its budget, so that the answer can begin (our wording).
CLOSING = "\n\nThat is enough thinking; the answer follows.\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check: token ids, complete sampling, seed, limits."""

    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    limits: Limits
    stop: tuple[str, ...]
    in_reasoning: bool
    repetition_stop: bool
    tokenizer: Tokenizer | None
    choosable: int


@dataclass(frozen=True, slots=True)
class Books:
    """Where a generation's costs are written down, and how many bytes of weights one pass reads."""

    meter: StageMeter
    leaks: LeakWatch
    pass_bytes: int


class Generation:
    """Runs a prepared request on a session; `events()` is the one way through it."""

    def __init__(
        self, prepared: Prepared, session: Session, books: Books, cancel: CancelCheck | None, progress: ProgressReport | None = None
    ) -> None:
        self._prepared = prepared
        self._session = session
        self._runner = session.runner
        self._meter = books.meter
        self._leaks = books.leaks
        self._step_bytes = books.pass_bytes
        self._cancel = cancel or _never
        self._progress = progress
        self._sequence = Sequence(prepared.ids, prepared.limits)
        self._sampler = Sampler(prepared.sampling, prepared.seed, prepared.ids, prepared.choosable)
        self._repetition = RepetitionCheck() if prepared.repetition_stop else None
        tokenizer = prepared.tokenizer
        self._text = TextStream(tokenizer, stop=prepared.stop, in_reasoning=prepared.in_reasoning) if tokenizer else None
        self._closing = tokenizer.encode(CLOSING) if tokenizer else []
        self._first_token: float | None = None

    def events(self, started: float) -> Iterator[Event]:
        """Prefill, then decode until an end; the last event has the result. `started` is the request's perf_counter time.

        Weights that are still on their way are read while the prompt is; decode begins when all are there.
        """
        with self._runner.kv.open(len(self._prepared.ids) + self._prepared.limits.room) as kv:
            yield from self._events(kv, started)

    def _events(self, kv: SequenceKV, started: float) -> Iterator[Event]:
        prompt, loading = self._prepared.ids, not self._session.settled
        yield Event(progress=Progress("prefill", 0, len(prompt)))
        scores = self._prefill(kv)
        load_seconds = 0.0
        if loading and scores is not None:
            self._meter.add_reading(self._session.settle(), self._session.waited)
            load_seconds = time.perf_counter() - started
        self._leaks.mark("load" if loading else "prefill")
        yield Event(progress=Progress("prefill", kv.length, len(prompt)))
        while self._sequence.finish is None:
            if scores is None or self._cancel():
                self._sequence.end("cancelled")
                break
            token, forced = self._next(scores)
            if self._first_token is None:
                self._first_token = time.perf_counter() - started
            yield from self._take(token, forced)
            if self._sequence.finish is None:
                scores = self._decode(kv, token)
        yield from self._last(started, load_seconds)

    def _prefill(self, kv: SequenceKV) -> torch.Tensor | None:
        """Scores behind the prompt, None when the caller asked to stop."""
        with self._meter.measure("prefill"):
            try:
                scores = self._runner.prefill(kv, self._prepared.ids, self._cancel, self._chunk_read)
            except Stopped:
                return None
        return scores

    def _chunk_read(self, done: int) -> None:
        self._meter.add_bytes("prefill", self._step_bytes)
        if self._progress is not None:
            self._progress(Progress("prefill", done, len(self._prepared.ids)))

    def _decode(self, kv: SequenceKV, token: int) -> torch.Tensor:
        with self._meter.measure("decode"):
            scores = self._runner.decode([kv], [token])[0]
        self._meter.add_bytes("decode", self._step_bytes)
        return scores

    def _next(self, scores: torch.Tensor) -> tuple[int, bool]:
        """The next token, and whether it was forced."""
        forced = self._sequence.next_forced(in_reasoning=self._in_reasoning, closing=self._closing)
        with self._meter.measure("sample"):
            token = self._sampler.choose(scores) if forced is None else forced
            self._sampler.accept(token)
        return token, forced is not None

    @property
    def _in_reasoning(self) -> bool:
        return self._text.in_reasoning if self._text else False

    def _take(self, token: int, forced: bool) -> Iterator[Event]:
        inside = self._in_reasoning
        piece = self._text.push(token) if self._text and token not in self._prepared.limits.eos else None
        # What opens reasoning, and what closes it by force, belongs to it: neither may eat the answer's budget.
        self._sequence.settle(token, in_reasoning=inside or self._in_reasoning or forced)
        if self._sequence.finish == "stop":
            return
        if self._text and self._text.stopped:
            self._sequence.end("stop_string")
        if self._repetition and self._repetition.push(token):
            self._sequence.end("repetition")
        yield Event(piece.text, piece.reasoning, token) if piece else Event(token=token)

    def _last(self, started: float, load_seconds: float) -> Iterator[Event]:
        piece = self._text.finish() if self._text else None
        if piece and (piece.text or piece.reasoning):
            yield Event(piece.text, piece.reasoning)
        total = time.perf_counter() - started
        self._leaks.mark("decode")
        sequence, finish = self._sequence, self._sequence.finish or "length"
        yield Event(
            result=Result(
                self._text.text if self._text else "",
                self._text.reasoning if self._text else "",
                tuple(sequence.ids),
                finish,
                self._prepared.seed,
                Usage(len(self._prepared.ids), sequence.completion, sequence.reasoning),
                {"load": load_seconds, "first_token": total if self._first_token is None else self._first_token, "total": total},
                self._meter.stages,
            )
        )


def cancelled_result(prepared: Prepared, seconds: float) -> Result:
    """The result of a request that was stopped before its first token."""
    finish: Finish = "cancelled"
    times = {"load": seconds, "first_token": seconds, "total": seconds}
    return Result("", "", (), finish, prepared.seed, Usage(len(prepared.ids), 0, 0), times, {})


def _never() -> bool:
    return False
