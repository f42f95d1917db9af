"""Requests from their first token to their results: whoever has a place reads or writes, the others wait their turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from ..cache.paged import SequenceKV
from ..core import Event, Progress
from ..errors import Caught, MemoryFull
from ..kernels.forward_batch import BLOCK, FEW_ROWS
from .answer import Prepared
from .batch import Books, Call, Orders
from .beam_search import Search
from .decode_loop import Writing
from .runner import Stopped
from .scheduler import State, Ticket
from .session import Session
from .stepper import Picked, pick
from .work import Base, Row

# Layers of a pass over prompts, within which those who come still join it: so much is computed anew with them, a few percent of a pass, and
# of requests that are sent together the first does not read alone.
JOINABLE = 2


class Generation:
    """Runs prepared requests on a session, their choices together; `events` is the one way through it.

    A prompt is read chunk by chunk while others write; several that go into one chunk are read together, unless they begin alike: those
    share what the first has read. All rows that write do so in one step. An event is yielded as soon as its token was chosen.
    """

    def __init__(self, requests: Sequence[Prepared], session: Session, books: Books, orders: Orders) -> None:
        self._call = Call(requests, session, books, orders)
        self._writing = Writing(self._call)
        self._session = session
        self._meter = books.meter
        self._searches: dict[Ticket, Search] = {}

    def events(self, started: float) -> Iterator[Event]:
        """Everything until all have ended; the last event of a choice has its result. `started` is the call's perf_counter time.

        Weights that are still on their way are read while the first prompt is; decode begins when all are there.
        """
        call = self._call
        call.start(started)
        try:
            while self._arrive():
                yield from call.refusals()
                yield from self._stop()
                yield from self._enter()
                yield from self._read()
                yield from self._search()
                writing = [call.row(t) for t in call.scheduler.working if t.state == "writing" and t not in self._searches]
                wanted = [row for row in writing if not call.unwanted(call.job(row))]
                if wanted:
                    yield from self._writing.step(wanted)
                self._close_searches()
        finally:
            call.close()
            for search in self._searches.values():
                search.close()

    def _arrive(self) -> bool:
        """Let in who came meanwhile; False when nobody is left."""
        self._came()
        return self._call.busy

    def _came(self) -> bool:
        arrivals = self._call.orders.arrivals
        came = () if arrivals is None else arrivals()
        self._call.join(came)
        return bool(came)

    def _stop(self) -> Iterator[Event]:
        """End what the caller no longer wants."""
        for job in list(self._call.jobs.values()):
            if job.rows and self._call.unwanted(job):
                for row in list(job.rows):
                    if row.ticket.state != "ended":
                        yield from self._call.guarded(row, self._cancel, row)

    def _cancel(self, row: Row) -> Iterator[Event]:
        return self._found(row) if row.ticket in self._searches else self._call.end(row, "cancelled")

    def _enter(self) -> Iterator[Event]:
        """Let in whoever has a place and fits. Whoever is alone always fits, if need be without what is kept for others."""
        scheduler = self._call.scheduler
        yield from self._admitted()
        if scheduler.working or scheduler.next is None:
            return
        for job in self._call.jobs.values():
            job.drop_base()
        yield from self._admitted()
        left = scheduler.next
        if not scheduler.working and left is not None:
            error = MemoryFull(f"request {left.request} does not fit the session's KV although nothing else runs; ask for fewer tokens")
            yield from self._call.fail(self._call.jobs[left.request], error)

    def _admitted(self) -> Iterator[Event]:
        for ticket in self._call.scheduler.admit(self._place):
            row = self._call.row(ticket)
            job = self._call.job(row)
            if row.error is not None:
                yield from self._call.fail(job, row.error)
            elif ticket.state == "reading":
                yield self._read_so_far(row)
            elif job.base is not None:
                yield from self._call.guarded(row, self._begin, row, job.base.scores.clone())
            if not job.waiting:
                job.drop_base()

    def _place(self, ticket: Ticket) -> State | None:
        """As `_placed`; a row that cannot enter because of a fault has ended, see Row.error."""
        with Caught("making room for a request") as caught:
            return self._placed(ticket)
        self._call.row(ticket).error = caught.error
        return "ended"

    def _placed(self, ticket: Ticket) -> State | None:
        """Open the cache of a row: behind its siblings' prompt if that was read, else to read it, see `_may_read`."""
        row, kv = self._call.row(ticket), self._call.runner.kv
        job, prepared = self._call.job(row), row.prepared
        if job.base is not None:
            with suppress(MemoryFull):
                row.kv = job.base.kv.fork(row.capacity)
                return "writing"
            return None
        # More than a few rows are left to read, see first_piece.
        shared = kv.usable(self._session.prefix.match(prepared.keys[:-FEW_ROWS])) if prepared.prefix_reuse else []
        if not self._may_read(row, len(shared) * BLOCK):
            return None
        if not (kv.fits(row.capacity, shared) if prepared.beams is None else Search.fits(kv, prepared)):
            return None
        row.kv = kv.open(row.capacity, shared)
        row.kv.shift = prepared.pictures.positions.delta if prepared.pictures is not None else 0
        if prepared.beams is not None:
            self._searches[ticket] = Search(prepared, self._call.runner, row.kv)
        if not job.begun:
            job.cached = row.kv.length
        return "reading"

    def _may_read(self, row: Row, known: int) -> bool:
        """Whether a row may read its prompt from `known` on: nobody else reads, or one pass reads the rest of all prompts, each as it would
        be read alone. Where one of them reads a block that it begins with too, it waits for that."""
        call, ids = self._call, row.prepared.keys
        reading = self._reading()
        if not reading:
            return True
        if any(other.prepared.pictures is not None for other in (row, *reading)):
            return False
        left = [len(ids) - known, *(len(other.prepared.ids) - other.kv.length for other in reading if other.kv is not None)]
        more = known + BLOCK
        shares = row.prepared.prefix_reuse and more < len(ids) - FEW_ROWS
        return (
            call.runner.reads_several
            and min(left) > FEW_ROWS
            and sum(left) <= call.runner.chunk_rows
            and not any(call.job(other) is call.job(row) or (shares and other.prepared.keys[:more] == ids[:more]) for other in reading)
        )

    def _joined(self) -> bool:
        """Whether somebody came just now who can read in the same pass."""
        scheduler = self._call.scheduler
        if not self._call.runner.reads_several or not self._came():
            return False
        ticket = scheduler.next
        return ticket is not None and ticket.places <= scheduler.free and self._may_read(self._call.row(ticket), 0)

    def _reading(self) -> list[Row]:
        return [self._call.row(ticket) for ticket in self._call.scheduler.working if ticket.state == "reading"]

    def _read(self) -> Iterator[Event]:
        """Read on in what is being read: the prompts of several at once, or all of one, or one chunk of it where others write meanwhile."""
        rows, began = self._reading(), time.perf_counter()
        if not rows:
            return
        with self._meter.measure("prefill"):
            try:
                scores = self._pass(rows)
            except Stopped:
                return
        took = time.perf_counter() - began
        for row, behind in zip(rows, scores, strict=True):
            row.reading += took
            if row.kv is not None and row.kv.length == len(row.prepared.ids):
                self._settle(row)
                yield from self._call.guarded(row, self._has_read, row, row.kv, behind)

    def _pass(self, rows: Sequence[Row]) -> torch.Tensor:
        """The scores [rows, vocab] behind what was read of each. A pass over several is given up when nobody wants it: the others need not
        read anew for one who has gone. It is begun anew with those who come at its beginning."""
        call, kvs = self._call, [row.kv for row in rows if row.kv is not None]
        ids = [row.prepared.ids[kv.length :] for row, kv in zip(rows, kvs, strict=True)]

        layers = 0

        def unwanted() -> bool:
            nonlocal layers
            layers += 1
            return all(call.unwanted(call.job(row)) for row in rows) or (layers <= JOINABLE and self._joined())

        if len(rows) == 1:
            row, at = rows[0], kvs[0].length
            whole = len(call.scheduler.working) == 1
            report = partial(self._tell_one, row, at)
            return call.runner.prefill(kvs[0], ids[0], unwanted, report, whole=whole, pictures=row.prepared.pictures)[None]
        scores = call.runner.prefill_several(kvs, ids, unwanted)
        self._tell_read([(row, kv.length) for row, kv in zip(rows, kvs, strict=True)])
        return scores

    def _tell_one(self, row: Row, before: int, done: int) -> None:
        self._tell_read([(row, before + done)])

    def _tell_read(self, read: Sequence[tuple[Row, int]]) -> None:
        """One pass was made, and so much of each prompt is read now."""
        self._call.count_pass("prefill")
        if self._call.orders.progress is not None:
            for row, done in read:
                self._call.orders.progress(Progress("prefill", done, len(row.prepared.ids)))

    def _settle(self, row: Row) -> None:
        """The prompt of a row was read: wait until all weights are there, which is everybody's matter."""
        loading = not self._session.settled
        if loading:
            self._meter.add_reading(self._session.settle(), self._session.waited)
            job = self._call.job(row)
            job.load_seconds = time.perf_counter() - job.joined
        self._call.books.leaks.mark("load" if loading else "prefill")

    def _has_read(self, row: Row, kv: SequenceKV, scores: torch.Tensor) -> Iterator[Event]:
        job = self._call.job(row)
        job.begun = True
        self._call.scheduler.move(row.ticket, "writing")
        self._call.remember(row)
        yield self._read_so_far(row)
        if job.waiting:
            with suppress(MemoryFull):  # then each of them reads the prompt anew, from what is remembered of it
                job.base = Base(kv.fork(kv.length), scores.clone())
        yield from self._begin(row, scores)

    def _read_so_far(self, row: Row) -> Event:
        done = row.kv.length if row.kv is not None else 0
        return self._call.event(row, Event(progress=Progress("prefill", done, len(row.prepared.ids))))

    def _begin(self, row: Row, scores: torch.Tensor) -> Iterator[Event]:
        """The first token, from the scores behind the prompt; a row that was set back has it already."""
        if self._call.unwanted(self._call.job(row)):
            return
        if row.ticket in self._searches:
            self._searches[row.ticket].begin(scores)
        elif not row.feed:
            with self._meter.measure("sample"):
                picked = Picked(-1) if row.answer.coming is not None else pick(row.sampler, scores)
            yield from self._call.take(row, picked)

    def _search(self) -> Iterator[Event]:
        """One step of every search that has begun."""
        self._close_searches()
        for ticket, search in list(self._searches.items()):
            row = self._call.row(ticket)
            if ticket.state == "writing" and not self._call.unwanted(self._call.job(row)):
                yield from self._call.guarded(row, self._searched, row, search)

    def _searched(self, row: Row, search: Search) -> Iterator[Event]:
        """One step of a search."""
        if not search.done:
            with self._meter.measure("decode"):
                search.step()
            self._call.count_pass("decode")
        if row.first_token is None:
            row.first_token = time.perf_counter() - self._call.job(row).joined
        yield self._call.event(row, Event(progress=Progress("decode", search.length, row.prepared.limits.room)))
        if search.done:
            yield from self._found(row)

    def _found(self, row: Row) -> Iterator[Event]:
        """End a search, with the best that it found."""
        answers = self._searches[row.ticket].best(row.prepared.n)
        self._searches.pop(row.ticket).close()
        yield from self._call.end_search(row, answers)

    def _close_searches(self) -> None:
        """Return what the searches hold whose requests have ended."""
        for ticket in [ticket for ticket in self._searches if ticket.state == "ended"]:
            self._searches.pop(ticket).close()
