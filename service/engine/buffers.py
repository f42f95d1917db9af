"""The inputs of a pass besides weights and cache, at addresses that stay the same from opening to release."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.paged import PagedKV, SequenceKV, blocks_for
from ..kernels.forward_batch import FEW_ROWS, DecodeBatch, ForwardBatch, PackedPrompts, PrefillChunk, Slots, VerifyPass
from ..memory.lease import Lease, carved_bytes
from ..model.layers import Decoder, Scratch

# The most sequences of a decode step. Up to this many rows a step is bound by reading the weights once.
MAX_BATCH = FEW_ROWS


def _put(target: torch.Tensor, values: Sequence[int] | Sequence[tuple[int, int]]) -> None:
    """Copy whole numbers into an input of a pass. On the host without a temporary tensor, which would take ten times as
    long."""
    if target.is_cpu:
        target.numpy()[...] = values
    else:
        target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)


class SlotBuffers:
    """Where a pass of up to `rows` sequences reads and writes recurrent states: int64 [2, rows]."""

    def __init__(self, lease: Lease, rows: int) -> None:
        self._slots = lease.carve((2, rows), torch.int64).zero_()
        self._by_sequence = self._slots.t()
        self._held: list[tuple[int, int]] = []

    @staticmethod
    def nbytes(rows: int) -> int:
        """Bytes, alignment included."""
        return carved_bytes((2, rows), torch.int64)

    def views(self, count: int) -> Slots:
        """Those of the first `count` sequences."""
        return Slots(self._slots[0, :count], self._slots[1, :count])

    def fill(self, slots: list[tuple[int, int]]) -> None:
        """Copy in source and target of each sequence, where they changed; from step to step they rarely do."""
        if self._held[: len(slots)] != slots:
            _put(self._by_sequence[: len(slots)], slots)
            self._held = [*slots, *self._held[len(slots) :]]


class DecodeBuffers:
    """The inputs of a decode step: ids int64 [MAX_BATCH], positions int32 [MAX_BATCH], tables int32 [MAX_BATCH, blocks
    per sequence].

    `fill` copies in what changes from step to step; all copies from the host are there, and none waits for the device.
    `prepare` is the host's work after it, such as reading rows of a table. A `prepared` `step` is device work only. Its
    shapes depend on `batch` alone (and the bound `longest`, which no shape need depend on) and it looks at no value, so
    it can be captured as a CUDA graph per batch and bound, and replayed after each `fill`. Rows that a graph has beyond
    the sequences repeat the first one: they write the same numbers to the same addresses. Entries of a table beyond a
    sequence's blocks are those of an earlier sequence or 0: valid blocks, never used.
    """

    def __init__(self, lease: Lease, network: Decoder, kv: PagedKV, scratch: Scratch, *, turned: bool = False) -> None:
        """`turned`: the model reads pictures, so rotary positions differ from rows."""
        self.ids = lease.carve((MAX_BATCH,), torch.int64).zero_()
        self.positions = lease.carve((MAX_BATCH,), torch.int32).zero_()
        self.turns = lease.carve((MAX_BATCH,), torch.int32).zero_() if turned else self.positions
        self.tables = lease.carve((MAX_BATCH, kv.table_width), torch.int32).zero_()
        self._slots = SlotBuffers(lease, MAX_BATCH) if kv.states is not None else None
        self._network = network
        self._kv = kv
        self._scratch = scratch
        self._ids = [self.ids[:batch] for batch in range(MAX_BATCH + 1)]
        self._positions = [self.positions[:batch] for batch in range(MAX_BATCH + 1)]
        self._turns = [self.turns[:batch] if turned else None for batch in range(MAX_BATCH + 1)]
        slots = [self._slots.views(batch) if self._slots else None for batch in range(MAX_BATCH + 1)]
        self._steps = [
            DecodeBatch(self.positions[:batch], self.tables[:batch], 0, slots[batch], turns=self._turns[batch])
            for batch in range(MAX_BATCH + 1)
        ]
        self._checks = [
            VerifyPass(self.positions[:count], self.tables[:1], 0, slots[count], start=0, turns=self._turns[count])
            for count in range(MAX_BATCH + 1)
        ]
        # Whose table, in which version, each row of `tables` holds.
        self._held: list[tuple[SequenceKV | None, int]] = [(None, 0)] * MAX_BATCH

    @staticmethod
    def nbytes(context: int, *, recurrent: bool, turned: bool = False) -> int:
        """Bytes for sequences of up to `context` tokens, with recurrent states or without, alignment included."""
        tables = carved_bytes((MAX_BATCH, blocks_for(context)), torch.int32)
        slots = SlotBuffers.nbytes(MAX_BATCH) if recurrent else 0
        positions = carved_bytes((MAX_BATCH,), torch.int32) * (2 if turned else 1)
        return carved_bytes((MAX_BATCH,), torch.int64) + positions + tables + slots

    def fill(self, sequences: Sequence[SequenceKV], tokens: Sequence[int], batch: int | None = None) -> int:
        """Put token i after sequence i; rows up to `batch` (default: as many as sequences) repeat the first. Returns
        the largest length.

        Every sequence gets room for its token, none is advanced. Raises RequestError where one is at its capacity.
        """
        positions = self.reserve(sequences, batch or len(sequences))
        count = len(positions)
        ids = self._steps[count].ids = [*tokens, *[tokens[0]] * (count - len(tokens))]
        _put(self._ids[count], ids)
        _put(self._positions[count], positions)
        return max(positions) + 1

    def reserve(self, sequences: Sequence[SequenceKV], batch: int) -> list[int]:
        """Reserve a block for every sequence's next token and copy in its table; returns the tokens' positions. `fill`
        calls it."""
        positions = []
        for row, sequence in enumerate(sequences):
            sequence.ensure(1)
            positions.append(sequence.length)
            self._hold_table(row, sequence)
        if self._slots is not None:
            slots = [sequence.slots for sequence in sequences]
            self._slots.fill(slots + slots[:1] * (batch - len(sequences)))
        missing = batch - len(sequences)
        for row in range(len(sequences), batch):
            self._hold_table(row, sequences[0])
        turns = self._turns[batch]
        if turns is not None:
            turned = [position + sequence.shift for position, sequence in zip(positions, sequences, strict=True)]
            _put(turns, turned + turned[:1] * missing)
        return positions + positions[:1] * missing

    def fill_verify(self, sequence: SequenceKV, ids: Sequence[int]) -> tuple[torch.Tensor, VerifyPass]:
        """Put up to MAX_BATCH `ids` after one sequence, which can then be advanced by as many of them as are accepted.

        It gets blocks for them and is not advanced. Raises RequestError beyond its capacity, MemoryFull for more than
        are `verifiable`.
        """
        count, start = len(ids), sequence.length
        sequence.ensure(count, verify=True)
        self._hold_table(0, sequence)
        _put(self._ids[count], ids)
        _put(self._positions[count], range(start, start + count))
        turns = self._turns[count]
        if turns is not None:
            _put(turns, range(start + sequence.shift, start + sequence.shift + count))
        if self._slots is not None:
            self._slots.fill(sequence.verify_slots)
        rows = self._checks[count]
        rows.start, rows.longest, rows.ids = start, start + count, ids
        return self._ids[count], rows

    def prepare(self, batch: int, tokens: Sequence[int], *, verify: bool = False) -> None:
        """The host's work for a step whose ids are filled in, before its device work: see Decoder.prepare. `tokens`:
        the ids, if known.

        `verify`: the pass is one that `fill_verify` has filled in.
        """
        rows = self._batch(batch, verify)
        rows.ids = tokens
        self._network.prepare(self._ids[batch], rows, self._kv, self._scratch)

    def step(self, batch: int, longest: int, *, prepared: bool = False, verify: bool = False) -> torch.Tensor:
        """Scores [batch, vocab] after the tokens of `fill` or `fill_verify`; valid until the next pass."""
        rows = self._batch(batch, verify)
        rows.longest = longest
        state = self._network.forward(self._ids[batch], rows, self._kv, self._scratch, prepared=prepared)
        return self._network.logits(state, self._scratch, rows)

    def _batch(self, count: int, verify: bool) -> ForwardBatch:
        return self._checks[count] if verify else self._steps[count]

    def _hold_table(self, row: int, sequence: SequenceKV) -> None:
        held, version = self._held[row]
        if held is sequence and version == sequence.version:
            return
        copy_table(sequence, self.tables[row])
        self._held[row] = (sequence, sequence.version)


class ChunkBuffers:
    """The inputs of a prefill chunk: ids int64 [tokens], all positions int32 [context], tables int32 [MAX_BATCH, blocks
    per sequence].

    A chunk is of one sequence, or, where there are no recurrent states, of up to MAX_BATCH sequences, one after the
    other.
    """

    def __init__(self, lease: Lease, kv: PagedKV, tokens: int) -> None:
        self.ids = lease.carve((tokens,), torch.int64).zero_()
        self.positions = lease.carve((kv.context,), torch.int32)
        torch.arange(kv.context, dtype=torch.int32, out=self.positions)
        self.tables = lease.carve((MAX_BATCH, kv.table_width), torch.int32).zero_()
        self._slots = SlotBuffers(lease, 1) if kv.states is not None else None
        self._held: list[tuple[SequenceKV | None, int]] = [(None, 0)] * MAX_BATCH

    @staticmethod
    def nbytes(context: int, tokens: int, *, recurrent: bool) -> int:
        """Bytes for chunks of `tokens` of sequences of up to `context`, with recurrent states or without, alignment
        included."""
        return (
            carved_bytes((tokens,), torch.int64)
            + carved_bytes((context,), torch.int32)
            + carved_bytes((MAX_BATCH, blocks_for(context)), torch.int32)
            + (SlotBuffers.nbytes(1) if recurrent else 0)
        )

    def fill(
        self, sequence: SequenceKV, ids: Sequence[int], before: Sequence[int] = ()
    ) -> tuple[torch.Tensor, PrefillChunk]:
        """Put `ids` after the sequence, which gets blocks for them and is not advanced. Raises RequestError beyond its
        capacity.

        `before`: the ids that the sequence ends with, as far as they are known. A chunk may be stopped: until it is
        advanced the sequence does not change.
        """
        rows = self._reserve(0, sequence, ids)
        rows.before = before
        if self._slots is not None:
            self._slots.fill([sequence.slots])
            rows.slots = self._slots.views(1)
        return self._take(ids), rows

    def fill_several(
        self, sequences: Sequence[SequenceKV], pieces: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, PackedPrompts]:
        """As `fill`, piece i after sequence i."""
        chunks: list[tuple[slice, PrefillChunk]] = []
        ids: list[int] = []
        for row, (sequence, piece) in enumerate(zip(sequences, pieces, strict=True)):
            chunks.append((slice(len(ids), len(ids) + len(piece)), self._reserve(row, sequence, piece)))
            ids += piece
        return self._take(ids), PackedPrompts.pack(chunks)

    def _take(self, ids: Sequence[int]) -> torch.Tensor:
        chunk = self.ids[: len(ids)]
        return chunk.copy_(torch.tensor(ids, dtype=torch.int64), non_blocking=True)

    def _reserve(self, row: int, sequence: SequenceKV, ids: Sequence[int]) -> PrefillChunk:
        """Reserve blocks for `ids` and copy in the sequence's table."""
        start, end = sequence.length, sequence.length + len(ids)
        sequence.ensure(len(ids), undo=True)
        table = self.tables[row : row + 1]
        if self._held[row] != (sequence, sequence.version):
            copy_table(sequence, table[0])
            self._held[row] = (sequence, sequence.version)
        return PrefillChunk(self.positions[start:end], table, end, ids=ids, start=start)


