"""Which choices prefill, decode or wait: pure Python, no tensors.

One choice of a request is one ticket. Tickets are admitted in the order in which they arrived, none before an older
one: a ticket needs a free slot and KV blocks. One that exceeds its reservation may preempt the newest ticket, never an
older one, so the oldest always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "prefilling", "decoding", "ended"]

# The states that may follow each. Back to waiting: preempted by an older ticket, with the tokens so far.
_FOLLOWS: dict[State, frozenset[State]] = {
    "waiting": frozenset({"prefilling", "decoding", "ended"}),
    "prefilling": frozenset({"decoding", "waiting", "ended"}),
    "decoding": frozenset({"waiting", "ended"}),
    "ended": frozenset(),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """One choice of one request. `slots`: rows of a decode step that it takes; a beam search takes several."""

    request: int
    choice: int
    slots: int = 1
    state: State = "waiting"
    number: int = field(default=-1, init=False)
    # How many tickets had ended when it was preempted; the blocks that it lacked are not free before another one ends.
    preempted_at: int = field(default=-1, init=False)


class Scheduler:
    """The tickets of a session, of which at most `slots` rows run at once. Only `move` changes a ticket's state."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._tickets: list[Ticket] = []
        self._numbered = 0
        self._ended = 0

    def add(self, ticket: Ticket) -> None:
        """Queue a new ticket after all others. Raises ValueError for one that takes more slots than there are."""
        if not 1 <= ticket.slots <= self.slots or ticket.state != "waiting":
            raise ValueError(
                f"a ticket of {ticket.slots} slots that is {ticket.state} cannot wait for {self.slots} slots"
            )
        ticket.number = self._numbered
        self._numbered += 1
        self._tickets.append(ticket)

    def move(self, ticket: Ticket, state: State) -> None:
        """Change a ticket's state. Raises ValueError for a change that is not allowed, and without a free slot."""
        if state not in _FOLLOWS[ticket.state]:
            raise ValueError(f"a ticket that is {ticket.state} cannot become {state}")
        if ticket.state == "waiting" and state != "ended" and ticket.slots > self.free:
            raise ValueError(f"{ticket.slots} slots are needed and {self.free} are free")
        ticket.state = state
        if state == "waiting":
            ticket.preempted_at = self._ended
        elif state == "ended":
            self._tickets.remove(ticket)
            self._ended += 1

    def admit(self, enter: Callable[[Ticket], State | None]) -> Iterator[Ticket]:
        """Admit tickets, the oldest first, while slots are free; each is yielded once it is admitted.

        `enter` reserves a ticket's blocks and returns its next state, or None when it does not fit: then the later ones
        wait too. A preempted ticket is admitted again when another one has ended, or when none runs.
        """
        while (ticket := self.next) is not None and ticket.slots <= self.free:
            if ticket.preempted_at == self._ended and self.working:
                return
            state = enter(ticket)
            if state is None:
                return
            self.move(ticket, state)
            yield ticket

    def youngest(self, besides: Ticket) -> Ticket | None:
        """The newest running ticket, if it arrived after `besides`."""
        younger = [ticket for ticket in self.working if ticket.number > besides.number]
        return younger[-1] if younger else None

    @property
    def next(self) -> Ticket | None:
        """The first waiting ticket."""
        return next((ticket for ticket in self._tickets if ticket.state == "waiting"), None)

    @property
    def free(self) -> int:
        """Free slots."""
        return self.slots - sum(ticket.slots for ticket in self.working)

    @property
    def working(self) -> list[Ticket]:
        """Tickets that prefill or decode, the oldest first."""
        return [ticket for ticket in self._tickets if ticket.state in ("prefilling", "decoding")]

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets that have not ended, the oldest first."""
        return list(self._tickets)
