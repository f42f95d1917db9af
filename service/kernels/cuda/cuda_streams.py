"""Joints of residual streams on CUDA: four kernels to read them in a decode step, and to let in before what a layer found.

One behind the other, norms, mixes and injections take 6.0 us a joint of a step of four streams of 2,560 on an H200, and 53 us for 1,024
rows; 3.5 and 39 us where the norms let in what waits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...quant.weight import QuantizedWeight
from ..operands import JointRows, StreamJoint
from .cuda_plan import TILE_ROWS, on_grid
from .cuda_products import FusedProducts, power
from .triton_streams import inject_found, mix_streams, norm_streams

# Channels of a program that mixes, and of one that lets in. Mixes of 1,024 take 2.4 in place of 1.7 us for 8 rows on an H200.
MIXED, INJECTED = 512, 1024


class StreamKernels(FusedProducts):
    """See StreamJoint."""

    def read_streams(self, joint: StreamJoint, at: JointRows) -> bool:
        return self._read(joint, at, waiting=False)

    def inject_and_read(self, joint: StreamJoint, at: JointRows) -> bool:
        return self._read(joint, at, waiting=True)

    def _read(self, joint: StreamJoint, at: JointRows, *, waiting: bool) -> bool:
        if not self.fuses_streams(joint):
            return False
        count, hidden = at.read.shape
        inject = joint.inject if isinstance(joint.inject, torch.Tensor) else None
        parts = self._parts(at.streams, count, joint.count)
        early = {"PDL": self.device.early, **self.launch}
        on_grid(norm_streams, (count, joint.count))(
            at.streams, joint.norm.weight, at.normed if inject is None else inject, at.normed, parts, at.weights, at.found,
            joint.norm.eps, STREAMS=joint.count, HIDDEN=hidden, BLOCK=power(hidden), INJECT=inject is not None, WAITING=waiting,
            num_warps=4, **early,
        )  # fmt: skip
        shape = self.shape(joint.down)
        if count <= TILE_ROWS and not isinstance(shape, str):
            self.few(at.normed, joint.down, shape, at.low, fold=1.0 / joint.count)
        else:
            F.silu(self.linear(at.normed, joint.down, at.low).div_(joint.count), inplace=True)
        self.linear(at.low, joint.up, at.mixed)
        on_grid(mix_streams, (count, -(-hidden // MIXED)))(
            at.mixed, at.normed, parts, at.read, at.weights, at.found,
            STREAMS=joint.count, ROOM=power(joint.count), HIDDEN=hidden, BLOCK=MIXED, INJECT=inject is not None, num_warps=4, **early,
        )  # fmt: skip
        return True

    def inject(self, at: JointRows) -> None:
        count, streams = at.weights.shape
        hidden = at.found.shape[1]
        on_grid(inject_found, (count, -(-hidden // INJECTED)))(
            at.streams, at.weights, at.found,
            STREAMS=streams, HIDDEN=hidden, BLOCK=INJECTED, PDL=self.device.early, num_warps=4, **self.launch,
        )  # fmt: skip

    def fuses_streams(self, joint: StreamJoint) -> bool:
        """Whether it runs in fused kernels; one that does not is told of once."""
        if isinstance(joint.inject, QuantizedWeight):
            self.tell("a quantized joint of streams")
            return False
        return not any(isinstance(self.shape(weight), str) for weight in (joint.down, joint.up))

    def _parts(self, like: torch.Tensor, count: int, streams: int) -> torch.Tensor:
        if count <= TILE_ROWS:
            return self.kept("streams parts", torch.float32, like, count, streams, streams)
        return torch.empty((count, streams, streams), dtype=torch.float32, device=like.device)
