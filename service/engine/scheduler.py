"""Who reads, who writes and who waits: pure Python, no tensors.

A choice of a request is one ticket. Tickets enter in the order in which they came and none overtakes another: one enters when a place is
free and its keys and values fit. One that outgrows what it was given may set the youngest back, never an older one, so the oldest always
gets to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "reading", "writing", "ended"]

# What may follow what. Back to waiting: set back by an older one, with what it wrote so far.
_FOLLOWS: dict[State, frozenset[State]] = {
    "waiting": frozenset({"reading", "writing", "ended"}),
    "reading": frozenset({"writing", "waiting", "ended"}),
    "writing": frozenset({"waiting", "ended"}),
    "ended": frozenset(),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """One choice of one request on its way. `places` are the rows of a decode step that it takes (a beam search takes several)."""

    request: int
    choice: int
    places: int = 1
    state: State = "waiting"
    number: int = field(default=-1, init=False)
    # How many tickets had ended when it was set back; what it lacked then is not there before another one ends.
    set_back: int = field(default=-1, init=False)


class Scheduler:
    """The tickets of a session, at most `places` rows of them at work. `move` is the one function that changes a ticket's state."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._tickets: list[Ticket] = []
        self._numbered = 0
        self._ended = 0

    def add(self, ticket: Ticket) -> None:
        """Let a new ticket wait behind all others. ValueError for one that takes more places than there are."""
        if not 1 <= ticket.places <= self.places or ticket.state != "waiting":
            raise ValueError(f"a ticket of {ticket.places} places that is {ticket.state} cannot wait for one of {self.places}")
        ticket.number = self._numbered
        self._numbered += 1
        self._tickets.append(ticket)

    def move(self, ticket: Ticket, state: State) -> None:
        """Change a ticket's state. ValueError for a step that cannot be, or without a free place."""
        if state not in _FOLLOWS[ticket.state]:
            raise ValueError(f"a ticket that is {ticket.state} cannot become {state}")
        if ticket.state == "waiting" and state != "ended" and ticket.places > self.free:
            raise ValueError(f"{ticket.places} places are taken of {self.free} that are free")
        ticket.state = state
        if state == "waiting":
            ticket.set_back = self._ended
        elif state == "ended":
            self._tickets.remove(ticket)
            self._ended += 1

    def admit(self, enter: Callable[[Ticket], State | None]) -> Iterator[Ticket]:
        """Let tickets in, the oldest first, as long as places are free; `enter` takes what one needs and says what it does then, or None
        when it does not fit: then those behind it wait too. A ticket is yielded when it is in. One that was set back enters again when
        another one has ended, or nobody works.
        """
        while (ticket := self.next) is not None and ticket.places <= self.free:
            if ticket.set_back == self._ended and self.working:
                return
            state = enter(ticket)
            if state is None:
                return
            self.move(ticket, state)
            yield ticket

    def youngest(self, besides: Ticket) -> Ticket | None:
        """The last ticket at work that came after `besides`."""
        younger = [ticket for ticket in self.working if ticket.number > besides.number]
        return younger[-1] if younger else None

    @property
    def next(self) -> Ticket | None:
        """The one that waits in front."""
        return next((ticket for ticket in self._tickets if ticket.state == "waiting"), None)

    @property
    def free(self) -> int:
        """Places that nobody takes."""
        return self.places - sum(ticket.places for ticket in self.working)

    @property
    def working(self) -> list[Ticket]:
        """Who reads or writes, the oldest first."""
        return [ticket for ticket in self._tickets if ticket.state in ("reading", "writing")]

    @property
    def tickets(self) -> list[Ticket]:
        """All that have not ended, the oldest first."""
        return list(self._tickets)
