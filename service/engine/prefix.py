"""Which blocks of keys and values begin which prompts: an index by the hash of full blocks, and the order in which they give way."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

from ..kernels.forward_batch import BLOCK


class Keeping(Protocol):
    """What the index asks of the paged cache; PagedKV is one."""

    def cache_block(self, block: int, /) -> None: ...

    def uncache_block(self, block: int, /) -> None: ...

    def users(self, block: int, /) -> int: ...

    def inherit(self, known: int, block: int, /) -> None: ...


class PrefixIndex:
    """Blocks by the chain of tokens that they end: each one's hash covers all tokens before it, so a block stands for a whole prefix.

    A block is kept after its sequences have closed, until the cache needs it: the longest unused one goes first, and of a chain its end
    goes before its beginning. What is kept is never written again. Invariant: in `_blocks` a chain's beginning stands behind its end.
    """

    def __init__(self, pages: Keeping) -> None:
        self._pages = pages
        self._blocks: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._blocks)

    def match(self, ids: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning of `ids`, in order. The last token is never among them: its scores are wanted."""
        found: list[bytes] = []
        for digest in _chain(ids[: len(ids) - 1]):
            if digest not in self._blocks:
                break
            found.append(digest)
        self._touch(found)
        return [self._blocks[digest] for digest in found]

    def insert(self, ids: Sequence[int], table: Sequence[int]) -> None:
        """Remember the full blocks of a sequence that holds `ids`; `table` are its blocks. A prefix that is known keeps its own blocks."""
        chain = list(_chain(ids))
        for digest, block in zip(chain, table, strict=False):
            if digest not in self._blocks:
                self._pages.cache_block(block)
                self._blocks[digest] = block
            elif self._blocks[digest] != block:
                self._pages.inherit(self._blocks[digest], block)
        self._touch(chain)

    def evict(self) -> None:
        """Forget the longest unused block that no sequence uses. Raises KeyError when there is none."""
        digest = next((d for d, block in self._blocks.items() if not self._pages.users(block)), None)
        if digest is None:
            raise KeyError("every known block is in use")
        self._pages.uncache_block(self._blocks.pop(digest))

    def clear(self) -> None:
        """Forget all; blocks in use stay with their sequences."""
        while self._blocks:
            self._pages.uncache_block(self._blocks.popitem()[1])

    def _touch(self, chain: Sequence[bytes]) -> None:
        for digest in reversed(chain):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)


def _chain(ids: Sequence[int]) -> Iterator[bytes]:
    """The hash of each full block of `ids` and of everything before it."""
    digest = b""
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        digest = blake2b(digest + array("q", ids[at : at + BLOCK]).tobytes(), digest_size=16).digest()
        yield digest
