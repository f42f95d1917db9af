"""Draft tokens of the layer for multi-token prediction ("draft layer"), for a sequence that decodes alone.

The layer has a KV cache of its own with one sequence. It computes nothing until it is asked: the network's last
residual rows, which the layer starts from, are kept, at most HELD_ROWS of them, and the next draft prefills those that
it has not read. So a text that is never drafted costs a copy of one row per token, a prompt's prefix is not prefilled
twice, and nothing has to be cut back when a draft token is rejected: drafting several tokens writes to a fork of the
sequence, which is closed again. Where rows are missing, because another text was written meanwhile or the sequence is
full, the layer starts over from the rows that are kept. Its draft tokens may then be worse; the completion is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..cache.hybrid_kv import HybridKV
from ..cache.paged import KVShape, PagedKV, SequenceKV
from ..cache.recurrent import Pieces, RecurrentStates, StateShape
from ..kernels.forward_batch import BLOCK, FEW_ROWS
from ..memory.lease import Lease, carved_bytes
from ..model.draft import Draft
from ..model.layers import Scratch
from .buffers import FewRows
from .cuda_graphs import Graphs

# Residual rows that are kept. The layer prefills them before its first draft token: 8 rows take twice as long as one,
# 32 seven times.
HELD_ROWS = FEW_ROWS
# The layer's context in tokens: 8 MiB of Qwen3.8-Flash-Next's keys and values.
DRAFT_CONTEXT = 4096
# Tokens reserved for the fork that a draft of several tokens writes to: it may start inside one block and end inside
# the next.
FORK_TOKENS = 2 * BLOCK


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of the draft layer's cache for `context` tokens, and of the kept rows, each of `wide` numbers of the
    network's residual."""

    kv: KVShape
    tail: Pieces
    context: int
    wide: int
    rows: int

    @property
    def held(self) -> int:
        return min(HELD_ROWS, self.rows)

    @property
    def states(self) -> StateShape | None:
        """Recurrent states of the sequence, of a fork, and one spare."""
        return StateShape((self.tail,), 3, 1) if self.tail else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV lease."""
        return self.kv.nbytes(self.context) + (self.states.nbytes if self.states else 0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch lease."""
        rows = FewRows.nbytes(self.context, recurrent=self.states is not None)
        return carved_bytes((self.held, self.wide), self.kv.dtype) + rows + 2 * carved_bytes((HELD_ROWS,), torch.int64)

    def cache(self, lease: Lease) -> PagedKV:
        """The layer's cache, in the KV lease."""
        if self.states is None:
            return PagedKV(lease, self.kv, self.context)
        return HybridKV(lease, self.kv, RecurrentStates(lease, self.states), self.context)


