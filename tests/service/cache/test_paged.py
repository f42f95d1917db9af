"""Paged keys and values against plain lists of rows, through random writes, forks, truncations, reuse and eviction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from onedesk.service.cache.paged import KVShape, PagedKV, SequenceKV, blocks_for
from onedesk.service.errors import MemoryFull, RequestError
from onedesk.service.kernels.forward_batch import BLOCK, PrefillChunk
from onedesk.service.kernels.reference import write_rows
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

SHAPE = KVShape(layers=2, heads=3, head_dim=2, dtype=torch.float32)
CONTEXT = 3 * BLOCK
SEQUENCES = 3
POOL = Pool("cpu", MemorySettings(debug=True), lambda: read_truth("cpu"))


@pytest.fixture
def pages() -> Iterator[PagedKV]:
    lease = POOL.lease("test", "kv", SHAPE.nbytes(CONTEXT, SEQUENCES))
    paged = PagedKV(lease, SHAPE, CONTEXT, SEQUENCES)
    yield paged
    paged.check()
    POOL.verify()
    lease.release()


def put(pages: PagedKV, sequence: SequenceKV, values: list[float]) -> None:
    """Write one row per value after the sequence, which must have blocks for them. Does not advance it."""
    positions = torch.arange(sequence.length, sequence.length + len(values), dtype=torch.int32)
    tables = torch.tensor([sequence.table], dtype=torch.int32)
    chunk = PrefillChunk(positions, tables, sequence.length + len(values), start=sequence.length)
    for layer in range(SHAPE.layers):
        k = (torch.tensor(values)[:, None, None] + layer / 8).expand(-1, SHAPE.heads, SHAPE.head_dim)
        write_rows(k, -k, pages.keys[layer], pages.values[layer], chunk)


def write(pages: PagedKV, sequence: SequenceKV, values: list[float]) -> None:
    sequence.ensure(len(values))
    put(pages, sequence, values)
    sequence.advance(len(values))


def rows_of(pages: PagedKV, blocks: list[int], length: int) -> list[float]:
    """The written values. All layers and heads, keys and values must agree."""
    found = []
    for layer in range(SHAPE.layers):
        parts = (pages.keys[layer][blocks] - layer / 8, -pages.values[layer][blocks] - layer / 8)
        found += [part.transpose(1, 2).reshape(-1, SHAPE.heads * SHAPE.head_dim) for part in parts]
    wide = torch.cat(found, dim=1)[:length]
    assert bool((wide == wide[:, :1]).all())
    return wide[:, 0].tolist()


class PagesMachine(RuleBasedStateMachine):
    """Sequences with lists of what was written to them, and cached blocks with their content."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = POOL.lease("test", "kv", SHAPE.nbytes(CONTEXT, SEQUENCES))
        self.pages = PagedKV(self.lease, SHAPE, CONTEXT, SEQUENCES)
        self.pages.evictor = self
        self.rows: dict[SequenceKV, list[float]] = {}
        self.kept: dict[int, list[float]] = {}
        self.next = 1.0

    def evict(self) -> None:
        """As BlockEvictor."""
        block = next(block for block in self.kept if not self.pages.users(block))
        del self.kept[block]
        self.pages.uncache_block(block)

    def some(self, number: int) -> SequenceKV:
        return list(self.rows)[number % len(self.rows)]

    def fresh(self, count: int) -> list[float]:
        values = [self.next + i for i in range(count)]
        self.next += count
        return values

    @rule(capacity=st.integers(1, CONTEXT), reuse=st.booleans(), number=st.integers(0, 9))
    def open(self, capacity: int, reuse: bool, number: int) -> None:
        # A prefix of one block, whichever was cached; here it does not matter that its rows started another sequence.
        shared = [list(self.kept)[number % len(self.kept)]] if reuse and self.kept and capacity >= BLOCK else []
        if not self.pages.fits(capacity, shared):
            with pytest.raises(MemoryFull, match=rf"a sequence of {capacity} tokens needs"):
                self.pages.open(capacity, shared)
            return
        self.rows[self.pages.open(capacity, shared)] = list(self.kept[shared[0]]) if shared else []

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), count=st.integers(0, 2 * BLOCK))
    def write(self, number: int, count: int) -> None:
        sequence = self.some(number)
        values = self.fresh(min(count, sequence.capacity - sequence.length))
        write(self.pages, sequence, values)
        self.rows[sequence] += values

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), count=st.integers(1, 2 * BLOCK))
    def stop_in_a_pass(self, number: int, count: int) -> None:
        sequence = self.some(number)
        values = self.fresh(min(count, sequence.capacity - sequence.length))
        sequence.ensure(len(values))
        put(self.pages, sequence, values)

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), less=st.integers(0, CONTEXT))
    def truncate(self, number: int, less: int) -> None:
        sequence = self.some(number)
        length = max(0, sequence.length - less)
        before = (sequence.length, list(sequence.table), sequence.reservation, self.pages.available)
        alone = not any(self.pages.is_shared(block) for block in sequence.table)
        try:
            sequence.truncate(length)
        except MemoryFull:
            assert not alone
            assert before == (sequence.length, sequence.table, sequence.reservation, self.pages.available)
            return
        del self.rows[sequence][length:]

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), more=st.integers(0, CONTEXT))
    def fork(self, number: int, more: int) -> None:
        sequence = self.some(number)
        capacity = min(CONTEXT, sequence.length + more)
        available = self.pages.available
        try:
            child = sequence.fork(capacity)
        except MemoryFull:
            assert available < blocks_for(capacity) - sequence.length // BLOCK
            return
        self.rows[child] = list(self.rows[sequence])

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), more=st.integers(0, CONTEXT))
    def widen(self, number: int, more: int) -> None:
        sequence, available = self.some(number), self.pages.available
        before = sequence.capacity
        try:
            sequence.widen(min(CONTEXT, before + more))
        except MemoryFull:
            assert (sequence.capacity, self.pages.available) == (before, available)

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99))
    def close(self, number: int) -> None:
        sequence = self.some(number)
        sequence.close()
        del self.rows[sequence]

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99), at=st.integers(0, 2), less=st.integers(0, BLOCK - 1))
    def cache_block(self, number: int, at: int, less: int) -> None:
        """Cache a full block; with `less`, the sequence is truncated inside it and written again."""
        sequence = self.some(number)
        end = (at + 1) * BLOCK
        if sequence.length < end or sequence.table[at] in self.kept:
            return
        self.pages.cache_block(sequence.table[at])
        self.kept[sequence.table[at]] = self.rows[sequence][at * BLOCK : end]
        if less:
            self.truncate(number, sequence.length - end + less)
            self.write(number, 1)

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 99))
    def uncache_block(self, number: int) -> None:
        block = list(self.kept)[number % len(self.kept)]
        del self.kept[block]
        self.pages.uncache_block(block)

    @invariant()
    def everything_is_where_it_was_written(self) -> None:
        self.pages.check()
        assert 0 <= self.pages.available <= self.pages.blocks
        for sequence, rows in self.rows.items():
            assert sequence.length == len(rows)
            assert rows_of(self.pages, sequence.table, len(rows)) == rows
        for block, rows in self.kept.items():
            assert rows_of(self.pages, [block], BLOCK) == rows

    def teardown(self) -> None:
        for sequence in self.rows:
            sequence.close()
        for block in self.kept:
            self.pages.uncache_block(block)
        assert self.pages.available == self.pages.blocks
        POOL.verify()
        self.lease.release()


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_fork_copies_one_block_and_only_when_it_must(pages: PagedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, int]] = []
    copy = pages._copy
    monkeypatch.setattr(pages, "_copy", lambda source, target: (copies.append((source, target)), copy(source, target)))
    parent = pages.open(CONTEXT)
    write(pages, parent, [float(i) for i in range(BLOCK + 5)])
    child = parent.fork()
    assert child.table == parent.table
    child.truncate(child.length)
    write(pages, parent, [100.0])
    assert not copies, "the first owner writes on where it is"
    write(pages, child, [200.0])
    assert copies == [(parent.table[1], child.table[1])]
    assert child.table[0] == parent.table[0]
    assert rows_of(pages, parent.table, parent.length)[-2:] == [36.0, 100.0]
    assert rows_of(pages, child.table, child.length)[-2:] == [36.0, 200.0]
    survivor = child.fork()
    child.close()
    write(pages, survivor, [300.0])
    assert len(copies) == 1, "who is left alone needs no copy"


