"""Guessing the next tokens from what the text has said before, and deciding whether to check a guess is worth a wider pass.

A guess is what followed the last occurrence of the text's latest tokens (prompt lookup, Saxena 2023). It is checked in one pass, and each
position is then chosen from its true scores with the draw that it would have had anyway: what is written is the same, only sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# Lengths of the latest tokens that are looked up, the longest first.
LENGTHS: tuple[int, ...] = (4, 3, 2)
# The share of a run's decode time that wrong guesses may have cost at any moment; the promise is 3 %, the rest is the clock's error.
RISK = 0.02
# How fast a measured pass replaces what was known of passes of its size.
LEARNING = 0.2


class Lookup:
    """The tokens of one text, and where each run of them last occurred."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        end = len(self._ids)
        for length in LENGTHS:
            if end >= length:
                self._after[tuple(self._ids[end - length :])] = end
        self._ids.append(token)

    def guess(self, most: int) -> tuple[int, list[int]]:
        """How many latest tokens were found again (0: none), and up to `most` tokens that followed; what it guesses may be repeated."""
        ids = self._ids
        for length in LENGTHS:
            at = self._after.get(tuple(ids[-length:])) if len(ids) >= length else None
            if at is not None:
                guessed: list[int] = []
                for place in range(at, at + most):
                    guessed.append(ids[place] if place < len(ids) else guessed[place - len(ids)])
                return length, guessed
        return 0, []


@dataclass(slots=True)
class PassCosts:
    """Seconds of a step by its rows, as measured in this session."""

    measured: dict[int, float] = field(default_factory=dict)

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took `seconds`."""
        known = self.measured.get(rows)
        self.measured[rows] = seconds if known is None else known + LEARNING * (seconds - known)

    def at_most(self, rows: int) -> float:
        """What a step of so many rows takes at most: beyond what was measured, as much for each row. 0 when nothing was measured."""
        return self._between(rows, lambda known: self.measured[known] * rows / known)

    def likely(self, rows: int) -> float:
        """What a step of so many rows takes, if more rows than were measured cost nothing: that is found out where it may be tried."""
        return self._between(rows, lambda known: self.measured[known])

    def _between(self, rows: int, beyond: Callable[[int], float]) -> float:
        if rows in self.measured:
            return self.measured[rows]
        below = max((known for known in self.measured if known < rows), default=0)
        above = min((known for known in self.measured if known > rows), default=0)
        if not below or not above:
            return beyond(below) if below else self.measured.get(above, 0.0)
        share = (rows - below) / (above - below)
        return self.measured[below] + share * (self.measured[above] - self.measured[below])


class Speculator:
    """One text's guesses and what came of them. It guesses only where that pays by what was measured, within RISK of the time so far."""

    def __init__(self, prompt: Iterable[int], costs: PassCosts) -> None:
        self._lookup = Lookup(prompt)
        self._costs = costs
        # By length of what was found again: tokens checked, and those that were right; one of two before anything is known.
        self._tried = dict.fromkeys(LENGTHS, 2.0)
        self._right = dict.fromkeys(LENGTHS, 1.0)
        self._found = 0
        self._spent = 0.0  # seconds of steps so far
        self._saved = 0.0  # seconds that guesses have saved, less what wrong ones cost
        self.proposed = 0
        self.accepted = 0

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        self._lookup.push(token)

    def guess(self, most: int) -> list[int]:
        """Tokens that are worth checking now, at most `most`; empty for an ordinary step."""
        single = self._costs.at_most(1)
        if most < 1 or not single:
            return []
        self._found, tokens = self._lookup.guess(most)
        if not tokens:
            return []
        chance = self._right[self._found] / self._tried[self._found]
        best, best_gain, expected, power = 0, 0.0, 0.0, 1.0
        for count in range(1, len(tokens) + 1):
            power *= chance
            expected += power
            gain = expected * single - (self._costs.likely(count + 1) - single)
            risk = self._costs.at_most(count + 1) - single
            if gain > best_gain and risk <= self._saved + RISK * self._spent:
                best, best_gain = count, gain
        return tokens[:best]

    def note(self, guessed: int, right: int, seconds: float) -> None:
        """A step took `seconds`; it checked `guessed` tokens (0: none) of which the first `right` were what was chosen."""
        self._costs.note(guessed + 1, seconds)
        self._spent += seconds
        if not guessed:
            return
        self.proposed += guessed
        self.accepted += right
        self._saved += (right + 1) * self._costs.at_most(1) - seconds
        self._tried[self._found] += min(right + 1, guessed)
        self._right[self._found] += right
