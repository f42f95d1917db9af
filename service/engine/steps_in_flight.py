"""Decode steps in flight: the token that each sequence is fed, and which results still count."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .request_state import RunningSequence
from .stepper import Feed, Picked, Stepper


@dataclass(frozen=True, slots=True)
class _FlightEntry:
    """A sequence of a step in flight. `replays`: its next token is known already. `wanted`: it makes a draw."""

    sequence: RunningSequence
    epoch: int
    replays: bool
    wanted: bool


class StepsInFlight:
    """Steps of a batch in flight on a stepper, at most one more than it can run ahead.

    A step launched ahead feeds each sequence the token that the device chose, before the host has seen it. Where the
    host decides otherwise (the completion has ended, another token is forced), `correct` discards the steps in flight
    of that sequence.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._in_flight: deque[list[_FlightEntry]] = deque()

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    def can_join(self, sequence: RunningSequence) -> bool:
        """Whether the sequence can be in the next launch: its token is known, or is being chosen by the step just
        before."""
        if sequence.feed:
            return True
        if self._source(sequence) is None or sequence.completion.forced_token is not None:
            return False
        return self._stepper.runs_ahead(sequence.sampler)

    def launch(self, sequences: Sequence[RunningSequence]) -> None:
        """Launch a step of sequences that can join and have a block for their token."""
        feeds, entries = [], []
        for sequence in sequences:
            if sequence.kv is None:
                raise ValueError("a sequence without a cache cannot decode")
            token = sequence.feed.popleft() if sequence.feed else None
            source = -1 if token is not None else self._source(sequence)
            if source is None:
                raise ValueError("a sequence's token is neither known nor being chosen")
            replays = bool(sequence.feed)
            wanted = not replays and sequence.completion.forced_token is None
            feeds.append(
                Feed(
                    sequence.kv,
                    sequence.sampler,
                    token,
                    source,
                    sequence.sampler.drawn + self._drawing(sequence),
                    wanted,
                )
            )
            entries.append(_FlightEntry(sequence, sequence.epoch, replays, wanted))
        self._stepper.launch(feeds)
        for sequence in sequences:
            sequence.launched += 1
        self._in_flight.append(entries)

    def collect(self) -> list[tuple[RunningSequence, Picked]]:
        """The choices of the oldest step, for the sequences where they still count."""
        entries, picked = self._in_flight.popleft(), self._stepper.collect()
        found = []
        for entry, choice in zip(entries, picked, strict=True):
            if entry.epoch != entry.sequence.epoch:
                continue
            entry.sequence.launched -= 1
            if not entry.replays:
                found.append((entry.sequence, choice))
        return found

    def correct(self, sequence: RunningSequence, token: int) -> None:
        """Continue the sequence with `token`; what was fed to it since is discarded."""
        if sequence.kv is not None and sequence.launched:
            sequence.kv.truncate(sequence.kv.length - sequence.launched)
        sequence.epoch += 1
        sequence.launched = 0
        sequence.feed.append(token)

    def drain(self) -> None:
        """Wait for the steps in flight and discard them."""
        while self._in_flight:
            self._in_flight.popleft()
            self._stepper.collect()

    def _drawing(self, sequence: RunningSequence) -> int:
        """Draws of the sequence in flight."""
        return sum(
            e.sequence is sequence and e.epoch == sequence.epoch and e.wanted
            for entries in self._in_flight
            for e in entries
        )

    def _source(self, sequence: RunningSequence) -> int | None:
        """The sequence's row in the last launch; None if it was not in it, or if its choice there does not count."""
        last = self._in_flight[-1] if self._in_flight else []
        for row, entry in enumerate(last):
            if entry.sequence is sequence and entry.epoch == sequence.epoch and not entry.replays:
                return row
        return None