@pytest.mark.parametrize("kept", [False, True])
def test_shared_block_is_copied_before_write(pages: PagedKV, kept: bool) -> None:
    parent = pages.open(CONTEXT)
    past = [float(i) for i in range(2 * BLOCK)]
    write(pages, parent, past)
    child = None if kept else parent.fork()
    if kept:
        pages.cache_block(parent.table[1])
    seen = list(parent.table)
    parent.truncate(BLOCK + 7)
    write(pages, parent, [-1.0])
    assert parent.table != seen
    assert rows_of(pages, seen, 2 * BLOCK) == past
    assert rows_of(pages, parent.table, parent.length) == [*past[: BLOCK + 7], -1.0]
    for sequence in filter(None, (parent, child)):
        sequence.close()


def test_failed_truncate_changes_nothing(pages: PagedKV) -> None:
    parent = pages.open(2 * BLOCK)
    write(pages, parent, [1.0] * 2 * BLOCK)
    forks = [parent.fork(CONTEXT) for _ in range(7)]
    with pytest.raises(MemoryFull, match="a shared sequence cut shorter needs 1 more KV blocks of 32 tokens, but 0 "):
        parent.truncate(BLOCK + 1)
    assert (parent.length, len(parent.table)) == (2 * BLOCK, 2)
    for fork in forks:
        write(pages, fork, [2.0] * BLOCK)
    forks.pop().close()
    parent.truncate(BLOCK + 1)
    write(pages, parent, [3.0])
    assert rows_of(pages, forks[0].table, CONTEXT) == [1.0] * 2 * BLOCK + [2.0] * BLOCK


