"""The prefix index against a plain dictionary of prefixes, with random prompts, use and pressure."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.engine.prefix import PrefixIndex
from onedesk.service.kernels.forward_batch import BLOCK


class Shelf:
    """Blocks as the paged cache counts them, each with the tokens that it was written with."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.used: dict[int, int] = {}

    def cache_block(self, block: int, /) -> None:
        assert self.used.get(block), "an unused block was kept"
        assert block not in self.kept
        self.kept.add(block)

    def uncache_block(self, block: int, /) -> None:
        self.kept.remove(block)

    def users(self, block: int, /) -> int:
        return self.used.get(block, 0)

    def inherit(self, known: int, block: int, /) -> None:
        assert known in self.kept
        assert known != block


def ids(letters: str, tail: int) -> tuple[int, ...]:
    """A prompt of whole blocks, one per letter, and `tail` tokens after them."""
    return tuple(ord(letter) for letter in letters for _ in range(BLOCK)) + tuple(range(tail))


PROMPTS = st.builds(ids, st.text("ab", max_size=4), st.integers(0, BLOCK - 1)).filter(bool)


class PrefixMachine(RuleBasedStateMachine):
    """Prompts arrive, are prefilled and end; `content` is the whole prefix up to the end of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf()
        self.index = PrefixIndex(self.shelf)
        self.content: dict[int, tuple[int, ...]] = {}
        self.open: list[list[int]] = []

    @rule(prompt=PROMPTS)
    def read(self, prompt: tuple[int, ...]) -> None:
        found = self.index.match(prompt)
        assert len(found) * BLOCK < len(prompt), "no token is left to be read"
        for place, block in enumerate(found):
            assert block in self.shelf.kept
            assert self.content[block] == prompt[: (place + 1) * BLOCK], "a block of another prefix"
        table = list(found)
        for place in range(len(found), len(prompt) // BLOCK):
            table.append(len(self.content))
            self.content[table[-1]] = prompt[: (place + 1) * BLOCK]
        for block in table:
            self.shelf.used[block] = self.shelf.used.get(block, 0) + 1
        self.open.append(table)
        self.index.insert(prompt, table)
        again = self.index.match((*prompt, 999))
        assert [self.content[block] for block in again] == [
            prompt[: (i + 1) * BLOCK] for i in range(len(prompt) // BLOCK)
        ]

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def close(self, number: int) -> None:
        for block in self.open.pop(number % len(self.open)):
            self.shelf.used[block] -= 1

    @rule()
    def evict(self) -> None:
        cold = {block for block in self.shelf.kept if not self.shelf.users(block)}
        if not cold:
            with pytest.raises(KeyError, match="in use"):
                self.index.evict()
            return
        before = set(self.shelf.kept)
        self.index.evict()
        (gone,) = before - self.shelf.kept
        assert gone in cold
        longer = [b for b in cold - {gone} if self.content[b][: len(self.content[gone])] == self.content[gone]]
        assert not longer, "the start of a prefix was evicted before its end"

    @invariant()
    def what_is_known_is_kept(self) -> None:
        assert len(self.index) == len(self.shelf.kept)

    def teardown(self) -> None:
        self.index.clear()
        assert not self.shelf.kept
        assert len(self.index) == 0


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_longest_unused_goes_first() -> None:
    shelf = Shelf()
    index = PrefixIndex(shelf)
    for place, letter in enumerate("abc"):
        shelf.used[place] = 1
        index.insert(ids(letter, 0), [place])
        shelf.used[place] = 0
    assert index.match(ids("a", 1)) == [0]
    index.evict()
    assert shelf.kept == {0, 2}
    index.evict()
    assert shelf.kept == {0}


def test_the_same_block_behind_another_beginning_is_another() -> None:
    shelf = Shelf()
    index = PrefixIndex(shelf)
    shelf.used |= {0: 1, 1: 1}
    index.insert(ids("ab", 0), [0, 1])
    assert index.match(ids("b", 1)) == []
    assert index.match(ids("bb", 1)) == []
    assert index.match(ids("aa", 1)) == [0]
    assert index.match(ids("ab", 0)) == [0], "the last token's scores are wanted"