class Drafting:
    """Runs the draft layer. Not thread-safe: its owner holds the lock."""

    def __init__(
        self,
        draft: Draft,
        shape: DraftShape,
        scratch: Scratch,
        leases: tuple[Lease, Lease],
        graphs: Graphs | None = None,
    ) -> None:
        """`leases`: of keys and values, and of buffers. `graphs`: the session's, None for none."""
        self._draft = draft
        self._cache = shape.cache(leases[0])
        self._scratch = scratch
        self._held = leases[1].carve((shape.held, shape.wide), shape.kv.dtype)
        self._rows = FewRows(leases[1], self._cache)
        self._likeliest, self._draft_tokens = (leases[1].carve((HELD_ROWS,), torch.int64).zero_() for _ in range(2))
        self._graphs = graphs if draft.captured else None
        self._sequence: SequenceKV | None = None
        self._first = 0  # the text position of the sequence's first row
        self._text: SequenceKV | None = None
        # The text's tokens from position _base on whose rows are kept.
        self._base = 0
        self._tokens: list[int] = []

    @property
    def cache(self) -> PagedKV:
        """The layer's own cache."""
        return self._cache

    def see(self, text: SequenceKV, start: int, ids: Sequence[int], rows: torch.Tensor) -> None:
        """The network has computed `ids` at the text positions from `start` on; `rows` [at least 1, wide] are its
        residual rows of the last of them. What was kept for these positions before is dropped."""
        count = min(len(ids), rows.shape[0], self._held.shape[0])
        start, ids, rows = start + len(ids) - count, ids[len(ids) - count :], rows[rows.shape[0] - count :]
        if self._text is not text or not self._base <= start <= self._base + len(self._tokens):
            self._text, self._base = text, start
            self._tokens.clear()
            self._forget()
        before = self._tokens[start - self._base :]
        if any(
            token != known and start + i <= self._reached
            for i, (token, known) in enumerate(zip(ids, before, strict=False))
        ):
            self._forget()  # it has prefilled tokens that were rejected
        del self._tokens[start - self._base :]
        over = len(self._tokens) + count - self._held.shape[0]
        if over > 0:
            gone = min(len(self._tokens), max(over, self._held.shape[0] // 2))
            kept = self._held[gone : len(self._tokens)].clone()
            self._held[: kept.shape[0]] = kept
            del self._tokens[:gone]
            self._base += gone
        self._held[len(self._tokens) : len(self._tokens) + count] = rows
        self._tokens += ids

    def unread(self, text: SequenceKV, latest: int) -> int:
        """Rows that the layer prefills before it drafts after the token at position `latest`; 0 where it cannot
        draft."""
        if self._text is not text or not self._base < latest <= self._base + len(self._tokens):
            return 0
        return latest - max(self._base, self._reached if self._base <= self._reached < latest else 0)

    @property
    def _reached(self) -> int:
        """The text position of the next row that the sequence has not prefilled."""
        return self._first + self._sequence.length if self._sequence is not None else -1

    def draft(self, text: SequenceKV, latest: int, token: int, count: int) -> list[int]:
        """`count` draft tokens after `token`, which is at text position `latest`; none where no row is kept for it."""
        if not self.unread(text, latest):
            return []
        first = self._reached
        full = (
            self._sequence is not None
            and self._sequence.length + latest - first + FORK_TOKENS > self._sequence.capacity
        )
        if self._sequence is None or full or not self._base <= first < latest:
            first, self._first = self._base, self._base
            self._forget()
            self._sequence = self._cache.open(self._cache.context - FORK_TOKENS)
        self._tokens = self._tokens[: latest - self._base]
        ids = [*self._tokens[first + 1 - self._base :], token]
        self._scratch.rows(len(ids))["draft_hidden"].copy_(self._held[first - self._base : latest - self._base])
        self._read(self._sequence, len(ids), 0, ids)
        if count > 1:
            with self._sequence.fork(self._sequence.length + count - 1) as fork:
                for index in range(1, count):
                    self._read(fork, 1, index)
        return self._draft_tokens[:count].tolist()

    def _read(self, sequence: SequenceKV, count: int, index: int, ids: Sequence[int] = ()) -> None:
        """One pass over `count` rows; the likeliest next token becomes draft token number `index`. Without `ids` the
        pass takes the token and the row that the pass before left on the device, so the host need not wait for them."""
        self._rows.fill(sequence, count, ids)
        work = partial(self._pass, count)
        if self._graphs is None:
            work()
        else:
            self._graphs.run(("draft", count), work)
        sequence.advance(count)
        self._draft_tokens[index : index + 1].copy_(self._likeliest[:1])

    def _pass(self, count: int) -> None:
        """A pass over the rows and ids in the buffers; it leaves the likeliest token and its row there for the next
        pass."""
        ids = self._rows.ids
        state = self._draft.forward(ids[:count], self._rows.rows[count], self._cache, self._scratch)
        scores, row = self._draft.last(state, self._scratch)
        if scores.is_cpu:
            self._likeliest[0] = int(
                scores[0].numpy().argmax()
            )  # torch's takes 0.4 ms for 152,000 scores, this one 0.02
        else:
            torch.argmax(scores[0], dim=0, keepdim=True, out=self._likeliest[:1])
        ids[:1].copy_(self._likeliest[:1])
        self._scratch.rows(1)["draft_hidden"].copy_(row)

    def _forget(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
        self._sequence = None

    def close(self) -> None:
        """Drop every tensor; it cannot be used afterwards."""
        self._forget()
        del (
            self._draft,
            self._cache,
            self._scratch,
            self._held,
            self._rows,
            self._likeliest,
            self._draft_tokens,
            self._text,
            self._graphs,
        )
