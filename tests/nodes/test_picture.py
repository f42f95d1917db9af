"""The picture of memory: its bars are the bytes, to the pixel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onedesk.nodes.picture import (
    BAR,
    EMPTY,
    LENGTH,
    LINE,
    MARGIN,
    WIDTH,
    Bar,
    BarPart,
    draw,
)

RED, GREEN, BLUE = (200, 30, 30), (30, 200, 30), (30, 30, 200)


def pixels(image: torch.Tensor, number: int, colour: tuple[int, int, int]) -> int:
    """How many pixels of a colour the middle line of bar `number` has."""
    top = MARGIN + number * (2 * LINE + BAR + MARGIN) + LINE
    row = (image[0, top + BAR // 2] * 255).round().to(torch.int64)
    return int((row == torch.tensor(colour)).all(dim=1).sum())


def test_bars_are_as_long_as_their_bytes():
    bars = [
        Bar("a", 1000, [BarPart("x", 500, RED), BarPart("y", 250, GREEN)], "rest"),
        Bar("b", 1000, [BarPart("z", 1000, BLUE)], "rest"),
    ]
    image = draw(bars)
    assert image.shape[0] == 1
    assert image.shape[2:] == (WIDTH, 3)
    assert image.dtype == torch.float32
    assert [pixels(image, 0, colour) for colour in (RED, GREEN, BLUE, EMPTY)] == [
        LENGTH // 2,
        LENGTH // 4,
        0,
        LENGTH // 4,
    ]
    assert [pixels(image, 1, colour) for colour in (RED, BLUE, EMPTY)] == [0, LENGTH, 0]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(1, 2**40))
def test_no_bar_is_off_by_more_than_a_pixel(sizes, total):
    edges = Bar("t", total, [BarPart("p", size, RED) for size in sizes], "rest").edges()
    at = 0
    for size, edge in zip(sizes, edges, strict=True):
        at = min(total, at + size)
        assert abs(edge - LENGTH * at / total) <= 0.5
    assert edges == sorted(edges)
    assert edges[-1] <= LENGTH


def test_legends_name_every_part_that_there_is_and_what_is_left():
    bar = Bar("Memory", 4096, [BarPart("others", 1024, RED), BarPart("none", 0, GREEN)], "available")
    assert bar.legend() == "others 1 KiB, available 3 KiB"


@pytest.mark.parametrize("title", ["模型 🙂", "a" * 5000, "line\nend", ""])
def test_any_name_can_be_drawn(title):
    assert draw([Bar(title, 0, [BarPart(title, 5, RED)], "rest")]).shape[2] == WIDTH
