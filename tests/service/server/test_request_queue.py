"""The line that requests wait in: fair, whoever comes and goes, from whichever thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from onedesk.service.server.request_queue import Line


class Person:
    """Compared by identity, as calls are."""


class AnyLine(RuleBasedStateMachine):
    """Against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[Person] = []
        self.line: Line[Person] = Line(self.moved.extend)
        self.model: list[Person] = []
        self.gone: list[Person] = []
        self.held = False

    @rule()
    def join(self) -> None:
        self.model.append(Person())
        self.line.join(self.model[-1])

    @rule(fits=st.booleans())
    def take(self, fits: bool) -> None:
        self.moved.clear()
        taken = self.line.take(lambda who: fits)
        if self.held or not fits or not self.model:
            assert taken is None
            assert self.moved == []
        else:
            assert taken is self.model.pop(0)
            self.gone.append(taken)
            assert self.moved == self.model

    @rule(index=st.integers(0, 5))
    def leave(self, index: int) -> None:
        self.moved.clear()
        if index < len(self.model):
            who = self.model.pop(index)
            assert self.line.leave(who)
            assert self.moved == self.model[index:]
            self.gone.append(who)
        assert not any(self.line.leave(who) for who in self.gone)

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.held = held
        (self.line.hold if held else self.line.go_on)()

    @rule()
    def clear(self) -> None:
        assert self.line.clear() == self.model
        self.gone += self.model
        self.model = []

    @invariant()
    def positions_count_from_one(self) -> None:
        assert len(self.line) == len(self.model)
        assert [self.line.position(who) for who in self.model] == [*range(1, len(self.model) + 1)]
        assert all(self.line.position(who) is None for who in self.gone)
        assert self.line.held == self.held


TestAnyLine = AnyLine.TestCase
TestAnyLine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_everybody_is_taken_once_whatever_the_threads_do() -> None:
    def ignore(behind: Sequence[int]) -> None:
        assert list(behind) == sorted(behind)

    line: Line[int] = Line(ignore)
    taken: list[int] = []

    def take() -> None:
        while len(taken) < 400:
            found = line.take(lambda _: True)
            if found is not None:
                taken.append(found)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    left = 0
    for number in range(500):
        line.join(number)
        if number % 5 == 4 and line.leave(number):
            left += 1
        if number >= 400:
            break
    for thread in threads:
        for _ in range(1000):
            line.join(10_000)  # so that no thread waits for more than there are
            if not thread.is_alive():
                break
        thread.join(30)
    numbers = [number for number in taken if number < 10_000]
    assert len(numbers) == len(set(numbers))
