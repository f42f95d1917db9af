"""A residual of several streams: each layer reads a mix of them, weighed number by number, and adds what it found to each by a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kernels.reference import ReferenceKernels
from ..kernels.rows import NormWeight
from ..quant.weight import Weight
from .layers import Layer, Pass, PassRows
from .named import Named
from .shape import DecoderConfig, StreamShape
from .spec import FLOATING, Destination, Source


def wanted(config: DecoderConfig, key: str, name: str, part: int, *, inject: bool) -> Iterator[Destination]:
    """Of one joint `name`; what it injects by is small and keeps its type."""
    shape, hidden = _shape(config), config.widths.hidden
    wide = shape.count * hidden
    norm = Source(name + ".hc_norm.weight", (wide,))
    yield Destination(key + "_norm", (norm,), part, wide=True, turn="plus_one")
    yield Destination(key + "_down", (Source(name + ".input_mix_weight_down.weight", (shape.rank, wide)),), part, bits=8)
    yield Destination(key + "_up", (Source(name + ".input_mix_weight_up.weight", (wide, shape.rank)),), part, bits=8)
    if inject:
        source = Source(name + ".block_inject_weight.weight", (shape.count, wide))
        yield Destination(key + "_inject", (source,), part, bits=FLOATING)


def build(config: DecoderConfig, at: Named, key: str, *, inject: bool) -> GatedResidual:
    """The joint over its weights."""
    shape = _shape(config)
    norm = NormWeight(at.plain(key + "_norm").view(shape.count, config.widths.hidden), config.eps)
    return GatedResidual(shape, norm, at[key + "_down"], at[key + "_up"], at[key + "_inject"] if inject else None)


def _shape(config: DecoderConfig) -> StreamShape:
    if config.streams is None:
        raise ValueError("the family has one residual stream")
    return config.streams


@dataclass(slots=True)
class GatedResidual:
    """norm [streams, hidden], each stream for itself; down [rank, streams * hidden], up [streams * hidden, rank], inject [streams, ..]."""

    shape: StreamShape
    norm: NormWeight
    down: Weight
    up: Weight
    inject: Weight | None

    def mix(self, streams: torch.Tensor, views: PassRows, kernels: ReferenceKernels, /) -> torch.Tensor:
        """views["read"] [T, hidden]: the mix of streams [T, streams * hidden]; views["streams_normed"] is left for `weights`."""
        count = streams.shape[0]
        normed, mixed = views["streams_normed"], views["streams_mix"]
        heads = (count, *self.norm.weight.shape)
        kernels.rms_norm(streams.view(heads), self.norm, normed.view(heads))
        low = kernels.linear(normed, self.down, views["streams_low"])
        F.silu(low.div_(self.shape.count), inplace=True)
        kernels.linear(low, self.up, mixed).sigmoid_().mul_(normed)
        return torch.mean(mixed.view(heads), dim=1, out=views["read"])

    def weights(self, at: Pass, inject: Weight) -> torch.Tensor:
        """By which each stream takes what a layer found, [T, streams], behind `mix`."""
        return at.kernels.linear(at.views["streams_normed"], inject, at.views["inject"]).div_(self.shape.count).sigmoid_().mul_(2)


@dataclass(slots=True)
class Streamed:
    """A layer that reads a mix of the streams and adds to all of them."""

    joint: GatedResidual
    layer: Layer
    captured: bool = False

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.joint.down, self.joint.up, *self.layer.matrices

    def run(self, at: Pass, /) -> None:
        if self.joint.inject is None:
            raise ValueError("a joint without weights to inject by cannot take what a layer finds")
        streams, found = at.views["streams"], at.views["found"]
        at.source, at.target = self.joint.mix(streams, at.views, at.kernels), found.zero_()
        weights = self.joint.weights(at, self.joint.inject)
        self.layer.run(at)
        streams.view(found.shape[0], self.joint.shape.count, -1).addcmul_(weights[:, :, None], found[:, None])
