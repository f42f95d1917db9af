"""Stop strings in a stream, by an Aho-Corasick automaton (Aho and Corasick, 1975): constant time a character for any number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import RequestError

TOTAL_LIMIT = 200_000  # characters of all stop strings together; measured: 240 bytes of memory for each


def check_stops(stops: Sequence[str]) -> None:
    """Raise RequestError for an empty stop string or for more text than TOTAL_LIMIT in all."""
    if any(not stop for stop in stops):
        raise RequestError("a stop string is empty; leave it out or write at least one character")
    total = sum(map(len, stops))
    if total > TOTAL_LIMIT:
        raise RequestError(f"the stop strings have {total:,} characters; use at most {TOTAL_LIMIT:,} in all")


class StopMatcher:
    """Lets text through until a stop string is complete, however the text was cut into pieces.

    The stop string that is complete first wins; of those complete with the same character, the longest. The text before it comes
    out, it and everything after does not. Only what could still become a stop string is held back. Characters are compared as they
    are (no case folding, no normalisation). Raises RequestError as check_stops does.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._next: list[dict[str, int]] = [{}]  # of each node: character -> node
        self._depth = [0]  # length of the text a node stands for
        self._found = [0]  # length of the longest stop string that ends at a node
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)  # the node of the longest proper suffix
        self._link()
        self._node = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of the held text and `text` is certain to stand before any stop string; "" after one was found."""
        if self.stopped:
            return ""
        if not self._next[0]:
            return text
        whole = self._held + text
        node = self._node
        for index in range(len(self._held), len(whole)):
            node = self._step(node, whole[index])
            if self._found[node]:
                self.stopped = True
                self._held = ""
                return whole[: index + 1 - self._found[node]]
        cut = len(whole) - self._depth[node]
        self._node, self._held = node, whole[cut:]
        return whole[:cut]

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, 1):
            follower = self._next[node].get(character)
            if follower is None:
                follower = len(self._next)
                self._next[node][character] = follower
                self._next.append({})
                self._depth.append(depth)
                self._found.append(0)
            node = follower
        self._found[node] = len(stop)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, follower in self._next[node].items():
                self._fail[follower] = self._step(self._fail[node], character)
                self._found[follower] = self._found[follower] or self._found[self._fail[follower]]
                waiting.append(follower)

    def _step(self, node: int, character: str) -> int:
        while True:
            follower = self._next[node].get(character)
            if follower is not None:
                return follower
            if node == 0:
                return 0
            node = self._fail[node]
