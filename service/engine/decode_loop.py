"""Decode: one step for all sequences, launched ahead where the device can, and speculative decoding where one sequence
is alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ..cache.paged import SequenceKV
from ..core import Event, Stage
from ..errors import Caught, MemoryFull
from ..kernels.forward_batch import BLOCK
from .batch import Accounting, Batch
from .buffers import MAX_BATCH
from .request_state import RunningSequence
from .session import Session
from .speculate import DraftLimits, Speculator
from .stepper import Picked

# KV blocks to grow by when a sequence exceeds its reservation; the larger number is tried first.
GROWTH = (4, 1)
# With the token before them, the draft tokens are the rows of one small verify pass.
MAX_DRAFT_TOKENS = MAX_BATCH - 1


class DecodeLoop:
    """The decode steps of a batch."""

    def __init__(self, batch: Batch, session: Session, accounting: Accounting) -> None:
        self._batch = batch
        self._scheduler = batch.scheduler
        self._in_flight = batch.in_flight
        self._stepper = session.stepper
        self._drafting = session.runner.drafting
        self._costs = session.costs
        self._meter = accounting.meter
        self._draft_token_bytes = accounting.draft_token_bytes

    def step(self, sequences: Sequence[RunningSequence]) -> Iterator[Event]:
        """One token for each of `sequences`; several where only one is there and draft tokens were accepted."""
        batch, began, captured = self._batch, time.perf_counter(), self._stepper.captured
        alone = len(sequences) == len(self._scheduler.tickets) == 1
        if alone:
            sequence, limits, draft, drafting = sequences[0], None, list[int](), 0.0
            with Caught("drafting the next tokens") as caught:
                limits = self._draft_limits(sequence)
                if limits is not None:
                    draft, drafting = self._draft(sequence, limits)
            if caught.error is not None:
                yield from batch.fail(sequence.request, caught.error)
                return
            if draft or (limits is not None and limits.unprocessed):
                yield from batch.guarded(sequence, self._verify, sequence, draft, began, drafting, captured)
                return
        if not self._in_flight:
            sequences = self._with_blocks(sequences)
            self._launch(sequences)
        while len(self._in_flight) <= self._stepper.ahead and self._can_run_ahead(sequences):
            self._launch([sequence for sequence in sequences if not sequence.ends_in_flight])
        with self._meter.measure(self._stepper.stage):
            chosen = self._in_flight.collect()
        if alone and sequences[0].speculator is not None and self._stepper.captured == captured:
            sequences[0].speculator.record(0, 0, time.perf_counter() - began)
        for sequence, picked in chosen:
            if sequence.ticket.state != "ended":  # its request may just have failed with another choice
                yield from batch.guarded(sequence, batch.apply, sequence, picked)

    def _launch(self, sequences: Sequence[RunningSequence]) -> None:
        with self._meter.measure("decode"):
            self._in_flight.launch(sequences)
        self._batch.count_pass("decode")

    def _can_run_ahead(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether the step after the one in flight can be launched: with all sequences that go on, unless a prompt
        waits for prefill.

        Not while the host has to choose for one of them, be it the last time: the next step overwrites the scores.
        """
        if not all(self._stepper.runs_ahead(sequence.sampler) for sequence in sequences):
            return False
        going_on = [sequence for sequence in sequences if not sequence.ends_in_flight]
        if not going_on or self._batch.in_state("prefilling"):
            return False
        return all(s.kv is not None and s.kv.length < s.kv.capacity and self._in_flight.can_join(s) for s in going_on)

    def _with_blocks(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """The sequences that have a block for their next token. Where one outgrows its reservation the newest are
        preempted."""
        for sequence in sequences:
            while sequence.kv is not None and sequence.kv.length >= sequence.kv.capacity:
                if not _grow(sequence, sequence.kv):
                    self._free_blocks(sequence)
        return [sequence for sequence in sequences if sequence.kv is not None]

    def _free_blocks(self, sequence: RunningSequence) -> None:
        """Drop a shared prompt, or else preempt the newest sequence; it may be the one that needs the blocks."""
        sharing = next(
            (request for request in self._batch.requests.values() if request.shared_prompt is not None), None
        )
        if sharing is not None:
            sharing.drop_shared_prompt()
            return
        ticket = self._scheduler.youngest(sequence.ticket)
        victim = sequence if ticket is None or ticket.slots > 1 else self._batch.sequence(ticket)
        self._scheduler.move(victim.ticket, "waiting")
        victim.preempt()

    def _draft_limits(self, sequence: RunningSequence) -> DraftLimits | None:
        """What a verify pass may hold now; None where no tokens are drafted and an ordinary step is made."""
        kv, unprocessed = sequence.kv, len(sequence.feed) - 1
        if not self._stepper.checks or not sequence.prepared.speculation or kv is None or self._in_flight:
            return None
        if not 0 <= unprocessed < MAX_DRAFT_TOKENS:
            return None
        left = kv.verifiable - len(sequence.feed)
        if left < 0:
            return None
        unread = self._drafting.unread(kv, kv.length + unprocessed) if self._drafting is not None else 0
        most = min(MAX_DRAFT_TOKENS - unprocessed, left) if sequence.completion.forced_token is None else 0
        return DraftLimits(most, unprocessed, unread)

    def _draft(self, sequence: RunningSequence, limits: DraftLimits) -> tuple[list[int], float]:
        """Draft tokens to verify after the latest token, if that pays, and the seconds that the draft layer took."""
        kv = sequence.kv
        if sequence.speculator is None:
            ids = (*sequence.prepared.ids, *sequence.completion.ids)
            sequence.speculator = Speculator(ids, self._costs, sequence.prefill_seconds)
        plan = sequence.speculator.plan(limits)
        if not plan.layer_tokens or self._drafting is None or kv is None:
            return list(plan.tokens), 0.0
        began, captured = time.perf_counter(), self._stepper.captured
        with self._meter.measure("draft"):
            draft = self._drafting.draft(kv, kv.length + limits.unprocessed, sequence.feed[-1], plan.layer_tokens)
        seconds = time.perf_counter() - began
        self._meter.add_bytes("draft", plan.layer_tokens * self._draft_token_bytes)
        if self._stepper.captured == captured:
            self._costs.record_draft(plan.layer_tokens, limits.unread, seconds)
        return draft, seconds

    def _verify(
        self, sequence: RunningSequence, draft: list[int], began: float, drafting: float, captured: int
    ) -> Iterator[Event]:
        """Compute the latest tokens and the draft tokens in one pass, then choose at each position as decode steps
        would, until the choice differs from the draft.

        `captured`: the stepper's count when the step `began`: drafting may have captured a graph too. `drafting`: its
        seconds.
        """
        kv, speculator, meter = sequence.kv, sequence.speculator, self._meter
        if kv is None or speculator is None:
            raise ValueError("a sequence without a cache or a speculator has no draft")
        fed, accepted = list(sequence.feed), 0
        sequence.feed.clear()
        with meter.measure("decode"):
            checked = self._stepper.check(kv, sequence.sampler, [*fed, *draft], len(fed))
        self._batch.count_pass("decode")
        stages = ("speculation", "draft") if drafting else ("speculation",) if draft else ()
        self._add(stages, Stage(proposed=len(draft)))
        events: list[Event] = []
        for position, expected in enumerate([*draft, None]):
            forced = sequence.completion.forced_token
            with meter.measure("sample"):
                picked = Picked(-1) if forced is not None else checked.pick(position)
            token = picked.token if forced is None else forced
            if token == expected:
                accepted += 1
                self._add(stages, Stage(accepted=1))
            for _ in (token,) if position else fed:
                kv.advance(1)
                kv.keep_checkpoint(written=True)
            events += self._batch.apply(sequence, picked)
            if token != expected or sequence.completion.finish is not None:
                break
            sequence.feed.clear()
        if not kv.cuts_anywhere:
            kv.truncate(kv.length)  # drops the states after the accepted tokens
        seconds = time.perf_counter() - began if self._stepper.captured == captured else None
        speculator.record(len(draft), accepted, seconds, rows=len(fed) + len(draft), drafting=drafting)
        yield from events

    def _add(self, stages: Sequence[str], cost: Stage) -> None:
        for stage in stages:
            self._meter.add(stage, cost)


def _grow(sequence: RunningSequence, kv: SequenceKV) -> bool:
    """Reserve more blocks for the sequence; whether there were any."""
    for blocks in GROWTH:
        with suppress(MemoryFull):
            kv.widen(min(sequence.max_capacity, kv.capacity + blocks * BLOCK))
            return True
    return False
