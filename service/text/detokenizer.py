"""Tokens to text while they come, never half a character."""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

HOLD_LIMIT = 32  # code points; the longest emoji in use (a kiss with two skin tones) has 10, a flag written in tags 7

_JOINER = "\u200d"
_REGIONAL = range(0x1F1E6, 0x1F200)
# What may start an emoji, by block: a sign too many is only shown one token later.
_EMOJI = (
    range(0x1F000, 0x1FC00),
    range(0x2190, 0x2200),
    range(0x2300, 0x2400),
    range(0x25A0, 0x27C0),
    range(0x2900, 0x2980),
    range(0x2B00, 0x2C00),
)
_LONE_EMOJI = frozenset((0xA9, 0xAE, 0x203C, 0x2049, 0x2122, 0x2139, 0x24C2, 0x3030, 0x303D, 0x3297, 0x3299))
# Variation selectors, skin tones, the tags of a flag
_EXTENDERS = (range(0xFE00, 0xFE10), range(0x1F3FB, 0x1F400), range(0xE0020, 0xE0080))


class Detokenizer:
    """Text of tokens as they come. The pieces and `finish()`, joined, are `tokenizer.decode` of all the ids.

    The start of a character waits for its rest; bytes that can never become one are U+FFFD at once. Each token is decoded once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; control tokens have none."""
        if token in self._tokenizer.control_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)


class ClusterHold:
    """Holds back an emoji at the end of the text until the next character shows that it is whole.

    A family, a skin tone or a flag is several code points; shown in pieces it would flicker through other pictures. Only emoji and
    what a joiner binds wait (by one character, at most HOLD_LIMIT code points), so plain text is never late. Combining marks of a
    letter and the keycap sign of a digit are not waited for: every letter would have to be.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """What is surely whole of the held text and `text`."""
        text = self._held + text
        cut = _open_cluster(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held."""
        held, self._held = self._held, ""
        return held


def _open_cluster(text: str) -> int:
    """Index from which the end of `text` is an emoji that may go on; len(text) where nothing is open."""
    last = len(text) - 1
    if last < 0 or not _may_go_on(text[last]):
        return len(text)
    start = last
    while start > 0 and last - start < HOLD_LIMIT and (_extends(text[start]) or text[start - 1] == _JOINER):
        start -= 1
    if last - start >= HOLD_LIMIT:
        return len(text)
    if ord(text[start]) in _REGIONAL and _regional_run(text, start) % 2 == 0:
        return len(text)  # two regional letters are a whole flag
    return start


def _may_go_on(character: str) -> bool:
    code = ord(character)
    if code < 0xA9:
        return False
    return code in _LONE_EMOJI or any(code in block for block in _EMOJI) or _extends(character)


def _extends(character: str) -> bool:
    return character == _JOINER or any(ord(character) in block for block in _EXTENDERS)


def _regional_run(text: str, end: int) -> int:
    """How many regional letters stand in a row up to index `end`."""
    count = 0
    while count <= end and ord(text[end - count]) in _REGIONAL:
        count += 1
    return count
