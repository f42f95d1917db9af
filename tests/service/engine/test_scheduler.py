"""Which tickets prefill, decode and wait: order, slots, and that every ticket ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.engine.scheduler import Scheduler, State, Ticket

SLOTS = 8


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler and a stock of blocks: tickets take some when they are admitted, more while they decode, and
    return all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SLOTS)
        self.blocks = 20
        self.held: dict[Ticket, int] = {}
        self.need: dict[Ticket, int] = {}
        # Preempted since a ticket last ended.
        self.preempted: set[Ticket] = set()

    @rule(need=st.integers(1, 20), slots=st.integers(1, SLOTS))
    def add(self, need: int, slots: int) -> None:
        ticket = Ticket(len(self.need), 0, slots)
        self.need[ticket] = need
        self.scheduler.add(ticket)

    @rule()
    def admit(self) -> None:
        def enter(ticket: Ticket) -> State | None:
            if self.need[ticket] > self.blocks:
                return None
            self.blocks -= self.need[ticket]
            self.held[ticket] = self.need[ticket]
            return "prefilling"

        before = self.scheduler.next
        entered = list(self.scheduler.admit(enter))
        assert [t.number for t in entered] == sorted(t.number for t in entered)
        if entered:
            assert entered[0] is before, "a newer ticket was admitted first"
        waiting = self.scheduler.next
        stuck = waiting is None or waiting.slots > self.scheduler.free or self.need[waiting] > self.blocks
        assert stuck or (waiting in self.preempted and self.scheduler.working)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), state=st.sampled_from(["decoding", "waiting", "ended"]))
    def move(self, number: int, state: State) -> None:
        ticket = list(self.held)[number % len(self.held)]
        if ticket.state == "decoding" and state == "decoding":
            with pytest.raises(ValueError, match="that is decoding cannot become decoding"):
                self.scheduler.move(ticket, state)
            return
        self.scheduler.move(ticket, state)
        if state != "decoding":
            self.blocks += self.held.pop(ticket)
        if state == "waiting":
            self.preempted.add(ticket)
        if state == "ended":
            self.preempted.clear()

    @rule(number=st.integers(0, 99))
    def cancel_waiting(self, number: int) -> None:
        waiting = [ticket for ticket in self.scheduler.tickets if ticket.state == "waiting"]
        if waiting:
            self.scheduler.move(waiting[number % len(waiting)], "ended")
            self.preempted.clear()

    @invariant()
    def the_figures_agree(self) -> None:
        working = self.scheduler.working
        assert set(working) == set(self.held)
        assert sum(ticket.slots for ticket in working) + self.scheduler.free == SLOTS
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
    slots=st.integers(1, SLOTS),
)
def test_every_ticket_ends(needs: list[tuple[int, int]], blocks: int, slots: int) -> None:
    """A ticket asks for `first` blocks and turns out to need `more`; the newest is preempted for an older one that
    lacks blocks.
    """
    scheduler, free, held, steps = Scheduler(slots), blocks, {}, 0
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
        return "decoding"

    oldest = []
    while scheduler.tickets:
        steps += 1
        assert steps < 2000
        list(scheduler.admit(enter))
        assert scheduler.working, "tickets wait and none runs"
        oldest.append(scheduler.tickets[0].number)
        for ticket in list(scheduler.working):
            if ticket.state != "decoding":
                continue
            if held[ticket] == sum(tickets[ticket]):
                free += held.pop(ticket)
                scheduler.move(ticket, "ended")
                continue
            while not free and ticket.state == "decoding":
                victim = scheduler.youngest(ticket) or ticket
                free += held[victim]
                scheduler.move(victim, "waiting")
            if ticket.state == "decoding":
                free -= 1
                held[ticket] += 1
    assert free == blocks
    assert oldest == sorted(oldest)


def test_a_preempted_ticket_is_admitted_first() -> None:
    scheduler = Scheduler(2)
    first, second, third = (Ticket(i, 0) for i in range(3))
    for ticket in (first, second, third):
        scheduler.add(ticket)
    assert list(scheduler.admit(lambda ticket: "decoding")) == [first, second]
    scheduler.move(second, "waiting")
    assert scheduler.next is second
    assert list(scheduler.admit(lambda ticket: "decoding")) == [], "none has ended, so it would be preempted again"
    scheduler.move(first, "ended")
    assert list(scheduler.admit(lambda ticket: "decoding")) == [second, third]


def test_changes_that_are_not_allowed() -> None:
    scheduler = Scheduler(2)
    with pytest.raises(ValueError, match="3 slots"):
        scheduler.add(Ticket(0, 0, 3))
    ticket, other = Ticket(0, 0, 2), Ticket(1, 0)
    scheduler.add(ticket)
    scheduler.add(other)
    scheduler.move(ticket, "decoding")
    with pytest.raises(ValueError, match="1 slots are needed and 0 are free"):
        scheduler.move(other, "decoding")
    scheduler.move(ticket, "ended")
    with pytest.raises(ValueError, match="ended cannot become decoding"):
        scheduler.move(ticket, "decoding")
