"""The most frequent event of a stream, a piece of text, as the bytes of a server-sent event. Only the piece changes
between events.
"""

from __future__ import annotations

import json
from typing import Literal, TypeAlias

from ..core import Event
from .responses import AnswerWriter
from .sse import as_events

Channel: TypeAlias = Literal["text", "reasoning", ""]
Pattern: TypeAlias = tuple[tuple[bytes, ...], bytes, bytes]
# Markers for the text and the token. No id, name or number in a chunk can contain them.
_TEXT, _TOKEN = "\x00text\x00", -9_007_199_254_740_991
_QUOTED, _NUMBER = json.dumps(_TEXT).encode(), str(_TOKEN).encode()


class Frames:
    """Writes what `writer` would write for events that only add text to choices that have begun. It saves 15 us per
    token.
    """

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer
        self._patterns: dict[tuple[int, Channel], Pattern] = {}

    def of(self, index: int, event: Event) -> bytes | None:
        """The bytes of an event of choice `index`, perhaps empty; None if the event does more than add a piece."""
        return self._frame(index, event) if _plain(event) and self._writer.only_adds(index) else None

    def _frame(self, index: int, event: Event) -> bytes:
        channel: Channel = "text" if event.text else "reasoning" if event.reasoning else ""
        pattern = self._patterns.get((index, channel))
        if pattern is None:
            pattern = self._patterns[index, channel] = self._cut(index, channel)
        heads, middle, tail = pattern
        piece = json.dumps(event.text or event.reasoning).encode() if channel else b""
        written = [part for head in heads for part in (head, piece)]
        return b"".join((*written, middle, str(event.token).encode() if tail else b"", tail))

    def _cut(self, index: int, channel: Channel) -> Pattern:
        """The parts before each copy of the text (reasoning has two names), then up to the token, and the rest. Without
        a marker for the token, the rest is empty.
        """
        text, reasoning = (_TEXT if channel == name else "" for name in ("text", "reasoning"))
        whole = as_events(self._writer.chunks([(index, Event(text, reasoning, _TOKEN))]))
        *heads, rest = whole.split(_QUOTED)
        middle, _, tail = rest.partition(_NUMBER)
        return tuple(heads), middle, tail


def _plain(event: Event) -> bool:
    more = (event.result, event.progress, event.logprobs)
    return event.token is not None and more == (None, None, None) and not (event.text and event.reasoning)
