"""Guessing the next tokens, and deciding whether to check a guess is worth a wider pass.

A guess is what followed the last occurrence of the text's latest tokens (prompt lookup, Saxena 2023), or what a layer for multi-token
prediction drafts (see drafting.py). It is checked in one pass, and each position is then chosen from its true scores with the draw that it
would have had anyway: what is written is the same, only sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# Lengths of the latest tokens that are looked up, the longest first.
LENGTHS: tuple[int, ...] = (4, 3, 2)
# The share of a run's time, its prompt included, that wrong guesses may have cost at any moment. The promise is 3 %: with 0.02 the steps
# alone took up to 1.07 times as long behind a prompt that took half as long as they (quiet, medians of 7), with 0.01 up to 1.03.
RISK = 0.01
# How fast a measured pass replaces what was known of passes of its size.
LEARNING = 0.2
# Rows that the drafting layer reads in the time that it takes for one token: of those the head sees only the last. BF16 6.6, INT4 5.8.
READ_AT_ONCE = 6
# What a pass of more rows than any that was measured may take, beside as much for each row: they took up to 1.1 (see lab/notebook.md).
BEYOND = 1.25
# What a width costs beside a step is believed as if so many passes of it had cost nothing more: one that a busy moment made slow is tried
# again, where it may be.
HOPE = 2
# Rows that the drafting layer has to read where it guesses step by step; what a pause has left unread is read once.
USUAL_UNREAD = 2


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
    """Seconds of a step by its rows, of how many passes, and of a drafted token, as measured in this session.

    `guess_share`: of the bytes that a pass of one row reads, what one drafted token takes; 0 where nothing drafts.
    """

    measured: dict[int, float] = field(default_factory=dict)
    guess_share: float = 0.0
    drafted: float = 0.0
    tries: dict[int, int] = field(default_factory=dict)

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took `seconds`."""
        known = self.measured.get(rows)
        self.measured[rows] = seconds if known is None else known + LEARNING * (seconds - known)
        self.tries[rows] = self.tries.get(rows, 0) + 1

    def note_draft(self, tokens: int, unread: int, seconds: float) -> None:
        """To draft so many tokens took `seconds`; the layer had `unread` rows to read first."""
        each = seconds / (tokens + (unread - 1) / READ_AT_ONCE)
        self.drafted = each if not self.drafted else self.drafted + LEARNING * (each - self.drafted)

    @property
    def a_draft(self) -> float:
        """What a drafted token is going to take; until it was measured, by the bytes that it reads."""
        return self.drafted or self.guess_share * self.at_most(1)

    def at_most(self, rows: int) -> float:
        """What a step of so many rows takes at most: beyond what was measured BEYOND times as much for each; 0 if nothing was."""
        return self._between(rows, self.measured.__getitem__, lambda known: self.measured[known] * BEYOND * rows / known)

    def likely(self, rows: int) -> float:
        """What a step of so many rows takes, if more rows than were measured cost nothing: that is found out where it may be tried."""
        return self._between(rows, self._hoped, self._hoped)

    def _hoped(self, rows: int) -> float:
        seconds, single = self.measured[rows], self.measured.get(1)
        tries = self.tries.get(rows)
        return seconds if single is None or tries is None else single + (seconds - single) * tries / (tries + HOPE)

    def _between(self, rows: int, known: Callable[[int], float], beyond: Callable[[int], float]) -> float:
        if rows in self.measured:
            return known(rows)
        below = max((other for other in self.measured if other < rows), default=0)
        above = min((other for other in self.measured if other > rows), default=0)
        if not below or not above:
            return beyond(below) if below else known(above) if above else 0.0
        share = (rows - below) / (above - below)
        return known(below) + share * (known(above) - known(below))


@dataclass(slots=True)
class Record:
    """Tokens of guesses of one kind that were checked, and those that were right; begun with what is believed before anything is known."""

    tried: float
    right: float

    @property
    def chance(self) -> float:
        """How likely the next one is right, if those before it were."""
        return self.right / self.tried


