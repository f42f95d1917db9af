"""Sequences with recurrent states through random reads, writes, forks, snapshots and truncations: each state is that of
its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.cache.hybrid_kv import HybridKV, HybridSequence
from onedesk.service.cache.paged import KVShape, SequenceKV, Snapshot
from onedesk.service.cache.recurrent import RecurrentStates, StateShape
from onedesk.service.engine.prefix import PrefixIndex
from onedesk.service.errors import MemoryFull
from onedesk.service.kernels.forward_batch import BLOCK
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.lease import Lease
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

CONTEXT = 5 * BLOCK
SHAPE = KVShape(1, 1, 2, torch.float32)
STATES = StateShape((((3,), (2, 2)),) * 2, 8, 3)
KEY = 997


def lease(nbytes: int) -> Lease:
    return Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu")).lease("test", "kv", nbytes)


def make() -> HybridKV:
    kv = lease(SHAPE.nbytes(CONTEXT, 3) + STATES.nbytes)
    return HybridKV(kv, SHAPE, RecurrentStates(kv, STATES), CONTEXT, 3)


def state_of(ids: list[int]) -> int:
    """The exact state after `ids` in fp32."""
    value = 0
    for token in ids:
        value = (value * 31 + token + 1) % KEY
    return value


@dataclass(eq=False)
class Text:
    kv: SequenceKV
    ids: list[int]
    snapshots: list[tuple[Snapshot, list[int]]] = field(default_factory=list)


class HybridMachine(RuleBasedStateMachine):
    """Simulates passes: they read the state of a sequence from its slot and write the state after their tokens to its
    slot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = make()
        self.index = PrefixIndex(self.pages)
        self.pages.evictor = self.index
        self.texts: list[Text] = []

    def play(self, texts: list[Text], ids: list[list[int]]) -> None:
        """One pass over several sequences."""
        self.move([text.ids for text in texts], ids, torch.tensor([text.kv.slots for text in texts]))

    def move(self, pasts: list[list[int]], ids: list[list[int]], slots: torch.Tensor) -> None:
        """Replace the states after `pasts` by those after the ids that follow, in every layer; slots [S, 2]: source and
        target.
        """
        states = self.pages.states
        assert states is not None
        for layer in range(len(STATES.layers)):
            pieces = states.read(layer, slots[:, 0])
            for row, (past, new) in enumerate(zip(pasts, ids, strict=True)):
                for number, piece in enumerate(pieces):
                    assert piece[row].unique().tolist() == [state_of(past) + layer + number if past else 0], (
                        "another's state"
                    )
                    piece[row] = state_of(past + new) + layer + number
            states.write(layer, slots[:, 1], pieces)

    @rule(prompt=st.sampled_from((0, 1)), length=st.integers(1, CONTEXT - 40))
    def read(self, prompt: int, length: int) -> None:
        """Prompts start with one of two prefixes."""
        ids = [prompt] * (length - 1) + [length % 3]
        shared = self.pages.usable(self.index.match(ids))
        if not self.pages.fits(CONTEXT, shared):
            return
        text = Text(self.pages.open(CONTEXT, shared), ids[: len(shared) * BLOCK])
        assert text.kv.length == len(text.ids)
        self.texts.append(text)
        for checkpoint in (len(ids) // BLOCK * BLOCK, len(ids)):
            new = ids[len(text.ids) : checkpoint]
            if new:
                self.chunk(text, new)
                text.kv.keep_checkpoint()

    def chunk(self, text: Text, new: list[int]) -> None:
        text.kv.ensure(len(new), undo=True)
        self.play([text], [new])
        text.kv.advance(len(new))
        text.ids += new

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 20))
    def give_up(self, data: st.DataObject, count: int) -> None:
        """A chunk that is stopped after it wrote leaves the sequence as it was."""
        text = data.draw(st.sampled_from(self.texts))
        if text.kv.length + count <= CONTEXT:
            text.kv.ensure(count, undo=True)
            self.play([text], [[7] * count])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 8), drop=st.booleans())
    def verify(self, data: st.DataObject, count: int, drop: bool) -> None:
        """A verify pass that stores a state after each row, of which any prefix may be accepted."""
        text = data.draw(st.sampled_from(self.texts))
        kv, states, count = text.kv, self.pages.states, min(count, text.kv.verifiable)
        if not count or states is None:
            return
        new = [count + row for row in range(count)]
        kv.ensure(count, verify=True)
        for row, (source, target) in enumerate(kv.verify_slots):
            self.move([text.ids + new[:row]], [new[row : row + 1]], torch.tensor([[source, target]]))
        for kept in data.draw(st.lists(st.integers(0, count), max_size=3)):
            piece, new = new[:kept], new[kept:]
            kv.advance(len(piece))
            text.ids += piece
            kv.keep_checkpoint(written=True)
        if drop:
            assert kv.truncate(kv.length) == len(text.ids)
            assert len(kv.verify_slots) == 0

    @precondition(lambda self: self.texts)
    @rule(token=st.integers(0, 9))
    def step(self, token: int) -> None:
        """A decode step of all sequences below their capacity."""
        texts = [text for text in self.texts if text.kv.length < CONTEXT][:3]
        if not texts:
            return
        for text in texts:
            text.kv.ensure(1)
        self.play(texts, [[token]] * len(texts))
        for text in texts:
            text.kv.advance(1)
            text.ids.append(token)
            text.kv.keep_checkpoint(written=True)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        if len(self.texts) < 4:
            try:
                self.texts.append(Text(text.kv.fork(), list(text.ids)))
            except MemoryFull:
                assert not self.pages.openable or self.pages.available < 5

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        try:
            text.snapshots.append((text.kv.snapshot(), list(text.ids)))
        except MemoryFull:
            assert not self.pages.openable

    @precondition(lambda self: any(text.snapshots for text in self.texts))
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from([text for text in self.texts if text.snapshots]))
        snapshot, ids = data.draw(st.sampled_from(text.snapshots))
        try:
            text.kv.restore(snapshot)
        except MemoryFull:
            return
        text.ids = list(ids)
        self.drop_snapshots(text)

    def drop_snapshots(self, text: Text) -> None:
        given_up = [snapshot for snapshot, _ in text.snapshots if snapshot.length > text.kv.length]
        for snapshot in given_up:
            with pytest.raises(ValueError, match="given up"):
                text.kv.restore(snapshot)
        text.snapshots = [pair for pair in text.snapshots if pair[0] not in given_up]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        wanted = data.draw(st.integers(0, text.kv.length))
        try:
            reached = text.kv.truncate(wanted)
        except MemoryFull:
            return
        assert reached <= wanted
        assert reached >= max(
            (snapshot.length for snapshot, _ in text.snapshots if snapshot.length <= wanted), default=0
        )
        text.ids = text.ids[:reached]
        self.drop_snapshots(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), remember=st.booleans())
    def close(self, data: st.DataObject, remember: bool) -> None:
        text = data.draw(st.sampled_from(self.texts))
        if remember:
            self.index.insert(text.ids, text.kv.table[: len(text.ids) // BLOCK])
        text.kv.close()
        text.kv.close()
        self.texts.remove(text)

    @invariant()
    def holds(self) -> None:
        self.pages.check()
        for text in self.texts:
            assert text.kv.length == len(text.ids)

    def teardown(self) -> None:
        for text in self.texts:
            text.kv.close()
        self.index.clear()
        self.pages.check()
        assert self.pages.openable == STATES.slots - 1
        assert self.pages.checkpoints == 0


HybridMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHybrid = HybridMachine.TestCase


def test_prompt_continues_from_last_checkpoint() -> None:
    pages = make()
    index = PrefixIndex(pages)
    pages.evictor = index
    ids = [5] * (2 * BLOCK + 3)
    with pages.open(CONTEXT) as sequence:
        sequence.ensure(2 * BLOCK, undo=True)
        sequence.advance(2 * BLOCK)
        sequence.keep_checkpoint()
        sequence.ensure(3, undo=True)
        sequence.advance(3)
        index.insert(ids, sequence.table[:2])
    known = index.match(ids)
    assert len(known) == 2
    assert list(pages.usable(known)) == known
    # A prefix without the state at its end is of no use, and nothing is kept between checkpoints.
    assert pages.usable(index.match(ids[: BLOCK + 9])) == []
    pages.drop_checkpoint(known[1])
    assert pages.usable(known) == []
    # A sequence that read it again hands its state to the known blocks.
    with pages.open(CONTEXT) as sequence:
        sequence.ensure(2 * BLOCK, undo=True)
        sequence.advance(2 * BLOCK)
        sequence.keep_checkpoint()
        index.insert(ids[: 2 * BLOCK], sequence.table)
    assert list(pages.usable(index.match(ids))) == known
    pages.check()


def test_least_recently_used_checkpoint_is_dropped_first() -> None:
    pages = make()
    with pages.open(CONTEXT) as first:
        for _ in range(4):
            first.ensure(BLOCK, undo=True)
            first.advance(BLOCK)
            first.keep_checkpoint()
        assert pages.checkpoints == 4
        others = [pages.open(1) for _ in range(4)]
        assert (pages.checkpoints, pages.openable) == (2, 2)
        assert [pages.checkpoint(block) is not None for block in first.table] == [False, False, True, True]
        others += [pages.open(1) for _ in range(2)]
        assert (pages.checkpoints, pages.openable, pages.fits(1)) == (0, 0, False)
        with pytest.raises(MemoryFull, match="all 7 recurrent states of the session are in use"):
            pages.open(1)
        first.keep_checkpoint()  # no free slot: nothing is kept
        pages.check()
        for other in others:
            other.close()
    assert pages.openable == 7


def test_of_what_decode_wrote_the_last_border_stays() -> None:
    pages = make()
    with pages.open(CONTEXT) as sequence:
        assert isinstance(sequence, HybridSequence)
        for _ in range(3 * BLOCK + 5):
            sequence.ensure(1)
            sequence.advance(1)
            sequence.keep_checkpoint(written=True)
        assert [pages.checkpoint(block) is not None for block in sequence.table] == [False, False, True, False]
        assert sequence.truncate(3 * BLOCK + 1) == 3 * BLOCK
        assert sequence.truncate(BLOCK) == 0
        assert sequence.nbytes() == (CONTEXT // BLOCK) * BLOCK * SHAPE.token_bytes + 2 * (3 + 4) * 4
        pages.check()


def test_the_stated_bytes_are_what_is_carved() -> None:
    held = lease(STATES.nbytes)
    RecurrentStates(held, STATES)
    assert held.free < 256, "more than what the end is aligned to"
