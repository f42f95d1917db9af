"""The prefix cache: an index of KV blocks by the hash of the tokens up to their end, and the order of eviction."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

from ..kernels.forward_batch import BLOCK


class Keeping(Protocol):
    """What the index needs of the paged cache; PagedKV is one."""

    def cache_block(self, block: int, /) -> None: ...

    def uncache_block(self, block: int, /) -> None: ...

    def users(self, block: int, /) -> int: ...

    def inherit(self, known: int, block: int, /) -> None: ...


class PrefixIndex:
    """Blocks by a hash that covers their tokens and all tokens before them, so a block stands for a whole prefix.

    A block is kept after its sequences have closed, until the cache needs it: the least recently used one is evicted
    first, and of a prefix the last block before the first. A kept block is never written again. Invariant: `_blocks`
    has the first block of a prefix after its last one.
    """

    def __init__(self, pages: Keeping) -> None:
        self._pages = pages
        self._blocks: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """The number of blocks in the index."""
        return len(self._blocks)

    def match(self, ids: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix of `ids`, in order. It never has the last token: its scores are
        needed."""
        found: list[bytes] = []
        for digest in _chain(ids[: len(ids) - 1]):
            if digest not in self._blocks:
                break
            found.append(digest)
        self._touch(found)
        return [self._blocks[digest] for digest in found]

    def insert(self, ids: Sequence[int], table: Sequence[int]) -> None:
        """Add the full blocks of a sequence that holds `ids`; `table` are its blocks. A prefix that is cached keeps its
        own blocks."""
        chain = list(_chain(ids))
        for digest, block in zip(chain, table, strict=False):
            if digest not in self._blocks:
                self._pages.cache_block(block)
                self._blocks[digest] = block
            elif self._blocks[digest] != block:
                self._pages.inherit(self._blocks[digest], block)
        self._touch(chain)

    def evict(self) -> None:
        """Evict the least recently used block that no sequence uses. Raises KeyError when there is none."""
        digest = next((d for d, block in self._blocks.items() if not self._pages.users(block)), None)
        if digest is None:
            raise KeyError("every cached block is in use")
        self._pages.uncache_block(self._blocks.pop(digest))

    def clear(self) -> None:
        """Empty the index; blocks in use stay with their sequences."""
        while self._blocks:
            self._pages.uncache_block(self._blocks.popitem()[1])

    def _touch(self, chain: Sequence[bytes]) -> None:
        for digest in reversed(chain):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)


def _chain(ids: Sequence[int]) -> Iterator[bytes]:
    """A hash of each full block of `ids` and of all tokens before it."""
    digest = b""
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        digest = blake2b(digest + array("q", ids[at : at + BLOCK]).tobytes(), digest_size=16).digest()
        yield digest
