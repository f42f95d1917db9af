"""A picture of memory: bars whose lengths are proportional to bytes, to the pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont

from ..service.memory.budget import show

WIDTH = 640
MARGIN = 16
BAR = 22
LINE = 20
# Longer lines would never fit.
LONGEST = 300
# Length of a whole bar in pixels.
LENGTH = WIDTH - 2 * MARGIN

Colour = tuple[int, int, int]
BACKGROUND: Colour = (24, 26, 30)
EMPTY: Colour = (52, 56, 64)
TEXT: Colour = (222, 226, 232)
OTHERS: Colour = (122, 128, 140)
COMFYUI: Colour = (214, 148, 58)
ONEDESK: Colour = (74, 144, 226)
KEPT_BACK: Colour = (88, 66, 92)
KINDS: dict[str, Colour] = {
    "weights": (74, 144, 226),
    "kv": (80, 190, 150),
    "state": (150, 200, 90),
    "scratch": (190, 120, 210),
    "table": (230, 200, 80),
}


@dataclass(frozen=True)
class BarPart:
    """A segment of a bar: label, bytes, colour."""

    label: str
    nbytes: int
    colour: Colour


@dataclass(frozen=True)
class Bar:
    """`parts` of `total` bytes, from the left; the remainder is `rest`. Parts beyond the total are cut off at the bar's
    end.
    """

    title: str
    total: int
    parts: Sequence[BarPart]
    rest: str

    def edges(self) -> list[int]:
        """The end of each part, in pixels from the bar's left end. Sums are rounded, not parts, so that errors do not
        add up.
        """
        ends, at = [], 0
        for part in self.parts:
            at = min(self.total, at + max(0, part.nbytes))
            ends.append(round(LENGTH * at / self.total) if self.total else 0)
        return ends

    def legend(self) -> str:
        """The parts in words, and the remainder."""
        left = max(0, self.total - sum(part.nbytes for part in self.parts))
        words = [f"{part.label} {show(part.nbytes)}" for part in self.parts if part.nbytes]
        return ", ".join([*words, f"{self.rest} {show(left)}"])


def draw(bars: Sequence[Bar]) -> torch.Tensor:
    """The bars, top to bottom, as ComfyUI's IMAGE: [1, height, 640, 3] fp32 in 0..1."""
    height = 2 * MARGIN + len(bars) * (2 * LINE + BAR + MARGIN)
    image = Image.new("RGB", (WIDTH, height), BACKGROUND)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    top = MARGIN
    for bar in bars:
        _write(pen, top, f"{bar.title}: {show(bar.total)}", font)
        _write(pen, top + LINE + BAR + 2, bar.legend(), font)
        _fill(pen, top + LINE, 0, LENGTH, EMPTY)
        start = 0
        for part, end in zip(bar.parts, bar.edges(), strict=True):
            _fill(pen, top + LINE, start, end, part.colour)
            start = end
        top += 2 * LINE + BAR + MARGIN
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(1, height, WIDTH, 3).float() / 255


def _fill(pen: ImageDraw.ImageDraw, top: int, start: int, end: int, colour: Colour) -> None:
    """Colour the pixels from `start` up to, but not including, `end`; an empty range colours none."""
    if end > start:
        pen.rectangle((MARGIN + start, top, MARGIN + end - 1, top + BAR - 1), fill=colour)


def _write(pen: ImageDraw.ImageDraw, top: int, text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> None:
    """One line that ends where the bars end; the built-in font knows Latin letters only."""
    shown = " ".join(text.encode("latin-1", "replace").decode("latin-1").split())[:LONGEST]
    while shown and pen.textlength(shown, font=font) > LENGTH:
        shown = shown[:-2].rstrip("~") + "~"
    pen.text((MARGIN, top), shown, fill=TEXT, font=font)
