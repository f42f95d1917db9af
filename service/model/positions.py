"""Positions of a sequence with pictures: three axes (time, row, column), which are equal for text.

A picture starts at the position after the text before it and spans its merged rows and columns. The text after it
continues after the longer side, so there are fewer positions than cache rows. Source: the Qwen2-VL report (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """A picture in a sequence: its first row, and its size in rows and columns of tokens."""

    first: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    @property
    def end(self) -> int:
        """The row after its last."""
        return self.first + self.tokens

    @property
    def saved(self) -> int:
        """Cache rows minus positions of the picture."""
        return self.tokens - max(self.height, self.width)


@dataclass(frozen=True, slots=True)
class PicturePositions:
    """The rows of a sequence's pictures, in rising order. ValueError for spans that overlap."""

    spans: tuple[PictureSpan, ...]

    def __post_init__(self) -> None:
        for one, other in zip(self.spans, self.spans[1:], strict=False):
            if other.first < one.end:
                raise ValueError(f"a picture begins at row {other.first}, within one that ends at {one.end}")

    @property
    def end(self) -> int:
        """The row after the last picture."""
        return self.spans[-1].end if self.spans else 0

    @property
    def delta(self) -> int:
        """The offset from row to position for text after all pictures; 0 or less."""
        return -sum(span.saved for span in self.spans)

    def axes(self, first: int, last: int) -> torch.Tensor:
        """int64 [3, last - first]: time, row and column of the rows first..last - 1."""
        rows = torch.arange(first, last)
        found = rows.expand(3, -1).clone()
        for span in self.spans:
            found[:, rows >= span.end] -= span.saved
        shift = 0
        for span in self.spans:
            inside = (rows >= span.first) & (rows < span.end)
            number, begin = rows[inside] - span.first, span.first - shift
            found[0, inside] = begin
            found[1, inside] = begin + number // span.width
            found[2, inside] = begin + number % span.width
            shift += span.saved
        return found

    def within(self, first: int, last: int) -> list[tuple[int, slice, slice]]:
        """The pictures in the rows first..last - 1: index, rows relative to `first`, and rows of the picture."""
        found = []
        for number, span in enumerate(self.spans):
            low, high = max(first, span.first), min(last, span.end)
            if low < high:
                found.append((number, slice(low - first, high - first), slice(low - span.first, high - span.first)))
        return found


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotary positions of a chunk's rows: `axes` int64 [3, n] for the extra rows of a rotary table, `turns` int32
    [rows] and `first_turns` int32 [rows], see Rows.
    """

    axes: torch.Tensor
    turns: torch.Tensor
    first_turns: torch.Tensor


# Rows before a chunk whose angles an indexer may need: its key blocks are shorter.
BEFORE = 32


def turns_of(positions: PicturePositions, first: int, last: int, table: int, key_block: int = 1) -> Turns:
    """Those of the rows first..last - 1; `table` is the number of positions of the rotary table, `key_block` the
    indexer's key block length, counted from the first row.
    """
    begin = max(0, first - min(BEFORE, key_block - 1))
    axes = positions.axes(begin, last)
    turns = torch.arange(last - begin, dtype=torch.int32) + table
    rows = torch.arange(first, last)
    firsts = rows - rows % key_block - begin
    return Turns(axes, turns[first - begin :], turns[firsts.clamp(min=0)])


def expand(ids: Sequence[int], image: int, sizes: Sequence[tuple[int, int]]) -> tuple[list[int], PicturePositions]:
    """Ids in which every `image` token is repeated once per row of its picture, and the spans of the pictures.

    sizes: rows and columns of tokens of each picture, in order. ValueError where the counts differ.
    """
    found: list[int] = []
    spans: list[PictureSpan] = []
    for token in ids:
        if token != image:
            found.append(token)
            continue
        if len(spans) == len(sizes):
            raise ValueError(f"there are {list(ids).count(image)} image tokens, but {len(sizes)} pictures")
        span = PictureSpan(len(found), *sizes[len(spans)])
        spans.append(span)
        found += [image] * span.tokens
    if len(spans) != len(sizes):
        raise ValueError(f"there are {len(spans)} runs of image tokens, but {len(sizes)} pictures")
    return found, PicturePositions(tuple(spans))