@dataclass(frozen=True, slots=True)
class Room:
    """What a step may read: `behind` tokens of the text before its latest one, and `most` guessed ones.

    `unread`: rows that the drafting layer would read first, 0 where it cannot guess.
    """

    most: int
    behind: int = 0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to check: tokens that were looked up, or so many that are to be drafted. Neither: an ordinary step."""

    tokens: tuple[int, ...] = ()
    drafts: int = 0


class Speculator:
    """One text's guesses and what came of them. It guesses only where that pays by what was measured, within RISK of the time so far.

    `spent`: seconds that the text has taken before the first step.
    """

    def __init__(self, prompt: Iterable[int], costs: PassCosts, spent: float = 0.0) -> None:
        self._lookup = Lookup(prompt)
        self._costs = costs
        # By length of what was found again: before anything is known one of two is right. Of drafts four of five: published are 0.7 to 0.9.
        self._looked_up = {length: Record(2.0, 1.0) for length in LENGTHS}
        self._drafted = Record(5.0, 4.0)
        self._record = self._drafted
        self._spent = spent
        self._saved = 0.0  # seconds that guesses have saved, less what wrong ones cost
        self.proposed = 0
        self.accepted = 0

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        self._lookup.push(token)

    def plan(self, room: Room) -> Plan:
        """What is worth checking now."""
        if room.most < 1 or not self._costs.at_most(1):
            return Plan()
        found, tokens = self._lookup.guess(room.most)
        looked_up, gain = self._best(self._looked_up[found], len(tokens), room, None) if found else (0, 0.0)
        unread = room.unread if self._costs.guess_share else 0
        drafts, drafted_gain = self._best(self._drafted, room.most, room, unread) if unread else (0, 0.0)
        if drafted_gain > gain:
            self._record = self._drafted
            return Plan(drafts=drafts)
        if looked_up:
            self._record = self._looked_up[found]
        return Plan(tokens=tuple(tokens[:looked_up]))

    def _best(self, record: Record, most: int, room: Room, unread: int | None) -> tuple[int, float]:
        """How many tokens of a kind of guess are the best to check, and the seconds that they save then; `unread` of drafts only."""
        costs, allowed = self._costs, self._saved + RISK * self._spent
        single, now, chance = costs.at_most(1), room.behind + 1, record.chance
        base = costs.likely(now)
        token = costs.a_draft if unread else 0.0
        first, usual = ((rows - 1) / READ_AT_ONCE for rows in (unread or 1, min(unread or 1, USUAL_UNREAD)))
        best, best_gain, expected, power = 0, 0.0, 0.0, 1.0
        for count in range(1, most + 1):
            power *= chance
            expected += power
            worth = expected * single - token * (count + usual)
            if worth <= best_gain:
                continue  # it would not be if rows cost nothing: most steps of a text that guesses do not suit end here
            gain = worth - (costs.likely(now + count) - base)
            risk = costs.at_most(now + count) - single + token * (count + first)
            if gain > best_gain and risk <= allowed:
                best, best_gain = count, gain
        return best, best_gain

    def note(self, guessed: int, right: int, seconds: float | None, *, rows: int = 0, drafting: float = 0.0) -> None:
        """A step took `seconds`, `drafting` of them to draft; it read `rows` (0: one more than guessed). None: longer than others will.

        It checked `guessed` tokens (0: none) of which the first `right` were what was chosen.
        """
        if seconds is not None:
            self._costs.note(rows or guessed + 1, seconds - drafting)
            self._spent += seconds
            if guessed or rows > 1:
                self._saved += (right + 1) * self._costs.at_most(1) - seconds
        if not guessed:
            return
        self.proposed += guessed
        self.accepted += right
        self._record.tried += min(right + 1, guessed)
        self._record.right += right
