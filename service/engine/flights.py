"""Decode steps on their way: what is fed to each row, and which results still count when they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .request_state import Row
from .stepper import Feed, Picked, Stepper


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of a step under way. `replays`: the answer has the token already that follows. `wanted`: it makes a draw."""

    row: Row
    epoch: int
    replays: bool
    wanted: bool


class Flights:
    """Steps of one call under way on a stepper, at most one more than it can run ahead.

    A step launched ahead feeds each row what the device chose, before the host has seen it. Where the host decides otherwise (the answer
    has ended, another token is forced), `correct` makes what is under way for the row worth nothing.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._under_way: deque[list[_Entry]] = deque()

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._under_way)

    def can_join(self, row: Row) -> bool:
        """Whether the row can be in the next launch: its token is known, or is being chosen by the step just before."""
        if row.feed:
            return True
        return self._source(row) is not None and row.answer.coming is None and self._stepper.runs_ahead(row.sampler)

    def launch(self, rows: Sequence[Row]) -> None:
        """Begin a step of rows that can join and have room."""
        feeds, entries = [], []
        for row in rows:
            if row.kv is None:
                raise ValueError("a row without a cache cannot decode")
            token = row.feed.popleft() if row.feed else None
            source = -1 if token is not None else self._source(row)
            if source is None:
                raise ValueError("a row's token is neither known nor being chosen")
            replays = bool(row.feed)
            wanted = not replays and row.answer.coming is None
            feeds.append(Feed(row.kv, row.sampler, token, source, row.sampler.drawn + self._drawing(row), wanted))
            entries.append(_Entry(row, row.epoch, replays, wanted))
        self._stepper.launch(feeds)
        for row in rows:
            row.launched += 1
        self._under_way.append(entries)

    def collect(self) -> list[tuple[Row, Picked]]:
        """What the oldest step chose, for the rows that still wait for it."""
        entries, picked = self._under_way.popleft(), self._stepper.collect()
        found = []
        for entry, choice in zip(entries, picked, strict=True):
            if entry.epoch != entry.row.epoch:
                continue
            entry.row.launched -= 1
            if not entry.replays:
                found.append((entry.row, choice))
        return found

    def correct(self, row: Row, token: int) -> None:
        """The row goes on with `token`, whatever was fed to it since."""
        if row.kv is not None and row.launched:
            row.kv.truncate(row.kv.length - row.launched)
        row.epoch += 1
        row.launched = 0
        row.feed.append(token)

    def drain(self) -> None:
        """Wait for what is under way, for nobody."""
        while self._under_way:
            self._under_way.popleft()
            self._stepper.collect()

    def _drawing(self, row: Row) -> int:
        """Draws of the row that are under way."""
        return sum(e.row is row and e.epoch == row.epoch and e.wanted for entries in self._under_way for e in entries)

    def _source(self, row: Row) -> int | None:
        """The row's place in the last launch, None if it was not in it or what it chose there does not count."""
        last = self._under_way[-1] if self._under_way else []
        for place, entry in enumerate(last):
            if entry.row is row and entry.epoch == row.epoch and not entry.replays:
                return place
        return None
