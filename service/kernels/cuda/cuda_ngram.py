"""The n-gram block on CUDA after its table lookup: two products and two kernels for a decode step or a verify pass."""

from __future__ import annotations

import torch

from ..operands import NgramOperands, NgramWeights
from .cuda_plan import on_grid
from .cuda_products import FusedProducts, power
from .triton_ngram import add_ngram_rows, gate_streams

# Channels per program that adds rows: it holds the window of each.
CHANNELS = 256


class NgramKernels(FusedProducts):
    """N-gram kernels, see NgramWeights. Everything between the kernels is fp32, except the results of the products."""

    def add_ngrams(self, weights: NgramWeights, at: NgramOperands) -> bool:
        if any(isinstance(self.shape(weight), str) for weight in (weights.key, weights.value)):
            return False
        count, (streams, hidden) = at.embedded.shape[0], weights.key_norm.weight.shape
        keys = self.linear(at.embedded, weights.key, at.keys)
        values = self.linear(at.embedded, weights.value, at.values)
        gates = self.static_buffer("ngram gates", torch.float32, at.embedded, count, streams, 2)
        sizes, early = {"STREAMS": streams, "HIDDEN": hidden}, {"PDL": self.device.early, **self.launch}
        on_grid(gate_streams, (count, streams))(
            keys, values, at.streams, weights.key_norm.weight, weights.query_norm.weight, gates,
            weights.key_norm.eps, weights.query_norm.eps, weights.conv_norm.eps, BLOCK=power(hidden), num_warps=8,
            **sizes, **early,
        )  # fmt: skip
        on_grid(add_ngram_rows, (count, -(-streams * hidden // CHANNELS)))(
            values, gates, weights.conv_norm.weight, weights.taps, at.windows, at.slots.source, at.slots.target,
            at.streams, K=weights.taps.shape[0], APART=weights.apart, BLOCK=CHANNELS, VERIFY=at.verify, num_warps=2,
            **sizes, **early,
        )  # fmt: skip
        return True
