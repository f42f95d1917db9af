"""One call of the engine: its requests, who of them reads, writes and waits, and what is told of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import CancelCheck, Event, Finish, ProgressReport, Result
from ..errors import Caught, OnedeskError
from ..kernels.forward_batch import BLOCK
from .answer import Answer, Prepared
from .beam_search import Found
from .buffers import MAX_BATCH
from .flights import Flights
from .leaks import LeakWatch
from .scheduler import Scheduler, Ticket
from .session import Session
from .stages import StageMeter
from .stepper import Picked
from .work import Job, Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Books:
    """Where a call's costs are written down, and how many bytes of weights one pass reads, and one drafted token."""

    meter: StageMeter
    leaks: LeakWatch
    pass_bytes: int
    guess_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """What the caller may say meanwhile: stop everything, stop the request of a number, who hears of progress, and which requests came."""

    cancel: CancelCheck | None = None
    cancel_request: Callable[[int], bool] | None = None
    progress: ProgressReport | None = None
    arrivals: Callable[[], Sequence[Prepared]] | None = None


class Call:
    """The state of a call. `take` is the one way in for a chosen token, `end` the one way out for a choice.

    What is done for one row is done within `guarded`: its fault ends its request, and nothing else.
    """

    def __init__(self, requests: Sequence[Prepared], session: Session, books: Books, orders: Orders) -> None:
        self.session = session
        self.runner = session.runner
        self.books = books
        self.orders = orders
        self.started = 0.0
        self.scheduler = Scheduler(MAX_BATCH)
        self.flights = Flights(session.stepper)
        # Requests that have not ended, by their numbers; those that have are forgotten, for a call may go on for days.
        self.jobs: dict[int, Job] = {}
        self._rows: dict[Ticket, Row] = {}
        self._numbered = 0
        self._stopped = False
        self._refused: list[Event] = []  # requests that failed before they had a row
        self.runner.table_cost()  # what others read before is not of this call
        self.join(requests)

    def start(self, when: float) -> None:
        """It begins now, at the perf_counter time `when` for those that are there."""
        self.started = when
        for job in self.jobs.values():
            job.joined = when

    def join(self, requests: Sequence[Prepared]) -> None:
        """Let requests wait behind those that are there; they are numbered on."""
        first = self._numbered == 0
        for number, prepared in enumerate(requests, self._numbered):
            with Caught("taking in a request") as caught:
                job = _job(number, prepared)
                job.joined, job.before = (self.started, {}) if first else (time.perf_counter(), self.books.meter.stages)
                self.jobs[job.index] = job
                for row in job.rows:
                    self._rows[row.ticket] = row
                    self.scheduler.add(row.ticket)
            if caught.error is not None:
                self._refused.append(_failed(number, caught.error))
        self._numbered += len(requests)

    @property
    def busy(self) -> bool:
        """Whether there is something to do or to say."""
        return bool(self.scheduler.tickets or self._refused)

    def refusals(self) -> Iterator[Event]:
        """Say which requests failed before they had a row."""
        refused, self._refused = self._refused, []
        yield from refused

    def count_pass(self, stage: str) -> None:
        """Write down that a pass of `stage` has read the weights, and what the rows of tables in files cost it."""
        self.books.meter.add_bytes(stage, self.books.pass_bytes)
        seconds, nbytes = self.runner.table_cost()
        if nbytes:
            self.books.meter.add_bytes("table", nbytes, seconds)

    def row(self, ticket: Ticket) -> Row:
        """The row of a ticket."""
        return self._rows[ticket]

    def job(self, row: Row) -> Job:
        """The request that a row belongs to."""
        return self.jobs[row.ticket.request]

    def unwanted(self, job: Job) -> bool:
        """Whether the caller asks to stop this request, or all; once said, it stays."""
        self._stopped = self._stopped or (self.orders.cancel is not None and self.orders.cancel())
        ask = self.orders.cancel_request
        job.unwanted = job.unwanted or self._stopped or (ask is not None and ask(job.index))
        return job.unwanted

    def event(self, row: Row, event: Event) -> Event:
        """The event with its place."""
        request, choice = row.ticket.request, row.ticket.choice
        return event if event.request == request and event.choice == choice else replace(event, request=request, choice=choice)

    def guarded(self, row: Row, work: Callable[..., Iterator[Event]], *arguments: Any) -> Iterator[Event]:
        """What `work(*arguments)`, which concerns this row alone, yields. Whatever it raises ends the row's request with that error."""
        job = self.job(row)
        with Caught("writing an answer") as caught:
            yield from work(*arguments)
        if caught.error is not None:
            yield from self.fail(job, caught.error)

    def fail(self, job: Job, error: OnedeskError) -> Iterator[Event]:
        """End a request with an error: what it holds is free at once, and nothing of it is kept for later prompts."""
        for row in list(job.rows):
            self._leave(row)
        job.drop_base()
        self.jobs.pop(job.index, None)
        yield _failed(job.index, error)

    def take(self, row: Row, picked: Picked) -> Iterator[Event]:
        """Take the chosen token in, or the one that must come instead; end the row or let it go on. Raises what the choice failed with."""
        forced = row.answer.coming is not None
        if picked.error is not None and not forced:
            raise picked.error
        token = picked.token if row.answer.coming is None else row.answer.coming
        row.sampler.accept(token, forced=forced)
        if row.first_token is None:
            row.first_token = time.perf_counter() - self.job(row).joined
        if picked.logprobs is not None and not forced:
            row.logprob += picked.logprobs.token
        if row.speculator is not None:
            row.speculator.push(token)
        inside = row.answer.in_reasoning
        event = row.answer.take(token, forced=forced)
        if event is not None:
            thought = forced or inside or row.answer.in_reasoning
            shown = picked.logprobs if row.prepared.logprobs is not None and not thought else None
            event = self.event(row, event if shown is None else replace(event, logprobs=shown))
            if self.job(row).ended is None:
                yield event
            else:
                row.untold.append(event)
        if row.answer.finish is not None:
            yield from self.end(row, row.answer.finish)
        elif forced or not row.launched:
            self.flights.correct(row, token)

    def remember(self, row: Row) -> None:
        """Let later prompts begin with what the row's cache holds."""
        if row.kv is not None and row.prepared.prefix_reuse:
            known = row.known
            self.session.prefix.insert(known, row.kv.table[: len(known) // BLOCK])

    def end(self, row: Row, finish: Finish) -> Iterator[Event]:
        """The row has ended: its place and its blocks are free at once, and its result is told, or compared with the others' first."""
        row.answer.end(finish)
        self.remember(row)
        job = self._leave(row)
        if job.ended is None:
            yield from self._tell(row, row.ticket.choice, row.answer, None)
        else:
            job.ended.append(row)
        if job.ended is not None and not job.rows:
            best = sorted(job.ended, key=lambda other: (other.answer.finish == "cancelled", -other.logprob))
            for choice, other in enumerate(best[: row.prepared.n]):
                yield from (replace(event, choice=choice) for event in other.untold)
                yield from self._tell(other, choice, other.answer, other.logprob)
        self._forget(job)

    def end_search(self, row: Row, found: Sequence[Found]) -> Iterator[Event]:
        """The search behind the row has ended with these answers, the best first."""
        job = self._leave(row)
        for choice, one in enumerate(found):
            yield from (replace(event, request=row.ticket.request, choice=choice) for event in one.events)
            yield from self._tell(row, choice, one.answer, one.total)
        self._forget(job)

    def close(self) -> None:
        """Return everything that the call holds."""
        self.flights.drain()
        for row in self._rows.values():
            row.leave()
        for job in self.jobs.values():
            job.drop_base()

    def _forget(self, job: Job) -> None:
        if not job.rows:
            del self.jobs[job.index]

    def _leave(self, row: Row) -> Job:
        job = self.job(row)
        row.leave()
        job.rows.remove(row)
        del self._rows[row.ticket]
        if row.ticket.state != "ended":
            self.scheduler.move(row.ticket, "ended")
        if not job.waiting:
            job.drop_base()
        if not self.scheduler.tickets:
            self.books.leaks.mark("decode")
        return job

    def _tell(self, row: Row, choice: int, answer: Answer, logprob: float | None) -> Iterator[Event]:
        last = answer.last()
        if last is not None:
            yield replace(last, request=row.ticket.request, choice=choice)
        yield Event(result=self._result(row, answer, logprob), request=row.ticket.request, choice=choice)

    def _result(self, row: Row, answer: Answer, logprob: float | None) -> Result:
        job = self.job(row)
        total = time.perf_counter() - job.joined
        first = total if row.first_token is None else row.first_token
        seconds = {"load": job.load_seconds, "first_token": first, "total": total}
        stages = self.books.meter.since(job.before) if job.before else self.books.meter.stages
        return answer.result(row.prepared.seed_of(row.ticket.choice), job.cached, seconds, stages, logprob)


def _failed(request: int, error: OnedeskError) -> Event:
    log.warning("a request failed: %s", error, exc_info=error.__cause__)
    return Event(error=error, request=request)


def _job(index: int, prepared: Prepared) -> Job:
    width = prepared.beams or 1
    choices = 1 if prepared.beams else prepared.best_of or prepared.n
    rows = [Row(prepared, Ticket(index, choice, width)) for choice in range(choices)]
    return Job(index, prepared, rows, ended=[] if prepared.best_of is not None else None)
