"""The end of a prompt whose prefix is in the cache, as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..cache.paged import PagedKV, SequenceKV, blocks_for
from ..kernels.forward_batch import FEW_ROWS, ForwardBatch, PrefillChunk
from ..memory.lease import Lease, carved_bytes
from ..model.layers import Decoder, Scratch
from .buffers import copy_table
from .cuda_graphs import Graphs

# A pass is padded to the next of these rows. Beyond the last, computing takes longer than launching.
SIZES = (16, 32, 64)


class ShortPasses:
    """Prefill passes of more than FEW_ROWS and up to 64 rows of one sequence, at addresses that stay the same.

    Rows beyond the ids repeat the last one: the same token at the same position writes the same numbers. Only for
    networks that leave nothing but keys and values, and whose steps can be captured.
    """

    def __init__(self, lease: Lease, network: Decoder, kv: PagedKV, scratch: Scratch, graphs: Graphs) -> None:
        self._ids = lease.carve((SIZES[-1],), torch.int64).zero_()
        self._positions = lease.carve((SIZES[-1],), torch.int32).zero_()
        self._table = lease.carve((1, kv.table_width), torch.int32).zero_()
        self._network, self._kv, self._scratch, self._graphs = network, kv, scratch, graphs
        self._held: tuple[SequenceKV | None, int] = (None, 0)

    @staticmethod
    def nbytes(context: int) -> int:
        """Bytes for sequences of up to `context` tokens, alignment included."""
        table = carved_bytes((1, blocks_for(context)), torch.int32)
        return carved_bytes((SIZES[-1],), torch.int64) + carved_bytes((SIZES[-1],), torch.int32) + table

    @staticmethod
    def takes(rows: int) -> bool:
        """Whether a pass has so many rows."""
        return FEW_ROWS < rows <= SIZES[-1]

    def forward(self, sequence: SequenceKV, ids: Sequence[int]) -> torch.Tensor:
        """The residual [len(ids), hidden] of ids after the sequence, which gets blocks for them and is not advanced.
        Valid until the next pass. Raises RequestError beyond its capacity."""
        count, start = len(ids), sequence.length
        size = next(size for size in SIZES if size >= count)
        sequence.ensure(count, undo=True)
        if self._held != (sequence, sequence.version):
            copy_table(sequence, self._table[0])
            self._held = (sequence, sequence.version)
        rows = [min(row, count - 1) for row in range(size)]
        self._ids[:size].copy_(torch.tensor([ids[row] for row in rows]), non_blocking=True)
        positions = torch.tensor([start + row for row in rows], dtype=torch.int32)
        self._positions[:size].copy_(positions, non_blocking=True)
        self._graphs.run(("prefill", size), partial(self._pass, size))
        return self._scratch.rows(size)["x"][:count]

    def close(self) -> None:
        """Drop every tensor."""
        self._held = (None, 0)
        del self._network, self._kv, self._scratch, self._graphs, self._ids, self._positions, self._table

    def _rows(self, size: int) -> ForwardBatch:
        """The rows of a pass, whose positions a graph reads from the device alone."""
        return PrefillChunk(self._positions[:size], self._table, self._kv.context, start=0)

    def _pass(self, size: int) -> None:
        self._network.forward(self._ids[:size], self._rows(size), self._kv, self._scratch)


def short_passes(lease: Lease, network: Decoder, kv: PagedKV, scratch: Scratch, graphs: Graphs) -> ShortPasses | None:
    """Short passes where the network allows them."""
    plain = kv.states is None and not network.early and network.captured
    return ShortPasses(lease, network, kv, scratch, graphs) if plain else None
