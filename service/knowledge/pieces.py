"""Cuts a source into pieces by its structure: heading, paragraph, sentence, and last by length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .plain_text import SourceText

# Estimated tokens of a piece: one per CJK character, one per four others, as Qwen's tokenizers need about.
TARGET, CAP = 350, 512
_CJK = "⺀-ヿㄅ-ㆿㇰ-ㇿ㐀-䶿一-鿿가-힯豈-﫿\U00020000-\U000323af"
_CJK_RUN = re.compile(f"[{_CJK}]+")
_PARAGRAPH = re.compile(r"(?:[^\n]|\n(?![ \t]*\n))+\n?(?:[ \t]*\n)*|\n+")
_SENTENCE = re.compile(r".+?(?:[.!?…](?=\s)|[。！？；]|\n|$)\s*", re.S)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Characters `start` to `end` of a source's text. `heading`: the titles above it, joined by " > "."""

    heading: str
    start: int
    end: int
    text: str


def weight(text: str) -> float:
    """Estimated tokens of `text`."""
    dense = sum(map(len, _CJK_RUN.findall(text)))
    return dense + (len(text) - dense) / 4


def cut(source: SourceText) -> list[SourcePiece]:
    """The pieces of a source in order; every character that is no blank is in exactly one."""
    bounds = [0, *(at for at, _, _ in source.headings), len(source.text)]
    above: list[tuple[int, str]] = []
    pieces: list[SourcePiece] = []
    for section, (start, end) in enumerate(pairwise(bounds)):
        if section:
            _, level, title = source.headings[section - 1]
            above = [one for one in above if one[0] < level] + [(level, title)]
        heading = " > ".join(title for _, title in above)
        for first, last in _packed(source.text, start, end):
            text = source.text[first:last]
            if text.strip():
                left = len(text) - len(text.lstrip())
                kept = text.strip()
                pieces.append(SourcePiece(heading, first + left, first + left + len(kept), kept))
    return pieces


def _packed(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole units, each of about TARGET."""
    first, held, at = start, 0.0, start
    for stop in _units(text, start, end):
        size = weight(text[at:stop])
        if held and held + size > TARGET:
            yield first, at
            first, held = at, 0.0
        held, at = held + size, stop
    if at > first:
        yield first, at


def _units(text: str, start: int, end: int) -> Iterator[int]:
    """Ends of paragraphs; of sentences in a paragraph beyond CAP; of equal parts in a sentence beyond CAP."""
    for paragraph in _PARAGRAPH.finditer(text, start, end):
        if weight(paragraph[0]) <= CAP:
            yield paragraph.end()
            continue
        for sentence in _SENTENCE.finditer(text, paragraph.start(), paragraph.end()):
            # A character weighs at most 1, so a part of TARGET characters is never too long.
            if weight(sentence[0]) > CAP:
                yield from range(sentence.start() + TARGET, sentence.end(), TARGET)
            yield sentence.end()


def for_index(text: str) -> str:
    """`text` as the index has it: full-width letters as plain ones, lower case, a blank around each CJK character."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _CJK_RUN.sub(lambda run: f" {' '.join(run[0])} ", folded)


def match_of(query: str) -> str:
    """An FTS5 expression for the words of `query`, any of which may match; pairs of neighbouring characters of CJK.
    Every term is quoted, so nothing in it is an operator. Empty for a query without words."""
    folded = unicodedata.normalize("NFKC", query).casefold()
    terms: list[str] = []
    for run in _CJK_RUN.findall(folded):
        terms += [" ".join(run[at : at + 2]) for at in range(max(1, len(run) - 1))]
    terms += _WORD.findall(_CJK_RUN.sub(" ", folded))
    return " OR ".join(f'"{term}"' for term in dict.fromkeys(terms))
