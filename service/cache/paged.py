"""Keys and values of all sequences of a session, in blocks of one reserved region: shared by forks and prefixes, never moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from ..errors import MemoryFull, RequestError
from ..kernels.forward_batch import BLOCK
from ..memory.lease import Lease, carved_bytes
from .recurrent import RecurrentStates


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one layer's keys (and, the same again, values) a token, and how many layers there are.

    `pooled`: fp32 keys of an indexer that a block has in each layer, and their width.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    pooled: tuple[int, int] = (0, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return self.layers * (2 * self.heads * self.head_dim * self.dtype.itemsize + math.prod(self.pooled) * 4 // BLOCK)

    def part(self, blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's keys in `blocks` blocks."""
        return blocks, self.heads, BLOCK, self.head_dim

    def nbytes(self, context: int, sequences: int = 1) -> int:
        """Bytes of a PagedKV, alignment included."""
        blocks = blocks_for(context) * sequences
        pooled = carved_bytes((blocks, *self.pooled), torch.float32) if math.prod(self.pooled) else 0
        return self.layers * (2 * carved_bytes(self.part(blocks), self.dtype) + pooled)


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A length of a sequence that it can go back to; `slot` holds its recurrent state then, None where it has none or was given up."""

    length: int
    slot: int | None = None


class Keeper(Protocol):
    """Who keeps blocks that no sequence uses, so that a later prompt can begin with them."""

    def evict(self) -> None:
        """Let go of a block that no sequence uses, with `PagedKV.unkeep`; at least one is kept when this is called."""
        ...


class PagedKV:
    """The blocks of a session. keys[layer], values[layer]: [blocks, kv_heads, BLOCK, head_dim] views of one lease.

    A block is free, or used by the tables of one or more sequences, or kept for reuse, or both of these. An open sequence is promised
    all blocks up to its capacity and takes them as it grows, so that none can run dry half-way. Invariants, see `check`:
    - a block's users are the tables that it stands in; it is free exactly if it has none and is not kept;
    - all promises together are at most the blocks that are free or only kept;
    - a slot below a sequence's length is never written: of the tables that end in a partly filled block only one may write on in it.
    """

    def __init__(self, lease: Lease, shape: KVShape, context: int, sequences: int = 1) -> None:
        self.shape = shape
        self.context = context
        self.table_width = blocks_for(context)
        self.blocks = self.table_width * sequences
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.pooled: list[torch.Tensor] = []  # [blocks, keys a block, width] where there is an indexer
        for _ in range(shape.layers):
            self.keys.append(lease.carve(shape.part(self.blocks), shape.dtype))
            self.values.append(lease.carve(shape.part(self.blocks), shape.dtype))
            if math.prod(shape.pooled):
                self.pooled.append(lease.carve((self.blocks, *shape.pooled), torch.float32))
        self.keeper: Keeper | None = None
        self.states: RecurrentStates | None = None  # of networks with recurrent layers, see hybrid.py
        self._free = list(range(self.blocks - 1, -1, -1))
        self._users = [0] * self.blocks
        self._kept: set[int] = set()
        self._cold = 0
        self._promised = 0
        self._open: set[SequenceKV] = set()

    @property
    def available(self) -> int:
        """Blocks that can still be promised; those that are only kept count, for they give way."""
        return len(self._free) + self._cold - self._promised

    @property
    def cold(self) -> int:
        """Blocks that no sequence uses and that are kept for reuse."""
        return self._cold

    def fits(self, capacity: int, shared: Sequence[int] = ()) -> bool:
        """Whether `open` would succeed now."""
        return self._new_blocks(capacity, shared) <= self.available

    def open(self, capacity: int, shared: Sequence[int] = ()) -> SequenceKV:
        """A sequence of up to `capacity` tokens that begins with the full blocks `shared`, if any. Raises MemoryFull, RequestError."""
        if capacity > self.context:
            raise RequestError(
                f"a sequence of {capacity} tokens is longer than the context of {self.context}; ask for fewer or open with more context"
            )
        if len(shared) * BLOCK > capacity:
            raise ValueError(f"{len(shared)} shared blocks hold more than {capacity} tokens")
        self._require(self._new_blocks(capacity, shared), f"a sequence of {capacity} tokens")
        return self._sequence(capacity, shared, len(shared) * BLOCK, None)

    def usable(self, blocks: Sequence[int]) -> Sequence[int]:
        """As many of the kept blocks of a beginning as a sequence can go on behind."""
        return blocks

    @property
    def openable(self) -> int:
        """Sequences that can be opened as far as there are blocks for them."""
        return self.available

    def inherit(self, known: int, block: int, /) -> None:
        """The kept block `known` stands for the same beginning as `block`: what hangs on that one may hang on it."""

    def _sequence(self, capacity: int, shared: Sequence[int], length: int, past: SequenceKV | None) -> SequenceKV:
        """A sequence over `shared` blocks, forked from `past` if that is given."""
        return SequenceKV(self, capacity, shared, length)

    def keep(self, block: int) -> None:
        """Keep a used block when its users are gone, until `unkeep`; nobody writes in it from now on."""
        if not self._users[block] or block in self._kept:
            raise ValueError(f"block {block} with {self._users[block]} users cannot be kept")
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """Keep the block no longer; it is free if it has no user."""
        self._kept.remove(block)
        if not self._users[block]:
            self._cold -= 1
            self._free.append(block)

    def users(self, block: int) -> int:
        """Open sequences that have the block in their table."""
        return self._users[block]

    def is_shared(self, block: int) -> bool:
        """Whether somebody beside one sequence needs the block as it is."""
        return self._users[block] > 1 or block in self._kept

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        users = [0] * self.blocks
        writers: dict[int, int] = {}
        for sequence in self._open:
            sequence.check()
            for block in sequence.table:
                users[block] += 1
            if sequence.writes_on:
                last = sequence.table[sequence.length // BLOCK]
                writers[last] = writers.get(last, 0) + 1
                assert last not in self._kept, f"kept block {last} is written on"  # noqa: S101 - invariants of ours, here and below
        free = [block for block in range(self.blocks) if not users[block] and block not in self._kept]
        cold = sum(not users[block] for block in self._kept)
        promised = sum(sequence.promise for sequence in self._open)
        assert users == self._users, "users are not those of the tables"  # noqa: S101
        assert sorted(self._free) == free, f"free blocks are {free}, listed are {sorted(self._free)}"  # noqa: S101
        assert (cold, promised) == (self._cold, self._promised), f"cold {self._cold}, promised {self._promised}"  # noqa: S101
        assert promised <= len(free) + cold, f"{promised} blocks promised of {len(free)} free and {cold} cold"  # noqa: S101
        assert all(count == 1 for count in writers.values()), f"blocks with more than one writer: {writers}"  # noqa: S101

    def _new_blocks(self, capacity: int, shared: Sequence[int]) -> int:
        """What opening takes away from `available`: the promise, and kept blocks that come into use."""
        return blocks_for(capacity) - len(shared) + sum(not self._users[block] for block in shared)

    def _require(self, blocks: int, what: str) -> None:
        if blocks > self.available:
            raise MemoryFull(
                f"{what} needs {blocks} more KV blocks of {BLOCK} tokens, but {self.available} of the session's {self.blocks} can be had; "
                "ask for fewer tokens or sequences at once, or open the model with more context"
            )

    def _use(self, block: int) -> None:
        if not self._users[block]:
            self._cold -= block in self._kept
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._kept:
            self._cold += 1
        else:
            self._free.append(block)

    def _take(self) -> int:
        """A free block, used once; a promise stands behind every call."""
        if not self._free and self.keeper is not None:
            self.keeper.evict()
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _copy(self, source: int, target: int) -> None:
        for part in (*self.keys, *self.values, *self.pooled):
            part[target].copy_(part[source])


class SequenceKV:
    """The keys and values of one sequence: the table of its blocks and its length. Made by PagedKV.open and fork; see SequenceCache.

    `version` rises with every change of the table, so that a copy of it on a device can be told from a stale one. `cuts_anywhere`: truncate
    goes to exactly the length that is asked for.
    """

    cuts_anywhere = True

    def __init__(self, pages: PagedKV, capacity: int, shared: Sequence[int], length: int) -> None:
        self.capacity = capacity
        self.length = length
        self.table = list(shared)
        self.version = 0
        # Positions of its text after pictures are lower than rows by so much (0 or less), see model/positions.py.
        self.shift = 0
        self._pages = pages
        # Positions below it may be seen by others too.
        self._sealed = length
        # The last block is written on by another sequence, or kept: it is to be copied before this one writes in it.
        self._borrowed = length % BLOCK > 0
        for block in self.table:
            pages._use(block)
        pages._promised += self.promise
        pages._open.add(self)

    def __enter__(self) -> SequenceKV:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def promise(self) -> int:
        """Blocks that it may still take."""
        return blocks_for(self.capacity) - len(self.table) + self._borrowed

    @property
    def writes_on(self) -> bool:
        """Whether its next token goes into a partly filled block as it is."""
        return self.length % BLOCK > 0 and not self._borrowed

    @property
    def slots(self) -> tuple[int, int]:
        """Where its recurrent state is read and written by the pass that `ensure` was called for."""
        return 0, 0

    @property
    def trail(self) -> list[tuple[int, int]]:
        """As `slots`, for each row of a pass that `ensure` was called for with `each`."""
        return []

    @property
    def undoable(self) -> int:
        """Tokens that `ensure` may be called for with `each`."""
        return self.capacity - self.length

    def ensure(self, tokens: int, *, undo: bool = False, each: bool = False) -> None:
        """Have blocks of its own for `tokens` more tokens, before they are written. Raises RequestError beyond the capacity.

        `undo`: the pass may be given up, and the sequence is then to be as before. `each`: it may be given up behind any of its tokens.
        """
        end = self.length + tokens
        if end > self.capacity:
            raise RequestError(
                f"{end} tokens do not fit a context of {self.capacity}; shorten the prompt or open the model with more context"
            )
        if not tokens or (len(self.table) * BLOCK >= end and not self._borrowed):
            return
        pages, before = self._pages, self.promise
        if self._borrowed:
            self._own_last()
        while len(self.table) * BLOCK < end:
            self.table.append(pages._take())
        self.version += 1
        pages._promised += self.promise - before

    def advance(self, tokens: int) -> None:
        """Count `tokens` written positions as part of the sequence."""
        end = self.length + tokens
        if not self.length <= end <= len(self.table) * BLOCK:
            raise ValueError(f"{end} tokens are not in {len(self.table)} blocks; call ensure before writing")
        self.length = end

    def snapshot(self) -> Snapshot:
        """A place that the sequence can be brought back to."""
        return Snapshot(self.length)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence. ValueError for one that was given up, or lies before what was cut away since."""
        self.truncate(snapshot.length)

    def keep_border(self, *, written: bool = False) -> None:
        """At the end of a full block: keep what a later sequence needs to go on behind it, if there is room.

        `written` by decode: of those only the last one is kept.
        """

    def truncate(self, length: int) -> int:
        """Forget everything from position `length` on, or from an earlier one where that is as far back as states are kept; returns it.

        MemoryFull if blocks of others would have to be written anew and none are left.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        pages, kept = self._pages, blocks_for(length)
        dropped = self.table[kept:]
        borrowed = length % BLOCK > 0 and self._is_borrowed(kept - 1, length)
        promise = blocks_for(self.capacity) - kept + borrowed
        returned = sum(pages.users(block) == 1 for block in dropped)
        pages._require(promise - self.promise - returned, "a shared sequence cut shorter")
        pages._promised += promise - self.promise
        del self.table[kept:]
        for block in dropped:
            pages._drop(block)
        self.length, self._borrowed, self._sealed = length, borrowed, min(self._sealed, length)
        self.version += 1
        return length

    def fork(self, capacity: int | None = None) -> SequenceKV:
        """Another sequence with the same past, of up to `capacity` tokens (as this one). Blocks are shared until one writes: MemoryFull
        if what it may have to take is not there."""
        capacity = self.capacity if capacity is None else capacity
        if not self.length <= capacity <= self._pages.context:
            raise ValueError(f"a fork of {self.length} tokens cannot have a capacity of {capacity}")
        shared = self.table[: blocks_for(self.length)]
        self._pages._require(blocks_for(capacity) - self.length // BLOCK, "a fork")
        self._sealed = self.length
        made = self._pages._sequence(capacity, shared, self.length, self)
        made.shift = self.shift
        return made

    def widen(self, capacity: int) -> None:
        """Promise it room for `capacity` tokens, not fewer than now. Raises MemoryFull."""
        if not self.capacity <= capacity <= self._pages.context:
            raise ValueError(f"a sequence of {self.capacity} tokens cannot be widened to {capacity}")
        more = blocks_for(capacity) - blocks_for(self.capacity)
        self._pages._require(more, "a sequence that grows")
        self._pages._promised += more
        self.capacity = capacity

    def close(self) -> None:
        """Return its blocks and what it was promised; closing twice does nothing."""
        pages = self._pages
        if self not in pages._open:
            return
        pages._open.remove(self)
        pages._promised -= self.promise
        for block in self.table:
            pages._drop(block)
        self.table.clear()
        self.capacity = self.length = 0

    def nbytes(self) -> int:
        """Bytes reserved, shared blocks included."""
        return blocks_for(self.capacity) * BLOCK * self._pages.shape.token_bytes

    def check(self) -> None:
        """Raise AssertionError where an invariant of its own does not hold; PagedKV.check looks at all together."""
        held = len(self.table)
        assert 0 <= self.length <= self.capacity, f"length {self.length} of {self.capacity}"  # noqa: S101 - invariants of ours
        assert blocks_for(self.length) <= held <= blocks_for(self.capacity), f"{held} blocks for {self.length} tokens"  # noqa: S101
        assert len(set(self.table)) == held, f"a block stands twice in {self.table}"  # noqa: S101

    def _is_borrowed(self, index: int, length: int) -> bool:
        """Whether the block at `index` of the table must be copied before it is written from position `length` on."""
        if self._borrowed and index == len(self.table) - 1:
            return True
        block = self.table[index]
        return self._pages.is_shared(block) and (length < self._sealed or block in self._pages._kept)

    def _own_last(self) -> None:
        """Turn the borrowed last block into one of its own; no copy is needed when the others have gone."""
        pages, block = self._pages, self.table[-1]
        if pages.is_shared(block):
            self.table[-1] = pages._take()
            pages._copy(block, self.table[-1])
            pages._drop(block)
        self._borrowed = False
