"""Decode: all rows that write in one step, steps ahead where the device can, and guesses checked where one writes alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ..cache.paged import SequenceKV
from ..core import Event, Stage
from ..errors import Caught, MemoryFull
from ..kernels.forward_batch import BLOCK
from .batch import Call
from .buffers import MAX_BATCH
from .speculate import Room, Speculator
from .stepper import Picked
from .work import Row

# Blocks that an answer gets which outgrows what it asked for; the first number that is there.
GROWTH = (4, 1)
# Tokens of a guess at most: with the token before them they are the rows of a small pass.
GUESSED = MAX_BATCH - 1


class Writing:
    """The decode steps of a call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stepper = call.session.stepper
        self._meter = call.books.meter

    def step(self, rows: Sequence[Row]) -> Iterator[Event]:
        """One token for each of `rows`, or several where one row is all there is and a guess was right."""
        call, began, captured = self._call, time.perf_counter(), self._stepper.captured
        alone = len(rows) == len(call.scheduler.tickets) == 1
        if alone:
            row, room, guess, drafting = rows[0], None, list[int](), 0.0
            with Caught("guessing the next tokens") as caught:
                room = self._room(row)
                if room is not None:
                    guess, drafting = self._guess(row, room)
            if caught.error is not None:
                yield from call.fail(call.job(row), caught.error)
                return
            if guess or (room is not None and room.behind):
                yield from call.guarded(row, self._check, row, guess, began, drafting, captured)
                return
        if not call.flights:
            rows = self._with_room(rows)
            self._launch(rows)
        while len(call.flights) <= self._stepper.ahead and self._can_run_ahead(rows):
            self._launch([row for row in rows if not row.ends_next])
        with self._meter.measure(self._stepper.stage):
            chosen = call.flights.collect()
        if alone and rows[0].speculator is not None and self._stepper.captured == captured:
            rows[0].speculator.note(0, 0, time.perf_counter() - began)
        for row, picked in chosen:
            if row.ticket.state != "ended":  # its request may just have failed with another row
                yield from call.guarded(row, call.take, row, picked)

    def _launch(self, rows: Sequence[Row]) -> None:
        with self._meter.measure("decode"):
            self._call.flights.launch(rows)
        self._call.count_pass("decode")

    def _can_run_ahead(self, rows: Sequence[Row]) -> bool:
        """Whether the step after the one under way can begin: with all rows that go on, unless a prompt waits to be read.

        Not while the host has to choose for one of the rows, be it the last time: the next step writes over the scores.
        """
        if not all(self._stepper.runs_ahead(row.sampler) for row in rows):
            return False
        going_on = [row for row in rows if not row.ends_next]
        if not going_on or any(ticket.state == "reading" for ticket in self._call.scheduler.working):
            return False
        return all(row.kv is not None and row.kv.length < row.kv.capacity and self._call.flights.can_join(row) for row in going_on)

    def _with_room(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that have room for a token: where one outgrows what it was given, the youngest are set back to wait."""
        for row in rows:
            while row.kv is not None and row.kv.length >= row.kv.capacity:
                if not _grown(row, row.kv):
                    self._make_room(row)
        return [row for row in rows if row.kv is not None]

    def _make_room(self, row: Row) -> None:
        """Take back what is kept for choices that wait, else set back the youngest row; perhaps the one that wants the room."""
        kept = next((job for job in self._call.jobs.values() if job.base is not None), None)
        if kept is not None:
            kept.drop_base()
            return
        ticket = self._call.scheduler.youngest(row.ticket)
        victim = row if ticket is None or ticket.places > 1 else self._call.row(ticket)
        self._call.scheduler.move(victim.ticket, "waiting")
        victim.set_back()

    def _room(self, row: Row) -> Room | None:
        """What a guess behind the row's latest token may take; None where none is made and the row goes one token further."""
        kv, behind = row.kv, len(row.feed) - 1
        if not self._stepper.checks or not row.prepared.speculation or kv is None or self._call.flights or not 0 <= behind < GUESSED:
            return None
        left = kv.verifiable - len(row.feed)
        if left < 0:
            return None
        drafting = self._call.runner.drafting
        unread = drafting.unread(kv, kv.length + behind) if drafting is not None else 0
        return Room(min(GUESSED - behind, left) if row.answer.coming is None else 0, behind, unread)

    def _guess(self, row: Row, room: Room) -> tuple[list[int], float]:
        """Tokens to check behind the row's latest one, if that pays, and the seconds that it took to draft them."""
        drafting, kv = self._call.runner.drafting, row.kv
        if row.speculator is None:
            row.speculator = Speculator((*row.prepared.ids, *row.answer.ids), self._call.session.costs, row.reading)
        plan = row.speculator.plan(room)
        if not plan.drafts or drafting is None or kv is None:
            return list(plan.tokens), 0.0
        began, captured = time.perf_counter(), self._stepper.captured
        with self._meter.measure("draft"):
            guess = drafting.guess(kv, kv.length + room.behind, row.feed[-1], plan.drafts)
        seconds = time.perf_counter() - began
        self._meter.add_bytes("draft", plan.drafts * self._call.books.guess_bytes)
        if self._stepper.captured == captured:
            self._call.session.costs.note_draft(plan.drafts, room.unread, seconds)
        return guess, seconds

    def _check(self, row: Row, guess: list[int], began: float, drafting: float, captured: int) -> Iterator[Event]:
        """Read the latest tokens and a guess in one pass, and choose at each place as if it had been read alone, until one differs.

        `captured`: of the stepper when the step `began`, with a guess that may have been drafted by a pass of a new kind.
        """
        kv, speculator, meter = row.kv, row.speculator, self._meter
        if kv is None or speculator is None:
            raise ValueError("a row without a cache or a speculator has no guess")
        fed, right = list(row.feed), 0
        row.feed.clear()
        with meter.measure("decode"):
            checked = self._stepper.check(kv, row.sampler, [*fed, *guess], len(fed))
        self._call.count_pass("decode")
        stages = ("speculation", "draft") if drafting else ("speculation",) if guess else ()
        self._tell(stages, Stage(proposed=len(guess)))
        events: list[Event] = []
        for place, expected in enumerate([*guess, None]):
            with meter.measure("sample"):
                picked = Picked(-1) if row.answer.coming is not None else checked.pick(place)
            token = picked.token if row.answer.coming is None else row.answer.coming
            if token == expected:
                right += 1
                self._tell(stages, Stage(accepted=1))
            for _ in (token,) if place else fed:
                kv.advance(1)
                kv.keep_checkpoint(written=True)
            events += self._call.take(row, picked)
            if token != expected or row.answer.finish is not None:
                break
            row.feed.clear()
        if not kv.cuts_anywhere:
            kv.truncate(kv.length)  # the states behind what was not chosen
        seconds = time.perf_counter() - began if self._stepper.captured == captured else None
        speculator.note(len(guess), right, seconds, rows=len(fed) + len(guess), drafting=drafting)
        yield from events

    def _tell(self, stages: Sequence[str], cost: Stage) -> None:
        for stage in stages:
            self._meter.add(stage, cost)


def _grown(row: Row, kv: SequenceKV) -> bool:
    """Whether the row could be given room for more tokens."""
    for blocks in GROWTH:
        with suppress(MemoryFull):
            kv.widen(min(row.most, kv.capacity + blocks * BLOCK))
            return True
    return False
