"""Detects that a model repeats itself in a loop."""

from __future__ import annotations

from collections import deque

WINDOW = 256  # tokens
LONGEST_CYCLE = 64  # tokens


class RepetitionCheck:
    """Detects when the last WINDOW tokens are one repeated cycle of at most LONGEST_CYCLE tokens."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=LONGEST_CYCLE)
        self._runs: dict[int, int] = {}  # cycle length -> consecutive tokens that equal the one that far before

    def push(self, token: int) -> bool:
        """Append a token; True when it completes such a window. Costs one scan of the last LONGEST_CYCLE tokens."""
        runs = self._runs
        if token in self._recent:
            alike = (distance for distance, earlier in enumerate(reversed(self._recent), 1) if earlier == token)
            self._runs = {distance: runs.get(distance, 0) + 1 for distance in alike}
        elif runs:
            self._runs = {}
        self._recent.append(token)
        return any(run >= WINDOW - distance for distance, run in self._runs.items())
