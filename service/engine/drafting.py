"""Guesses of the layer for multi-token prediction, for the one text that is written alone.

The layer has a cache of its own with one sequence. It reads nothing until it is asked: of what the network read last, the rows that it goes
on from are held back, at most HELD of them, and the first guess reads those of them that it has not read. So a text that is never guessed
at pays for a copy of a row, a prompt's beginning is not read twice, and nothing has to be cut when a guess was wrong: what stands behind
the last certain token is written to a fork that is closed again. Where rows are missing, for another text was written meanwhile or the
sequence is full, it begins anew with those that are held; guesses may then be worse, texts are the same.
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

# Rows that are held back. What a first guess reads must be worth the guess: 8 rows take twice as long as one, 32 rows seven times.
HELD = FEW_ROWS
# Tokens that the layer looks back at most: 8 MiB of Qwen3.8-Flash-Next's keys and values.
REACH = 4096
# What a guess of several tokens writes beside the sequence, and stops at: the blocks of a fork that begins inside one.
BESIDE = 2 * BLOCK


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What guesses take: the layer's cache for `context` tokens, and rows of `wide` numbers of the network's residual."""

    kv: KVShape
    tail: Pieces
    context: int
    wide: int
    rows: int

    @property
    def held(self) -> int:
        return min(HELD, self.rows)

    @property
    def states(self) -> StateShape | None:
        """The sequence's, a fork's, and the spare one."""
        return StateShape((self.tail,), 3, 1) if self.tail else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV lease."""
        return self.kv.nbytes(self.context) + (self.states.nbytes if self.states else 0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch lease."""
        rows = FewRows.nbytes(self.context, recurrent=self.states is not None)
        return carved_bytes((self.held, self.wide), self.kv.dtype) + rows + 2 * carved_bytes((HELD,), torch.int64)

    def cache(self, lease: Lease) -> PagedKV:
        """The layer's cache, in the KV lease."""
        if self.states is None:
            return PagedKV(lease, self.kv, self.context)
        return HybridKV(lease, self.kv, RecurrentStates(lease, self.states), self.context)


class Drafting:
    """The layer at work. Not thread-safe: its owner holds the lock."""

    def __init__(
        self, draft: Draft, shape: DraftShape, scratch: Scratch, leases: tuple[Lease, Lease], graphs: Graphs | None = None
    ) -> None:
        """`leases`: of keys and values, and of buffers. `graphs`: those of the session, where it has such."""
        self._draft = draft
        self._cache = shape.cache(leases[0])
        self._scratch = scratch
        self._held = leases[1].carve((shape.held, shape.wide), shape.kv.dtype)
        self._rows = FewRows(leases[1], self._cache)
        self._likeliest, self._found = (leases[1].carve((HELD,), torch.int64).zero_() for _ in range(2))
        self._graphs = graphs if draft.captured else None
        self._sequence: SequenceKV | None = None
        self._since = 0  # the place in the text of the sequence's first row
        self._text: SequenceKV | None = None
        # The text's tokens at places _base.. whose rows are held.
        self._base = 0
        self._tokens: list[int] = []

    @property
    def cache(self) -> PagedKV:
        """The layer's own cache."""
        return self._cache

    def see(self, text: SequenceKV, start: int, ids: Sequence[int], rows: torch.Tensor) -> None:
        """The network has read `ids` at the places from `start` on of a text; `rows` [at least 1, wide] are what the layer goes on from
        behind the last of them. What stood at these places before is forgotten."""
        count = min(len(ids), rows.shape[0], self._held.shape[0])
        start, ids, rows = start + len(ids) - count, ids[len(ids) - count :], rows[rows.shape[0] - count :]
        if self._text is not text or not self._base <= start <= self._base + len(self._tokens):
            self._text, self._base = text, start
            self._tokens.clear()
            self._forget()
        before = self._tokens[start - self._base :]
        if any(token != known and start + i <= self._reached for i, (token, known) in enumerate(zip(ids, before, strict=False))):
            self._forget()  # it has read a text that goes on otherwise
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
        """Rows that a guess behind the token at place `latest` reads first; 0 where none can be made."""
        if self._text is not text or not self._base < latest <= self._base + len(self._tokens):
            return 0
        return latest - max(self._base, self._reached if self._base <= self._reached < latest else 0)

    @property
    def _reached(self) -> int:
        """The place of the next row that the sequence has not read."""
        return self._since + self._sequence.length if self._sequence is not None else -1

    def guess(self, text: SequenceKV, latest: int, token: int, count: int) -> list[int]:
        """The likeliest `count` tokens behind `token`, which stands at the place `latest`; none where no row is held for that."""
        if not self.unread(text, latest):
            return []
        first = self._reached
        full = self._sequence is not None and self._sequence.length + latest - first + BESIDE > self._sequence.capacity
        if self._sequence is None or full or not self._base <= first < latest:
            first, self._since = self._base, self._base
            self._forget()
            self._sequence = self._cache.open(self._cache.context - BESIDE)
        self._tokens = self._tokens[: latest - self._base]
        ids = [*self._tokens[first + 1 - self._base :], token]
        self._scratch.rows(len(ids))["draft_hidden"].copy_(self._held[first - self._base : latest - self._base])
        self._read(self._sequence, len(ids), 0, ids)
        if count > 1:
            with self._sequence.fork(self._sequence.length + count - 1) as beside:
                for place in range(1, count):
                    self._read(beside, 1, place)
        return self._found[:count].tolist()

    def _read(self, sequence: SequenceKV, count: int, place: int, ids: Sequence[int] = ()) -> None:
        """Read `count` rows: the likeliest token behind them is found number `place`. Of no `ids` that of the pass before is read, behind
        the row that the layer went on from there; nobody waits for either."""
        self._rows.fill(sequence, count, ids)
        work = partial(self._pass, count)
        if self._graphs is None:
            work()
        else:
            self._graphs.run(("draft", count), work)
        sequence.advance(count)
        self._found[place : place + 1].copy_(self._likeliest[:1])

    def _pass(self, count: int) -> None:
        """Rows and ids that were brought in, and then as what the next pass may read the likeliest token and the row it came of."""
        ids = self._rows.ids
        state = self._draft.forward(ids[:count], self._rows.rows[count], self._cache, self._scratch)
        scores, row = self._draft.last(state, self._scratch)
        if scores.is_cpu:
            self._likeliest[0] = int(scores[0].numpy().argmax())  # torch's takes 0.4 ms for 152,000 scores, this one 0.02
        else:
            torch.argmax(scores[0], dim=0, keepdim=True, out=self._likeliest[:1])
        ids[:1].copy_(self._likeliest[:1])
        self._scratch.rows(1)["draft_hidden"].copy_(row)

    def _forget(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
        self._sequence = None

    def close(self) -> None:
        """Let go of every tensor; it cannot be used afterwards."""
        self._forget()
        del self._draft, self._cache, self._scratch, self._held, self._rows, self._likeliest, self._found, self._text, self._graphs