def test_reservations_hold(pages: PagedKV) -> None:
    first = pages.open(CONTEXT)
    others = [pages.open(CONTEXT) for _ in range(SEQUENCES - 1)]
    assert (pages.available, pages.fits(1)) == (0, False)
    with pytest.raises(
        MemoryFull, match=r"needs 1 more KV blocks of 32 tokens, but 0 of the session's 9 are available"
    ):
        pages.open(1)
    with pytest.raises(MemoryFull, match="a fork needs 3 more"):
        first.fork()
    for sequence in (first, *others):
        write(pages, sequence, [1.0] * CONTEXT)
        with pytest.raises(RequestError, match=rf"{CONTEXT + 1} tokens do not fit a context of {CONTEXT}"):
            sequence.ensure(1)
    first.close()
    first.close()
    assert pages.available == blocks_for(CONTEXT)
    with pytest.raises(RequestError, match="1 tokens do not fit a context of 0"):
        first.ensure(1)
    assert pages.open(CONTEXT).nbytes() * SEQUENCES == SHAPE.nbytes(CONTEXT, SEQUENCES)


def test_misuse_raises_value_error(pages: PagedKV) -> None:
    sequence = pages.open(2)
    with pytest.raises(ValueError, match="cannot truncate 0 tokens to 1"):
        sequence.truncate(1)
    with pytest.raises(ValueError, match="1 tokens are not in 0 blocks"):
        sequence.advance(1)
    with pytest.raises(ValueError, match="block 0 with 0 users cannot be kept"):
        pages.cache_block(0)
    with pytest.raises(ValueError, match="1 shared blocks hold more than 2 tokens"):
        pages.open(2, [0])
    with pytest.raises(RequestError, match=rf"longer than the context of {CONTEXT}"):
        pages.open(CONTEXT + 1)


def test_the_stated_size_is_what_is_carved() -> None:
    for context, sequences in ((1, 1), (3, 4), (64, 2), (129, 1)):
        shape = KVShape(layers=5, heads=2, head_dim=7, dtype=torch.bfloat16)
        lease = POOL.lease("test", "kv", shape.nbytes(context, sequences))
        assert PagedKV(lease, shape, context, sequences).blocks == blocks_for(context) * sequences
        assert lease.free < 256
        lease.release()
