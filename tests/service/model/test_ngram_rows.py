"""Rows of an n-gram table: found for many tokens together, they are those that are found token by token."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.model import ngram
from onedesk.service.model.ngram import NgramBlock, head_sizes, multipliers
from onedesk.service.model.shape import NgramShape

VOCAB, END = 248320, 248044


def block(size: int, heads: int, base: int) -> NgramBlock:
    shape = NgramShape((1,), size * heads * 8, 4, size, heads, base, 128, 1234, END, 4)
    sizes = head_sizes(shape, 0)
    unused: Any = None
    return NgramBlock(
        shape, 0, multipliers(shape, VOCAB, 0), list(zip(sizes, [0, *accumulate(sizes)], strict=False)), unused, unused
    )


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 5),
    heads=st.integers(1, 8),
    base=st.sampled_from([101, 20_000_000]),
    seen=st.lists(st.one_of(st.integers(0, VOCAB - 1), st.just(END)), min_size=40, max_size=90),
)
def test_many_tokens_have_the_rows_that_each_has(size: int, heads: int, base: int, seen: list[int]) -> None:
    made = block(size, heads, base)
    together = made._rows(seen)
    assert len(seen) > ngram.MANY
    pieces = [made._rows(seen[place - size + 1 : place + 1]) for place in range(size - 1, len(seen))]
    assert together == [row for piece in pieces for row in piece]
