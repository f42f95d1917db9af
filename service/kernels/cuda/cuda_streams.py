"""Hyper-connections on CUDA: a decode step reads the residual streams in four kernels, which also inject what the last
layer found.

For four streams of 2,560 on an H200, separate norms, mixes and injections take 6.0 us per connection of a decode step
and 53 us for 1,024 rows. With the injection in the norm kernel they take 3.5 and 39 us.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...quant.weight import QuantizedWeight
from ..operands import ConnectionOperands, HyperConnection
from .cuda_plan import TILE_ROWS, on_grid
from .cuda_products import FusedProducts, power
from .triton_streams import inject_found, mix_streams, norm_streams

# Channels per program that mixes, and per program that injects. Mixes of 1,024 take 2.4 instead of 1.7 us for 8 rows on
# an H200.
MIXED, INJECTED = 512, 1024


class StreamKernels(FusedProducts):
    """Kernels of hyper-connections, see HyperConnection."""

    def read_connection(self, connection: HyperConnection, at: ConnectionOperands) -> bool:
        return self._read(connection, at, waiting=False)

    def inject_and_read(self, connection: HyperConnection, at: ConnectionOperands) -> bool:
        return self._read(connection, at, waiting=True)

    def _read(self, connection: HyperConnection, at: ConnectionOperands, *, waiting: bool) -> bool:
        if not self.fuses_connection(connection):
            return False
        count, hidden = at.read.shape
        inject = connection.inject if isinstance(connection.inject, torch.Tensor) else None
        parts = self._parts(at.streams, count, connection.count)
        early = {"PDL": self.device.early, **self.launch}
        on_grid(norm_streams, (count, connection.count))(
            at.streams, connection.norm.weight, at.normed if inject is None else inject, at.normed, parts, at.weights,
            at.found, connection.norm.eps, STREAMS=connection.count, HIDDEN=hidden, BLOCK=power(hidden),
            INJECT=inject is not None, WAITING=waiting, num_warps=4, **early,
        )  # fmt: skip
        shape = self.shape(connection.down)
        if count <= TILE_ROWS and not isinstance(shape, str):
            self.few_rows(at.normed, connection.down, shape, at.low, fold=1.0 / connection.count)
        else:
            F.silu(self.linear(at.normed, connection.down, at.low).div_(connection.count), inplace=True)
        self.linear(at.low, connection.up, at.mixed)
        on_grid(mix_streams, (count, -(-hidden // MIXED)))(
            at.mixed, at.normed, parts, at.read, at.weights, at.found,
            STREAMS=connection.count, PADDED=power(connection.count), HIDDEN=hidden, BLOCK=MIXED,
            INJECT=inject is not None, num_warps=4, **early,
        )  # fmt: skip
        return True

    def inject(self, at: ConnectionOperands) -> None:
        count, streams = at.weights.shape
        hidden = at.found.shape[1]
        on_grid(inject_found, (count, -(-hidden // INJECTED)))(
            at.streams, at.weights, at.found,
            STREAMS=streams, HIDDEN=hidden, BLOCK=INJECTED, PDL=self.device.early, num_warps=4, **self.launch,
        )  # fmt: skip

    def fuses_connection(self, connection: HyperConnection) -> bool:
        """Whether fused kernels support it. What they do not support is logged once."""
        if isinstance(connection.inject, QuantizedWeight):
            self.tell("a quantized connection of streams")
            return False
        return not any(isinstance(self.shape(weight), str) for weight in (connection.down, connection.up))

    def _parts(self, like: torch.Tensor, count: int, streams: int) -> torch.Tensor:
        if count <= TILE_ROWS:
            return self.static_buffer("streams parts", torch.float32, like, count, streams, streams)
        return torch.empty((count, streams, streams), dtype=torch.float32, device=like.device)
