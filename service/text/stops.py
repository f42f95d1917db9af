"""Stop strings in a stream, by an Aho-Corasick automaton (Aho and Corasick, 1975): constant time per character."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..core import CancelCheck
from ..errors import Cancelled, RequestError

TOTAL_LIMIT = (
    200_000  # characters of all stop strings together; measured: 30 bytes of memory per character, 0.3 s in total
)
_CHECK_EVERY = 4096  # characters between two cancel checks


def check_stops(stops: Sequence[str]) -> None:
    """Raise RequestError for an empty stop string, or for more than TOTAL_LIMIT characters in total."""
    if any(not stop for stop in stops):
        raise RequestError("a stop string is empty; leave it out or write at least one character")
    total = sum(map(len, stops))
    if total > TOTAL_LIMIT:
        raise RequestError(f"the stop strings have {total:,} characters; use at most {TOTAL_LIMIT:,} in total")


class StopStrings:
    """The automaton of a request's stop strings: built once, read by the matchers of all its choices.

    A node is a prefix of a stop string. Most nodes have one follower, kept in flat arrays; further ones are in a dict.
    Raises RequestError as check_stops does, and Cancelled when `cancel` turns true.
    """

    def __init__(self, stops: Sequence[str] = (), cancel: CancelCheck | None = None) -> None:
        check_stops(stops)
        self._character = array("I", [0])  # of each node: the character of its first follower, 0 with node 0 for none
        self._follower = array("I", [0])
        self._more: dict[tuple[int, int], int] = {}  # (node, character) -> follower, besides the first
        self._depth = array("I", [0])  # length of the prefix that a node is
        self._found = array("I", [0])  # length of the longest stop string that ends at a node
        self._added = 0
        self._cancel = cancel
        levels: list[array[int]] = []
        for stop in stops:
            self._add(stop, levels)
        self._fail = array("I", bytes(4 * len(self._depth)))  # the node of the longest proper suffix
        for level in levels:
            self._link(level)
        self._cancel = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return len(self._depth) > 1

    def step(self, node: int, character: str) -> int:
        """The node after `node` (0: the start) and `character`."""
        return self._step(node, ord(character))

    def depth(self, node: int) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._depth[node]

    def found(self, node: int) -> int:
        """Length of the longest stop string that ends here, 0 for none."""
        return self._found[node]

    def _check_cancel(self) -> None:
        self._added += 1
        if self._added % _CHECK_EVERY == 0 and self._cancel is not None and self._cancel():
            raise Cancelled("stopped while the stop strings were prepared")

    def _next(self, node: int, code: int) -> int:
        """The follower of a node by a character, 0 for none."""
        if self._character[node] == code and self._follower[node]:
            return self._follower[node]
        return self._more.get((node, code), 0)

    def _add(self, stop: str, levels: list[array[int]]) -> None:
        """Add the nodes of a stop string; `levels` are (parent, character, node) by depth."""
        node = 0
        for depth, code in enumerate(map(ord, stop), 1):
            follower = self._next(node, code)
            if not follower:
                self._check_cancel()
                follower = len(self._depth)
                if self._follower[node]:
                    self._more[node, code] = follower
                else:
                    self._character[node], self._follower[node] = code, follower
                for column, value in (
                    (self._character, 0),
                    (self._follower, 0),
                    (self._depth, depth),
                    (self._found, 0),
                ):
                    column.append(value)
                if depth > len(levels):
                    levels.append(array("I"))
                levels[depth - 1].extend((node, code, follower))
            node = follower
        self._found[node] = len(stop)

    def _link(self, level: array[int]) -> None:
        """Set the suffix nodes of one depth, after those of all smaller depths."""
        for at in range(0, len(level), 3):
            self._check_cancel()
            parent, code, node = level[at : at + 3]
            self._fail[node] = self._step(self._fail[parent], code) if parent else 0
            self._found[node] = self._found[node] or self._found[self._fail[node]]

    def _step(self, node: int, code: int) -> int:
        while True:
            follower = self._next(node, code)
            if follower or node == 0:
                return follower
            node = self._fail[node]


class StopMatcher:
    """Passes text on until a stop string is complete, however the text is cut into pieces.

    The stop string that is complete first wins; of several complete at the same character, the longest. The text before
    it is passed on, the stop string and all text after it are not. Only text that may become a stop string is held
    back. Characters are compared without case folding and normalisation. Raises RequestError as check_stops does.
    """

    def __init__(self, stops: Sequence[str] | StopStrings) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._node = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the held text and `text` that is surely before any stop string; "" after one was found."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        node = self._node
        for index in range(len(self._held), len(whole)):
            node = self._stops.step(node, whole[index])
            if found := self._stops.found(node):
                self.stopped = True
                self._held = ""
                return whole[: index + 1 - found]
        cut = len(whole) - self._stops.depth(node)
        self._node, self._held = node, whole[cut:]
        return whole[:cut]

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
