"""Who reads, writes and waits: order, places, and that everybody gets to an end, whatever the answers turn out to be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.engine.scheduler import Scheduler, State, Ticket

PLACES = 8


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler beside a pot of blocks: tickets take some on entering, more while they write, and return all."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(PLACES)
        self.blocks = 20
        self.held: dict[Ticket, int] = {}
        self.need: dict[Ticket, int] = {}
        # Set back since somebody last ended.
        self.set_back: set[Ticket] = set()

    @rule(need=st.integers(1, 20), places=st.integers(1, PLACES))
    def add(self, need: int, places: int) -> None:
        ticket = Ticket(len(self.need), 0, places)
        self.need[ticket] = need
        self.scheduler.add(ticket)

    @rule()
    def admit(self) -> None:
        def enter(ticket: Ticket) -> State | None:
            if self.need[ticket] > self.blocks:
                return None
            self.blocks -= self.need[ticket]
            self.held[ticket] = self.need[ticket]
            return "reading"

        before = self.scheduler.next
        entered = list(self.scheduler.admit(enter))
        assert [t.number for t in entered] == sorted(t.number for t in entered)
        if entered:
            assert entered[0] is before, "somebody overtook"
        waiting = self.scheduler.next
        stuck = waiting is None or waiting.places > self.scheduler.free or self.need[waiting] > self.blocks
        assert stuck or (waiting in self.set_back and self.scheduler.working)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), state=st.sampled_from(["writing", "waiting", "ended"]))
    def move(self, number: int, state: State) -> None:
        ticket = list(self.held)[number % len(self.held)]
        if ticket.state == "writing" and state == "writing":
            with pytest.raises(ValueError, match="that is writing cannot become writing"):
                self.scheduler.move(ticket, state)
            return
        self.scheduler.move(ticket, state)
        if state != "writing":
            self.blocks += self.held.pop(ticket)
        if state == "waiting":
            self.set_back.add(ticket)
        if state == "ended":
            self.set_back.clear()

    @rule(number=st.integers(0, 99))
    def cancel_waiting(self, number: int) -> None:
        waiting = [ticket for ticket in self.scheduler.tickets if ticket.state == "waiting"]
        if waiting:
            self.scheduler.move(waiting[number % len(waiting)], "ended")
            self.set_back.clear()

    @invariant()
    def the_books_agree(self) -> None:
        working = self.scheduler.working
        assert set(working) == set(self.held)
        assert sum(ticket.places for ticket in working) + self.scheduler.free == PLACES
        assert self.scheduler.free >= 0
        assert self.blocks >= 0
        for ticket in working:
            youngest = self.scheduler.youngest(ticket)
            assert youngest is None or (youngest is working[-1] and youngest.number > ticket.number)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    needs=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=20),
    blocks=st.integers(24, 40),
    places=st.integers(1, PLACES),
)
def test_everybody_ends_even_those_that_outgrow_what_they_asked_for(needs: list[tuple[int, int]], blocks: int, places: int) -> None:
    """Each ticket asks for `first` blocks and turns out to need `more`; the youngest is set back for an older one that lacks room."""
    scheduler, free, held, steps = Scheduler(places), blocks, {}, 0
    tickets = {Ticket(i, 0): need for i, need in enumerate(needs)}
    for ticket in tickets:
        scheduler.add(ticket)

    def enter(ticket: Ticket) -> State | None:
        nonlocal free
        first = max(tickets[ticket][0], held.get(ticket, 0))
        if first > free:
            return None
        free -= first
        held[ticket] = first
        return "writing"

    oldest = []
    while scheduler.tickets:
        steps += 1
        assert steps < 2000
        list(scheduler.admit(enter))
        assert scheduler.working, "nobody works and somebody waits"
        oldest.append(scheduler.tickets[0].number)
        for ticket in list(scheduler.working):
            if ticket.state != "writing":
                continue
            if held[ticket] == sum(tickets[ticket]):
                free += held.pop(ticket)
                scheduler.move(ticket, "ended")
                continue
            while not free and ticket.state == "writing":
                victim = scheduler.youngest(ticket) or ticket
                free += held[victim]
                scheduler.move(victim, "waiting")
            if ticket.state == "writing":
                free -= 1
                held[ticket] += 1
    assert free == blocks
    assert oldest == sorted(oldest)


def test_a_set_back_ticket_enters_before_those_behind_it() -> None:
    scheduler = Scheduler(2)
    first, second, third = (Ticket(i, 0) for i in range(3))
    for ticket in (first, second, third):
        scheduler.add(ticket)
    assert list(scheduler.admit(lambda ticket: "writing")) == [first, second]
    scheduler.move(second, "waiting")
    assert scheduler.next is second
    assert list(scheduler.admit(lambda ticket: "writing")) == [], "nobody has ended, so it would be set back again"
    scheduler.move(first, "ended")
    assert list(scheduler.admit(lambda ticket: "writing")) == [second, third]


def test_what_cannot_be_is_our_own_mistake() -> None:
    scheduler = Scheduler(2)
    with pytest.raises(ValueError, match="3 places"):
        scheduler.add(Ticket(0, 0, 3))
    ticket, other = Ticket(0, 0, 2), Ticket(1, 0)
    scheduler.add(ticket)
    scheduler.add(other)
    scheduler.move(ticket, "writing")
    with pytest.raises(ValueError, match="1 places are taken of 0"):
        scheduler.move(other, "writing")
    scheduler.move(ticket, "ended")
    with pytest.raises(ValueError, match="ended cannot become writing"):
        scheduler.move(ticket, "writing")
