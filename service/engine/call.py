"""One call of the engine: its requests, who of them reads, writes and waits, and what is told of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core import CancelCheck, Event, Finish, ProgressReport, Result
from ..kernels.rows import BLOCK
from .answer import Answer, Prepared
from .buffers import MAX_BATCH
from .flights import Flights
from .leaks import LeakWatch
from .scheduler import Scheduler, Ticket
from .search import Found
from .session import Session
from .stages import StageMeter
from .stepper import Picked
from .work import Job, Row


@dataclass(frozen=True, slots=True)
class Books:
    """Where a call's costs are written down, and how many bytes of weights one pass reads."""

    meter: StageMeter
    leaks: LeakWatch
    pass_bytes: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What the caller may say meanwhile: stop everything, stop the request of a number; and who hears of progress."""

    cancel: CancelCheck | None = None
    cancel_request: Callable[[int], bool] | None = None
    progress: ProgressReport | None = None


class Call:
    """The state of a call. `take` is the one way in for a chosen token, `end` the one way out for a choice."""

    def __init__(self, requests: Sequence[Prepared], session: Session, books: Books, orders: Orders) -> None:
        self.session = session
        self.runner = session.runner
        self.books = books
        self.orders = orders
        self.started = 0.0
        self.scheduler = Scheduler(MAX_BATCH)
        self.flights = Flights(session.stepper)
        self.jobs = [_job(index, prepared) for index, prepared in enumerate(requests)]
        self._rows = {row.ticket: row for job in self.jobs for row in job.rows}
        self._stopped = False
        for ticket in self._rows:
            self.scheduler.add(ticket)

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
        return replace(event, request=row.ticket.request, choice=row.ticket.choice)

    def take(self, row: Row, picked: Picked) -> Iterator[Event]:
        """Take the chosen token in, or the one that must come instead; end the row or let it go on."""
        forced = row.answer.coming is not None
        token = picked.token if row.answer.coming is None else row.answer.coming
        row.sampler.accept(token, forced=forced)
        if row.first_token is None:
            row.first_token = time.perf_counter() - self.started
        if picked.logprobs is not None and not forced:
            row.logprob += picked.logprobs.token
        if row.speculator is not None:
            row.speculator.push(token)
        event = row.answer.take(token, forced=forced)
        if event is not None:
            shown = picked.logprobs if row.prepared.logprobs is not None and not forced else None
            event = self.event(row, replace(event, logprobs=shown))
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
            return
        job.ended.append(row)
        if not job.rows:
            best = sorted(job.ended, key=lambda other: (other.answer.finish == "cancelled", -other.logprob))
            for choice, other in enumerate(best[: row.prepared.n]):
                yield from (replace(event, choice=choice) for event in other.untold)
                yield from self._tell(other, choice, other.answer, other.logprob)

    def end_search(self, row: Row, found: Sequence[Found]) -> Iterator[Event]:
        """The search behind the row has ended with these answers, the best first."""
        self._leave(row)
        for choice, one in enumerate(found):
            yield from (replace(event, request=row.ticket.request, choice=choice) for event in one.events)
            yield from self._tell(row, choice, one.answer, one.total)

    def close(self) -> None:
        """Return everything that the call holds."""
        self.flights.drain()
        for row in self._rows.values():
            row.leave()
        for job in self.jobs:
            job.drop_base()

    def _leave(self, row: Row) -> Job:
        job = self.job(row)
        row.leave()
        job.rows.remove(row)
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
        job, total = self.job(row), time.perf_counter() - self.started
        first = total if row.first_token is None else row.first_token
        seconds = {"load": job.load_seconds, "first_token": first, "total": total}
        return answer.result(row.prepared.seed_of(row.ticket.choice), job.cached, seconds, self.books.meter.stages, logprob)


def _job(index: int, prepared: Prepared) -> Job:
    width = prepared.beams or 1
    choices = 1 if prepared.beams else prepared.best_of or prepared.n
    rows = [Row(prepared, Ticket(index, choice, width)) for choice in range(choices)]
    return Job(index, prepared, rows, ended=[] if prepared.best_of is not None else None)