class FewRows:
    """The inputs of passes of up to MAX_BATCH rows of one sequence, which keeps all of them; at the same addresses each
    time."""

    def __init__(self, lease: Lease, kv: PagedKV) -> None:
        self.ids = lease.carve((MAX_BATCH,), torch.int64).zero_()
        positions = lease.carve((MAX_BATCH,), torch.int32).zero_()
        table = lease.carve((1, kv.table_width), torch.int32).zero_()
        self._slots = SlotBuffers(lease, 1) if kv.states is not None else None
        slots = self._slots.views(1) if self._slots else None
        self.rows = [PrefillChunk(positions[:count], table, 0, slots, start=0) for count in range(MAX_BATCH + 1)]
        self._held: tuple[SequenceKV | None, int] = (None, 0)

    @staticmethod
    def nbytes(context: int, *, recurrent: bool) -> int:
        """Bytes for sequences of up to `context` tokens, with recurrent states or without, alignment included."""
        held = carved_bytes((MAX_BATCH,), torch.int64) + carved_bytes((MAX_BATCH,), torch.int32)
        return held + carved_bytes((1, blocks_for(context)), torch.int32) + (SlotBuffers.nbytes(1) if recurrent else 0)

    def fill(self, sequence: SequenceKV, count: int, ids: Sequence[int] = ()) -> None:
        """The next pass takes `count` ids after the sequence, which gets blocks for them: `ids`, or those that are in
        the buffer."""
        rows, start = self.rows[count], sequence.length
        sequence.ensure(count, undo=True)  # other blocks of the same kernel may still read the state
        if ids:
            _put(self.ids[:count], ids)
        _put(rows.positions, range(start, start + count))
        rows.start, rows.longest, rows.ids = start, start + count, ids
        if self._held != (sequence, sequence.version):
            copy_table(sequence, rows.tables[0])
            self._held = (sequence, sequence.version)
        if self._slots is not None:
            self._slots.fill([sequence.slots])


def copy_table(sequence: SequenceKV, row: torch.Tensor) -> None:
    """Copy the ids of the sequence's blocks to the start of `row`."""
    _put(row[: len(sequence.table)], sequence.table)
