"""Runs requests to completion: sequences that are admitted prefill or decode, the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from ..cache.paged import SequenceKV
from ..core import Event, Progress
from ..errors import Caught, MemoryFull
from ..kernels.forward_batch import BLOCK, FEW_ROWS
from .batch import Accounting, Batch, Controls
from .beam_search import BeamSearch
from .completion import Prepared
from .decode_loop import DecodeLoop
from .request_state import RequestState, RunningSequence, SharedPrompt
from .runner import PassRestarted, Stopped
from .scheduler import State, Ticket
from .session import Session
from .stepper import Picked

# A request that arrives while a prefill pass computes its first JOINABLE layers joins the pass, which is then
# restarted. The restart costs a few percent of a pass. Requests that are sent together are then prefilled together, the
# first one too.
JOINABLE = 2


class BatchLoop:
    """Runs prepared requests on a session as one batch; `events` runs it.

    A prompt is prefilled chunk by chunk, between decode steps of the others. Prompts that fit into one chunk are
    prefilled together, unless they share a prefix: then the later ones wait for the cached prefix of the first. All
    sequences that decode do so in one step. An event is yielded as soon as its token was chosen.
    """

    def __init__(
        self, requests: Sequence[Prepared], session: Session, accounting: Accounting, controls: Controls
    ) -> None:
        self._batch = Batch(requests, session, accounting, controls)
        self._scheduler = self._batch.scheduler
        self._decoding = DecodeLoop(self._batch, session, accounting)
        self._session = session
        self._runner = session.runner
        self._stepper = session.stepper
        self._meter = accounting.meter
        self._searches: dict[Ticket, BeamSearch] = {}

    def events(self, started: float) -> Iterator[Event]:
        """All events until every request has ended; the last one of each choice has its result.

        `started` is the perf_counter time at which the run began. While the weights are still loading, the first prompt
        is prefilled layer by layer as they arrive; decode begins when all are there.
        """
        batch = self._batch
        batch.start(started)
        try:
            while self._has_work():
                yield from batch.refusals()
                yield from self._end_cancelled()
                yield from self._admit()
                yield from self._prefill()
                yield from self._step_searches()
                decoding = [s for s in batch.in_state("decoding") if s.ticket not in self._searches]
                decoding = [sequence for sequence in decoding if not batch.is_cancelled(sequence.request)]
                if decoding:
                    yield from self._decoding.step(decoding)
                self._close_ended_searches()
        finally:
            batch.close()
            for search in self._searches.values():
                search.close()

    def _has_work(self) -> bool:
        self._batch.add_arrivals()
        return self._batch.busy

    def _end_cancelled(self) -> Iterator[Event]:
        """End the requests that the caller has cancelled."""
        for request in list(self._batch.requests.values()):
            if request.sequences and self._batch.is_cancelled(request):
                for sequence in list(request.sequences):
                    if sequence.ticket.state != "ended":
                        yield from self._batch.guarded(sequence, self._cancel, sequence)

    def _cancel(self, sequence: RunningSequence) -> Iterator[Event]:
        if sequence.ticket in self._searches:
            return self._end_search(sequence)
        return self._batch.end(sequence, "cancelled")

    def _admit(self) -> Iterator[Event]:
        """Admit the sequences that have a free slot and fit. One that is alone always fits, if need be without any
        shared prompts."""
        scheduler = self._scheduler
        yield from self._admit_in_order()
        if scheduler.working or scheduler.next is None:
            return
        for request in self._batch.requests.values():
            request.drop_shared_prompt()
        yield from self._admit_in_order()
        left = scheduler.next
        if not scheduler.working and left is not None:
            words = (
                f"request {left.request} does not fit the session's KV cache although nothing else runs; "
                "ask for fewer tokens"
            )
            yield from self._batch.fail(self._batch.requests[left.request], MemoryFull(words))

    def _admit_in_order(self) -> Iterator[Event]:
        for ticket in self._scheduler.admit(self._reserve):
            sequence = self._batch.sequence(ticket)
            request = sequence.request
            if sequence.admission_error is not None:
                yield from self._batch.fail(request, sequence.admission_error)
            elif ticket.state == "prefilling":
                yield self._prefill_progress(sequence)
            elif request.shared_prompt is not None:
                yield from self._batch.guarded(
                    sequence, self._start_decoding, sequence, request.shared_prompt.scores.clone()
                )
            if not request.waiting:
                request.drop_shared_prompt()

    def _reserve(self, ticket: Ticket) -> State | None:
        """As `_reserve_blocks`. A sequence that cannot be admitted because of a fault has ended, see
        `admission_error`."""
        with Caught("making room for a request") as caught:
            return self._reserve_blocks(ticket)
        self._batch.sequence(ticket).admission_error = caught.error
        return "ended"

    def _reserve_blocks(self, ticket: Ticket) -> State | None:
        """Reserve a sequence's KV blocks and return its next state, or None if it must wait: "decoding" on a fork of
        its request's shared prompt, else "prefilling", see `_may_prefill`."""
        sequence, kv = self._batch.sequence(ticket), self._runner.kv
        request, prepared = sequence.request, sequence.prepared
        if request.shared_prompt is not None:
            with suppress(MemoryFull):
                sequence.kv = request.shared_prompt.kv.fork(sequence.capacity)
                return "decoding"
            return None
        # More than FEW_ROWS tokens are left to prefill, see first_piece.
        cached = kv.usable(self._session.prefix.match(prepared.keys[:-FEW_ROWS])) if prepared.prefix_reuse else []
        if not self._may_prefill(sequence, len(cached) * BLOCK):
            return None
        if not (kv.fits(sequence.capacity, cached) if prepared.beams is None else BeamSearch.fits(kv, prepared)):
            return None
        sequence.kv = kv.open(sequence.capacity, cached)
        sequence.kv.shift = prepared.pictures.positions.delta if prepared.pictures is not None else 0
        if prepared.beams is not None:
            self._searches[ticket] = BeamSearch(prepared, self._runner, sequence.kv)
        if not request.prefilled:
            request.cached = sequence.kv.length
        return "prefilling"

    def _may_prefill(self, sequence: RunningSequence, cached: int) -> bool:
        """Whether a sequence may prefill its prompt now, from token `cached` on.

        It may if no other does, or if one pass prefills the rest of all prompts, each with the scores that it would
        have alone. A prompt whose next block another one computes just now waits for that block, and one with pictures
        is always alone.
        """
        prefilling = self._batch.in_state("prefilling")
        if not prefilling:
            return True
        if any(other.prepared.pictures is not None for other in (sequence, *prefilling)):
            return False
        keys = sequence.prepared.keys
        left = [
            len(keys) - cached,
            *(len(other.prepared.ids) - other.kv.length for other in prefilling if other.kv is not None),
        ]
        more = cached + BLOCK
        shares = sequence.prepared.prefix_reuse and more < len(keys) - FEW_ROWS
        return (
            self._runner.reads_several
            and min(left) > FEW_ROWS
            and sum(left) <= self._runner.chunk_rows
            and not any(
                other.request is sequence.request or (shares and other.prepared.keys[:more] == keys[:more])
                for other in prefilling
            )
        )

    def _prefill(self) -> Iterator[Event]:
        """One prefill: the prompts of several sequences in one pass, or all of one, or one chunk of it while others
        decode."""
        sequences, began = self._batch.in_state("prefilling"), time.perf_counter()
        if not sequences:
            return
        with self._meter.measure("prefill"):
            try:
                scores = self._prefill_pass(sequences)
            except (Stopped, PassRestarted):
                return  # the loop ends what is cancelled, or admits what joins, and comes back here
        took = time.perf_counter() - began
        for sequence, own_scores in zip(sequences, scores, strict=True):
            sequence.prefill_seconds += took
            if sequence.kv is not None and sequence.kv.length == len(sequence.prepared.ids):
                self._wait_for_weights(sequence.request)
                yield from self._batch.guarded(sequence, self._finish_prefill, sequence, sequence.kv, own_scores)

    def _prefill_pass(self, sequences: Sequence[RunningSequence]) -> torch.Tensor:
        """The scores [sequences, vocab] after what was prefilled of each.

        Raises Stopped when all of them are cancelled: a pass goes on for those that are not. Raises PassRestarted when
        a request joins.
        """
        runner, kvs = self._runner, [sequence.kv for sequence in sequences if sequence.kv is not None]
        ids = [sequence.prepared.ids[kv.length :] for sequence, kv in zip(sequences, kvs, strict=True)]
        layers = 0

        def all_cancelled() -> bool:
            return all(self._batch.is_cancelled(sequence.request) for sequence in sequences)

        def must_restart() -> bool:
            nonlocal layers
            layers += 1
            return layers <= JOINABLE and self._one_joins()

        if len(sequences) == 1:
            sequence, before = sequences[0], kvs[0].length

            def report(done: int) -> None:
                self._count_prefill([(sequence, before + done)])

            return runner.prefill(
                kvs[0],
                ids[0],
                all_cancelled,
                report,
                whole=len(self._scheduler.working) == 1,
                pictures=sequence.prepared.pictures,
                restart=must_restart,
            )[None]
        scores = runner.prefill_several(kvs, ids, all_cancelled, must_restart)
        self._count_prefill([(sequence, kv.length) for sequence, kv in zip(sequences, kvs, strict=True)])
        return scores

    def _one_joins(self) -> bool:
        """Whether a request arrived just now whose prompt can be prefilled in the same pass."""
        if not self._runner.reads_several or not self._batch.add_arrivals():
            return False
        ticket = self._scheduler.next
        return (
            ticket is not None
            and ticket.slots <= self._scheduler.free
            and self._may_prefill(self._batch.sequence(ticket), 0)
        )

    def _count_prefill(self, prefilled: Sequence[tuple[RunningSequence, int]]) -> None:
        """Count one pass, and report how many tokens of each prompt are prefilled now."""
        self._batch.count_pass("prefill")
        for sequence, done in prefilled:
            self._batch.report(Progress("prefill", done, len(sequence.prepared.ids)))

    def _wait_for_weights(self, request: RequestState) -> None:
        """Wait until all weights are there, after the first prompt. A failure is everyone's: no request can go on
        without them."""
        loading = not self._session.settled
        if loading:
            self._meter.add_reading(self._session.settle(), self._session.waited)
            request.load_seconds = time.perf_counter() - request.arrived
        self._batch.accounting.leaks.mark("load" if loading else "prefill")

    def _finish_prefill(self, sequence: RunningSequence, kv: SequenceKV, scores: torch.Tensor) -> Iterator[Event]:
        request = sequence.request
        request.prefilled = True
        self._scheduler.move(sequence.ticket, "decoding")
        self._batch.cache_prefix(sequence)
        yield self._prefill_progress(sequence)
        if request.waiting:
            with suppress(MemoryFull):  # then each of them prefills again what the prefix cache does not have
                request.shared_prompt = SharedPrompt(kv.fork(kv.length), scores.clone())
        yield from self._start_decoding(sequence, scores)

    def _prefill_progress(self, sequence: RunningSequence) -> Event:
        done = sequence.kv.length if sequence.kv is not None else 0
        return self._batch.event(sequence, Event(progress=Progress("prefill", done, len(sequence.prepared.ids))))

    def _start_decoding(self, sequence: RunningSequence, scores: torch.Tensor) -> Iterator[Event]:
        """The first token, from the scores after the prompt. A sequence that was preempted has it already."""
        if self._batch.is_cancelled(sequence.request):
            return
        if sequence.ticket in self._searches:
            self._searches[sequence.ticket].begin(scores)
        elif not sequence.feed:
            with self._meter.measure("sample"):
                forced = sequence.completion.forced_token is not None
                picked = Picked(-1) if forced else self._stepper.pick(sequence.sampler, scores)
            yield from self._batch.apply(sequence, picked)

    def _step_searches(self) -> Iterator[Event]:
        """One step of every beam search whose prompt is prefilled."""
        self._close_ended_searches()
        for ticket, search in list(self._searches.items()):
            sequence = self._batch.sequence(ticket)
            if ticket.state == "decoding" and not self._batch.is_cancelled(sequence.request):
                yield from self._batch.guarded(sequence, self._step_search, sequence, search)

    def _step_search(self, sequence: RunningSequence, search: BeamSearch) -> Iterator[Event]:
        if not search.done:
            with self._meter.measure("decode"):
                search.step()
            self._batch.count_pass("decode")
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter() - sequence.request.arrived
        yield self._batch.event(
            sequence, Event(progress=Progress("decode", search.length, sequence.prepared.limits.room))
        )
        if search.done:
            yield from self._end_search(sequence)

    def _end_search(self, sequence: RunningSequence) -> Iterator[Event]:
        """End a beam search with the best completions that it found."""
        found = self._searches[sequence.ticket].best(sequence.prepared.n)
        self._searches.pop(sequence.ticket).close()
        yield from self._batch.end_search(sequence, found)

    def _close_ended_searches(self) -> None:
        """Return the blocks of searches whose requests have ended."""
        for ticket in [ticket for ticket in self._searches if ticket.state == "ended"]:
            self._searches.pop(ticket).close()
