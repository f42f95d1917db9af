"""Keys and values of all sequences of a session, in blocks of one lease: shared by forks and prefixes, never moved."""

# ruff: noqa: S101 - `check` asserts invariants of this code, never input
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
    """Size of one layer's keys per token (values have the same size), and the number of layers.

    `pooled`: number and width of the fp32 keys that an indexer has per block and layer.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    pooled: tuple[int, int] = (0, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes per token in all layers."""
        return self.layers * (
            2 * self.heads * self.head_dim * self.dtype.itemsize + math.prod(self.pooled) * 4 // BLOCK
        )

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
    """A length that a sequence can go back to. `slot` holds its recurrent state, None if it has none or the snapshot
    was dropped.
    """

    length: int
    slot: int | None = None


class BlockEvictor(Protocol):
    """Evicts cached blocks that no sequence uses."""

    def evict(self) -> None:
        """Drop a cached block that no sequence uses, with `PagedKV.uncache_block`. There is at least one when this is
        called.
        """
        ...


class PagedKV:
    """The KV blocks of a session. keys[layer], values[layer]: [blocks, kv_heads, BLOCK, head_dim] views of one lease.

    A block is free, or in the tables of sequences, or cached for reuse, or the last two together. An open sequence has
    a reservation for all blocks up to its capacity and takes them as it grows, so that none runs out half-way.
    Invariants, see `check`:
    - The users of a block are the tables that contain it. It is free exactly if it has no user and is not cached.
    - All reservations together are at most the free blocks plus those that are only cached.
    - A slot below a sequence's length is never written. Of the tables that end in a partly filled block only one may
      write in it.
    """

    def __init__(self, lease: Lease, shape: KVShape, context: int, sequences: int = 1) -> None:
        self.shape = shape
        self.context = context
        self.table_width = blocks_for(context)
        self.blocks = self.table_width * sequences
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.pooled: list[torch.Tensor] = []  # [blocks, keys per block, width] with an indexer
        for _ in range(shape.layers):
            self.keys.append(lease.carve(shape.part(self.blocks), shape.dtype))
            self.values.append(lease.carve(shape.part(self.blocks), shape.dtype))
            if math.prod(shape.pooled):
                self.pooled.append(lease.carve((self.blocks, *shape.pooled), torch.float32))
        self.evictor: BlockEvictor | None = None
        self.states: RecurrentStates | None = None  # of networks with recurrent layers, see hybrid_kv.py
        self._free = list(range(self.blocks - 1, -1, -1))
        self._users = [0] * self.blocks
        self._cached: set[int] = set()
        self._cold = 0
        self._reserved = 0
        self._open: set[SequenceKV] = set()

    @property
    def available(self) -> int:
        """Blocks that can still be reserved, including those that are only cached, because they can be evicted."""
        return len(self._free) + self._cold - self._reserved

    @property
    def cold(self) -> int:
        """Cached blocks that no sequence uses."""
        return self._cold

    def fits(self, capacity: int, shared: Sequence[int] = ()) -> bool:
        """Whether `open` would succeed now."""
        return self._new_blocks(capacity, shared) <= self.available

    def open(self, capacity: int, shared: Sequence[int] = ()) -> SequenceKV:
        """A sequence of up to `capacity` tokens that starts with the full blocks `shared`, if any. Raises MemoryFull,
        RequestError.
        """
        if capacity > self.context:
            raise RequestError(
                f"a sequence of {capacity} tokens is longer than the context of {self.context}; ask for fewer or open"
                " with more context"
            )
        if len(shared) * BLOCK > capacity:
            raise ValueError(f"{len(shared)} shared blocks hold more than {capacity} tokens")
        self._require(self._new_blocks(capacity, shared), f"a sequence of {capacity} tokens")
        return self._sequence(capacity, shared, len(shared) * BLOCK, None)

    def usable(self, blocks: Sequence[int]) -> Sequence[int]:
        """The longest part of the cached `blocks` of a prefix from which a sequence can continue."""
        return blocks

    @property
    def openable(self) -> int:
        """Sequences that can be opened, as far as blocks allow."""
        return self.available

    def inherit(self, known: int, block: int, /) -> None:
        """The cached block `known` has the same prefix as `block`: it takes over what belongs to `block`, such as a
        checkpoint.
        """

    def _sequence(self, capacity: int, shared: Sequence[int], length: int, past: SequenceKV | None) -> SequenceKV:
        """A sequence over `shared` blocks, forked from `past` if given."""
        return SequenceKV(self, capacity, shared, length)

    def cache_block(self, block: int) -> None:
        """Keep a used block after its users have closed, until `uncache_block`. It is not written from now on."""
        if not self._users[block] or block in self._cached:
            raise ValueError(f"block {block} with {self._users[block]} users cannot be kept")
        self._cached.add(block)

    def uncache_block(self, block: int) -> None:
        """Stop caching the block. It is free if it has no user."""
        self._cached.remove(block)
        if not self._users[block]:
            self._cold -= 1
            self._free.append(block)

    def users(self, block: int) -> int:
        """Number of open sequences whose table contains the block."""
        return self._users[block]

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence, or the prefix cache, needs the block as it is."""
        return self._users[block] > 1 or block in self._cached

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        users = [0] * self.blocks
        writers: dict[int, int] = {}
        for sequence in self._open:
            sequence.check()
            for block in sequence.table:
                users[block] += 1
            if sequence.writes_on:
                last = sequence.table[sequence.length // BLOCK]
                writers[last] = writers.get(last, 0) + 1
                assert last not in self._cached, f"cached block {last} is written"
        free = [block for block in range(self.blocks) if not users[block] and block not in self._cached]
        cold = sum(not users[block] for block in self._cached)
        reserved = sum(sequence.reservation for sequence in self._open)
        assert users == self._users, "users are not those of the tables"
        assert sorted(self._free) == free, f"free blocks are {free}, listed are {sorted(self._free)}"
        assert (cold, reserved) == (self._cold, self._reserved), f"cold {self._cold}, reserved {self._reserved}"
        assert reserved <= len(free) + cold, f"{reserved} blocks reserved of {len(free)} free and {cold} cold"
        assert all(count == 1 for count in writers.values()), f"blocks with more than one writer: {writers}"

    def _new_blocks(self, capacity: int, shared: Sequence[int]) -> int:
        """What opening takes from `available`: the reservation, and cached blocks that come into use."""
        return blocks_for(capacity) - len(shared) + sum(not self._users[block] for block in shared)

    def _require(self, blocks: int, what: str) -> None:
        if blocks > self.available:
            raise MemoryFull(
                f"{what} needs {blocks} more KV blocks of {BLOCK} tokens, but {self.available} of the session's "
                f"{self.blocks} are available; ask for fewer tokens or sequences at once, "
                "or open the model with more context"
            )

    def _use(self, block: int) -> None:
        if not self._users[block]:
            self._cold -= block in self._cached
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._cached:
            self._cold += 1
        else:
            self._free.append(block)

    def _take(self) -> int:
        """A free block with one user. Every call is covered by a reservation."""
        if not self._free and self.evictor is not None:
            self.evictor.evict()
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _copy(self, source: int, target: int) -> None:
        for part in (*self.keys, *self.values, *self.pooled):
            part[target].copy_(part[source])


class SequenceKV:
    """The keys and values of one sequence: its block table and its length. Only PagedKV makes one, by `open` and
    `fork`.

    Invariants: 0 <= length <= capacity. Positions below `length` change only by `truncate`. All bytes are reserved
    before the first token, so decode allocates nothing.

    `version` rises with every change of the table, so that a stale copy on a device can be recognized. `cuts_anywhere`:
    `truncate` goes to exactly the requested length.
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
        # Others may see positions below it.
        self._sealed = length
        # The last block belongs to another sequence or to the prefix cache, so it must be copied before this one writes
        # in it.
        self._borrowed = length % BLOCK > 0
        for block in self.table:
            pages._use(block)
        pages._reserved += self.reservation
        pages._open.add(self)

    def __enter__(self) -> SequenceKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def reservation(self) -> int:
        """Blocks that it may still take."""
        return blocks_for(self.capacity) - len(self.table) + self._borrowed

    @property
    def writes_on(self) -> bool:
        """Whether its next token goes into a partly filled block of its own."""
        return self.length % BLOCK > 0 and not self._borrowed

    @property
    def slots(self) -> tuple[int, int]:
        """The slots that the next pass reads its recurrent state from and writes it to. Call `ensure` first."""
        return 0, 0

    @property
    def verify_slots(self) -> list[tuple[int, int]]:
        """Like `slots`, for each row of a verify pass. Call `ensure` with `verify` first."""
        return []

    @property
    def verifiable(self) -> int:
        """Most tokens of one verify pass."""
        return self.capacity - self.length

    def ensure(self, tokens: int, *, undo: bool = False, verify: bool = False) -> None:
        """Give it blocks of its own for `tokens` more tokens, before they are written. Raises RequestError beyond the
        capacity.

        `undo`: the pass may be stopped; without `advance` the sequence then stays as it was. `verify`: any prefix of
        the tokens, of which there are at most `verifiable`, may be accepted; `advance` is then called for the accepted
        ones.
        """
        end = self.length + tokens
        if end > self.capacity:
            raise RequestError(
                f"{end} tokens do not fit a context of {self.capacity}; shorten the prompt or open the model with more"
                " context"
            )
        if not tokens or (len(self.table) * BLOCK >= end and not self._borrowed):
            return
        pages, before = self._pages, self.reservation
        if self._borrowed:
            self._own_last()
        while len(self.table) * BLOCK < end:
            self.table.append(pages._take())
        self.version += 1
        pages._reserved += self.reservation - before

    def advance(self, tokens: int) -> None:
        """Count `tokens` written positions as part of the sequence."""
        end = self.length + tokens
        if not self.length <= end <= len(self.table) * BLOCK:
            raise ValueError(f"{end} tokens are not in {len(self.table)} blocks; call ensure before writing")
        self.length = end

    def snapshot(self) -> Snapshot:
        """A state that the sequence can go back to. Raises MemoryFull if that takes memory and none is left."""
        return Snapshot(self.length)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence, which drops the later ones. Raises ValueError for a dropped one."""
        self.truncate(snapshot.length)

    def keep_checkpoint(self, *, written: bool = False) -> None:
        """At the end of a full block: keep what a later sequence needs to continue from it, if memory is left.

        `written`: decode wrote the block. Only the last checkpoint of those is kept.
        """

    def truncate(self, length: int) -> int:
        """Forget everything from position `length` on, or from an earlier position whose state is kept. Returns that
        position.

        At the present length it drops what a pass has written after it. Raises MemoryFull if a shared block would need
        a copy and none is free.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        pages, kept = self._pages, blocks_for(length)
        dropped = self.table[kept:]
        borrowed = length % BLOCK > 0 and self._is_borrowed(kept - 1, length)
        reservation = blocks_for(self.capacity) - kept + borrowed
        returned = sum(pages.users(block) == 1 for block in dropped)
        pages._require(reservation - self.reservation - returned, "a shared sequence cut shorter")
        pages._reserved += reservation - self.reservation
        del self.table[kept:]
        for block in dropped:
            pages._drop(block)
        self.length, self._borrowed, self._sealed = length, borrowed, min(self._sealed, length)
        self.version += 1
        return length

    def fork(self, capacity: int | None = None) -> SequenceKV:
        """Another sequence with the same past, of up to `capacity` tokens (default: that of this one). Blocks are
        shared until one writes.

        Raises MemoryFull if the blocks that it may need cannot be reserved.
        """
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
        """Raise its capacity to `capacity` tokens. Raises MemoryFull."""
        if not self.capacity <= capacity <= self._pages.context:
            raise ValueError(f"a sequence of {self.capacity} tokens cannot be widened to {capacity}")
        more = blocks_for(capacity) - blocks_for(self.capacity)
        self._pages._require(more, "a sequence that grows")
        self._pages._reserved += more
        self.capacity = capacity

    def close(self) -> None:
        """Return its blocks and its reservation. A second call does nothing."""
        pages = self._pages
        if self not in pages._open:
            return
        pages._open.remove(self)
        pages._reserved -= self.reservation
        for block in self.table:
            pages._drop(block)
        self.table.clear()
        self.capacity = self.length = 0

    def nbytes(self) -> int:
        """Bytes reserved, shared blocks included."""
        return blocks_for(self.capacity) * BLOCK * self._pages.shape.token_bytes

    def check(self) -> None:
        """Raise AssertionError if an invariant of this sequence does not hold; PagedKV.check checks all together."""
        held = len(self.table)
        assert 0 <= self.length <= self.capacity, f"length {self.length} of {self.capacity}"
        assert blocks_for(self.length) <= held <= blocks_for(self.capacity), f"{held} blocks for {self.length} tokens"
        assert len(set(self.table)) == held, f"a block stands twice in {self.table}"

    def _is_borrowed(self, index: int, length: int) -> bool:
        """Whether the block at `index` of the table must be copied before it is written from position `length` on."""
        if self._borrowed and index == len(self.table) - 1:
            return True
        block = self.table[index]
        return self._pages.is_shared(block) and (length < self._sealed or block in self._pages._cached)

    def _own_last(self) -> None:
        """Replace the borrowed last block by one of its own. No copy is needed if no one else uses it any more."""
        pages, block = self._pages, self.table[-1]
        if pages.is_shared(block):
            self.table[-1] = pages._take()
            pages._copy(block, self.table[-1])
            pages._drop(block)
        self._borrowed = False
