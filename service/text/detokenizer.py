"""Tokens to text in a stream, without partial characters."""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

HOLD_LIMIT = 32  # code points; the longest emoji in use (a kiss with two skin tones) has 10, a flag written in tags 7

_JOINER = "\u200d"
_REGIONAL = range(0x1F1E6, 0x1F200)
# Blocks of characters that may start an emoji. A character listed without need is only shown one token later.
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
    """Decodes tokens in a stream. The pieces and `finish()`, joined, are `tokenizer.decode` of all the ids.

    The first bytes of a character wait for the others; bytes that cannot become one are U+FFFD at once. Each token is
    decoded once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; none for control tokens."""
        if token in self._tokenizer.control_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """U+FFFD for a character that was never completed, otherwise an empty text."""
        return self._decoder.decode(b"", final=True)


class ClusterHold:
    """Holds back an emoji at the end of the text until the next character shows that it is complete.

    A family, a skin tone or a flag is several code points; shown one by one they would appear as other emoji first.
    Only emoji and joined characters wait (for one character, at most HOLD_LIMIT code points), so plain text is never
    late. Combining marks of letters and the keycap sign of digits do not wait: every letter would have to.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the held text and `text` that is surely complete."""
        text = self._held + text
        cut = _open_cluster(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The held text."""
        held, self._held = self._held, ""
        return held


def _open_cluster(text: str) -> int:
    """The index of an emoji at the end of `text` that may continue; len(text) for none."""
    last = len(text) - 1
    if last < 0 or not _may_go_on(text[last]):
        return len(text)
    start = last
    while start > 0 and last - start < HOLD_LIMIT and (_extends(text[start]) or text[start - 1] == _JOINER):
        start -= 1
    if last - start >= HOLD_LIMIT:
        return len(text)
    if ord(text[start]) in _REGIONAL and _regional_run(text, start) % 2 == 0:
        return len(text)  # two regional letters are a complete flag
    return start


def _may_go_on(character: str) -> bool:
    code = ord(character)
    if code < 0xA9:
        return False
    return code in _LONE_EMOJI or any(code in block for block in _EMOJI) or _extends(character)


def _extends(character: str) -> bool:
    return character == _JOINER or any(ord(character) in block for block in _EXTENDERS)


def _regional_run(text: str, end: int) -> int:
    """The number of consecutive regional letters up to index `end`."""
    count = 0
    while count <= end and ord(text[end - count]) in _REGIONAL:
        count += 1
    return count
