"""The state of one run of the engine: its requests, the sequences that prefill, decode or wait, and the events emitted
for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import CancelCheck, Event, Finish, Progress, ProgressReport, Result
from ..errors import Caught, OnedeskError
from ..kernels.forward_batch import BLOCK
from .beam_search import BeamResult
from .buffers import MAX_BATCH
from .completion import Completion, Prepared
from .leaks import LeakWatch
from .request_state import RequestState, RunningSequence
from .scheduler import Scheduler, State, Ticket
from .session import Session
from .stages import StageMeter
from .stepper import Picked
from .steps_in_flight import StepsInFlight

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where costs are counted, and the bytes of weights that one pass reads, and that drafting one token reads."""

    meter: StageMeter
    leaks: LeakWatch
    pass_bytes: int
    draft_token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Controls:
    """What the caller may do during a run: cancel all of it, cancel one request by its number, follow progress, add
    requests."""

    cancel: CancelCheck | None = None
    cancel_request: Callable[[int], bool] | None = None
    progress: ProgressReport | None = None
    arrivals: Callable[[], Sequence[Prepared]] | None = None


class Batch:
    """The requests of a run and their sequences. `apply` is the only way in for a chosen token, `end` the only way out
    for a choice.

    Work for one sequence is done within `guarded`: its fault ends its request, and nothing else.
    """

    def __init__(
        self, requests: Sequence[Prepared], session: Session, accounting: Accounting, controls: Controls
    ) -> None:
        self.scheduler = Scheduler(MAX_BATCH)
        self.in_flight = StepsInFlight(session.stepper)
        self.accounting = accounting
        # Requests that have not ended, by their numbers; ended ones are dropped, for a run may last for days.
        self.requests: dict[int, RequestState] = {}
        self._runner = session.runner
        self._prefix = session.prefix
        self._controls = controls
        self._started = 0.0
        self._sequences: dict[Ticket, RunningSequence] = {}
        self._numbered = 0
        self._cancelled = False
        self._refused: list[Event] = []  # requests that failed before they had a sequence
        self._runner.table_cost()  # what was read before this run is not its cost
        self.add(requests)

    def start(self, when: float) -> None:
        """The run begins, at the perf_counter time `when` for the requests that are there."""
        self._started = when
        for request in self.requests.values():
            request.arrived = when

    def add(self, requests: Sequence[Prepared]) -> None:
        """Queue requests after those that are there; their numbers follow on."""
        first = self._numbered == 0
        for number, prepared in enumerate(requests, self._numbered):
            with Caught("taking in a request") as caught:
                request = RequestState.of(number, prepared)
                now = (self._started, {}) if first else (time.perf_counter(), self.accounting.meter.stages)
                request.arrived, request.stages_before = now
                self.requests[number] = request
                for sequence in request.sequences:
                    self._sequences[sequence.ticket] = sequence
                    self.scheduler.add(sequence.ticket)
            if caught.error is not None:
                self._refused.append(_failed(number, caught.error))
        self._numbered += len(requests)

    def add_arrivals(self) -> bool:
        """Queue the requests that arrived since this was last called; whether there were any."""
        arrived = () if self._controls.arrivals is None else self._controls.arrivals()
        self.add(arrived)
        return bool(arrived)

    @property
    def busy(self) -> bool:
        """Whether there is work, or an event to emit."""
        return bool(self.scheduler.tickets or self._refused)

    def refusals(self) -> Iterator[Event]:
        """An error event for each request that failed before it had a sequence."""
        refused, self._refused = self._refused, []
        yield from refused

    def count_pass(self, stage: str) -> None:
        """Count towards `stage` that a pass has read the weights, and what the rows of tables in files cost it."""
        meter = self.accounting.meter
        meter.add_bytes(stage, self.accounting.pass_bytes)
        seconds, nbytes = self._runner.table_cost()
        if nbytes:
            meter.add_bytes("table", nbytes, seconds)

    def sequence(self, ticket: Ticket) -> RunningSequence:
        """The sequence of a ticket."""
        return self._sequences[ticket]

    def in_state(self, state: State) -> list[RunningSequence]:
        """The admitted sequences in a state, the oldest first."""
        return [self._sequences[ticket] for ticket in self.scheduler.working if ticket.state == state]

    def is_cancelled(self, request: RequestState) -> bool:
        """Whether the caller cancels this request, or the whole run; once said, it stays."""
        controls = self._controls
        self._cancelled = self._cancelled or (controls.cancel is not None and controls.cancel())
        ask = controls.cancel_request
        request.cancelled = request.cancelled or self._cancelled or (ask is not None and ask(request.index))
        return request.cancelled

    def report(self, progress: Progress) -> None:
        """Report progress to the caller."""
        if self._controls.progress is not None:
            self._controls.progress(progress)

    def event(self, sequence: RunningSequence, event: Event) -> Event:
        """The event with the numbers of its request and choice."""
        request, choice = sequence.ticket.request, sequence.ticket.choice
        return (
            event
            if event.request == request and event.choice == choice
            else replace(event, request=request, choice=choice)
        )

    def guarded(
        self, sequence: RunningSequence, work: Callable[..., Iterator[Event]], *arguments: Any
    ) -> Iterator[Event]:
        """The events of `work(*arguments)`, which concerns this sequence alone. Whatever it raises ends the request
        with that error."""
        with Caught("writing an answer") as caught:
            yield from work(*arguments)
        if caught.error is not None:
            yield from self.fail(sequence.request, caught.error)

    def fail(self, request: RequestState, error: OnedeskError) -> Iterator[Event]:
        """End a request with an error: its slots and blocks are free at once, and nothing of it enters the prefix
        cache."""
        for sequence in list(request.sequences):
            self._remove(sequence)
        request.drop_shared_prompt()
        request.ended = None
        self.requests.pop(request.index, None)
        yield _failed(request.index, error)

    def apply(self, sequence: RunningSequence, picked: Picked) -> Iterator[Event]:
        """Append the chosen token, or the forced one in its stead; end the sequence or let it go on. Raises what the
        choice failed with."""
        completion = sequence.completion
        forced = completion.forced_token is not None
        if picked.error is not None and not forced:
            raise picked.error
        token = picked.token if completion.forced_token is None else completion.forced_token
        sequence.sampler.accept(token, forced=forced)
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter() - sequence.request.arrived
        if picked.logprobs is not None and not forced:
            sequence.logprob += picked.logprobs.token
        if sequence.speculator is not None:
            sequence.speculator.push(token)
        inside = completion.in_reasoning
        event = completion.take(token, forced=forced)
        if event is not None:
            reasoning = forced or inside or completion.in_reasoning
            shown = picked.logprobs if sequence.prepared.logprobs is not None and not reasoning else None
            event = self.event(sequence, event if shown is None else replace(event, logprobs=shown))
            if sequence.request.ended is None:
                yield event
            else:
                sequence.withheld.append(event)
        if completion.finish is not None:
            yield from self.end(sequence, completion.finish)
        elif forced or not sequence.launched:
            self.in_flight.correct(sequence, token)

    def cache_prefix(self, sequence: RunningSequence) -> None:
        """Put the full blocks of the sequence into the prefix cache."""
        if sequence.kv is not None and sequence.prepared.prefix_reuse:
            ids = sequence.cached_ids
            self._prefix.insert(ids, sequence.kv.table[: len(ids) // BLOCK])

    def end(self, sequence: RunningSequence, finish: Finish) -> Iterator[Event]:
        """The sequence has ended: its slot and blocks are free at once. Its result is emitted, or first compared with
        the others'."""
        sequence.completion.end(finish)
        self.cache_prefix(sequence)
        self._remove(sequence)
        request = sequence.request
        if request.ended is None:
            yield from self._final_events(sequence, sequence.ticket.choice, sequence.completion, None)
        else:
            request.ended.append(sequence)
        if request.ended is not None and not request.sequences:
            best = sorted(request.ended, key=lambda other: (other.completion.finish == "cancelled", -other.logprob))
            for choice, other in enumerate(best[: sequence.prepared.n]):
                yield from (replace(event, choice=choice) for event in other.withheld)
                yield from self._final_events(other, choice, other.completion, other.logprob)
        self._drop_if_ended(request)

    def end_search(self, sequence: RunningSequence, found: Sequence[BeamResult]) -> Iterator[Event]:
        """The beam search of the sequence has ended with these completions, the best first."""
        self._remove(sequence)
        for choice, one in enumerate(found):
            yield from (replace(event, request=sequence.ticket.request, choice=choice) for event in one.events)
            yield from self._final_events(sequence, choice, one.completion, one.total)
        self._drop_if_ended(sequence.request)

    def close(self) -> None:
        """Return all KV blocks."""
        self.in_flight.drain()
        for sequence in self._sequences.values():
            sequence.close_cache()
        for request in self.requests.values():
            request.drop_shared_prompt()
            request.sequences.clear()  # a request and its sequences refer to each other

    def _drop_if_ended(self, request: RequestState) -> None:
        if not request.sequences:
            del self.requests[request.index]
            request.ended = None

    def _remove(self, sequence: RunningSequence) -> None:
        request = sequence.request
        sequence.close_cache()
        request.sequences.remove(sequence)
        del self._sequences[sequence.ticket]
        if sequence.ticket.state != "ended":
            self.scheduler.move(sequence.ticket, "ended")
        if not request.waiting:
            request.drop_shared_prompt()
        if not self.scheduler.tickets:
            self.accounting.leaks.mark("decode")

    def _final_events(
        self, sequence: RunningSequence, choice: int, completion: Completion, logprob: float | None
    ) -> Iterator[Event]:
        last = completion.flush()
        if last is not None:
            yield replace(last, request=sequence.ticket.request, choice=choice)
        yield Event(result=self._result(sequence, completion, logprob), request=sequence.ticket.request, choice=choice)

    def _result(self, sequence: RunningSequence, completion: Completion, logprob: float | None) -> Result:
        request, meter = sequence.request, self.accounting.meter
        total = time.perf_counter() - request.arrived
        first = total if sequence.first_token is None else sequence.first_token
        seconds = {"load": request.load_seconds, "first_token": first, "total": total}
        stages = meter.since(request.stages_before) if request.stages_before else meter.stages
        return completion.result(
            sequence.prepared.seed_of(sequence.ticket.choice), request.cached, seconds, stages, logprob
        )


def _failed(request: int, error: OnedeskError) -> Event:
    log.warning("a request failed: %s", error, exc_info=error.__cause__)
    return Event(error=error, request=request)
