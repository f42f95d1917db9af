"""Hyper-connections: a residual of several streams. A layer reads a weighted mix of them and adds its output to each by
a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kernels.forward_batch import NormWeight
from ..kernels.operands import ConnectionOperands, HyperConnection, LayerPart
from ..kernels.reference import ReferenceKernels
from .layers import Layer, Pass, PassRows
from .named import NamedWeights
from .shape import DecoderConfig, StreamShape
from .spec import FLOATING, Destination, Source


def wanted(config: DecoderConfig, key: str, name: str, part: int, *, inject: bool) -> Iterator[Destination]:
    """The required tensors of one connection `name`; its write-back weights are small and keep their type."""
    shape, hidden = _shape(config), config.widths.hidden
    wide = shape.count * hidden
    norm = Source(name + ".hc_norm.weight", (wide,))
    yield Destination(key + "_norm", (norm,), part, wide=True, turn="plus_one")
    yield Destination(
        key + "_down", (Source(name + ".input_mix_weight_down.weight", (shape.rank, wide)),), part, bits=8
    )
    yield Destination(key + "_up", (Source(name + ".input_mix_weight_up.weight", (wide, shape.rank)),), part, bits=8)
    if inject:
        source = Source(name + ".block_inject_weight.weight", (shape.count, wide))
        yield Destination(key + "_inject", (source,), part, bits=FLOATING)


def build(config: DecoderConfig, at: NamedWeights, key: str, *, inject: bool) -> GatedResidual:
    """The connection over its weights."""
    shape = _shape(config)
    norm = NormWeight(at.plain(key + "_norm").view(shape.count, config.widths.hidden), config.eps)
    return GatedResidual(
        HyperConnection(shape.count, norm, at[key + "_down"], at[key + "_up"], at[key + "_inject"] if inject else None)
    )


def _shape(config: DecoderConfig) -> StreamShape:
    if config.streams is None:
        raise ValueError("the family has one residual stream")
    return config.streams


@dataclass(slots=True)
class GatedResidual:
    """The input of a layer, or of the head, mixed from residual streams."""

    connection: HyperConnection

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return (self.connection,)

    def mix(self, streams: torch.Tensor, views: PassRows, kernels: ReferenceKernels, /) -> torch.Tensor:
        """views["read"] [T, hidden]: the mix of streams [T, streams * hidden]."""
        return self.read(_rows(streams, views), kernels).read

    def read(
        self, at: ConnectionOperands, kernels: ReferenceKernels, /, *, waiting: bool = False
    ) -> ConnectionOperands:
        """Fill `at` as ConnectionOperands says; `waiting`: the previous connection's output is added first."""
        connection = self.connection
        if waiting:
            if kernels.inject_and_read(connection, at):
                return at
            kernels.inject(at)
        if kernels.read_connection(connection, at):
            return at
        heads = (at.streams.shape[0], *connection.norm.weight.shape)
        kernels.rms_norm(at.streams.view(heads), connection.norm, at.normed.view(heads))
        low = kernels.linear(at.normed, connection.down, at.low)
        F.silu(low.div_(connection.count), inplace=True)
        kernels.linear(low, connection.up, at.mixed).sigmoid_().mul_(at.normed)
        torch.mean(at.mixed.view(heads), dim=1, out=at.read)
        if connection.inject is not None:
            kernels.linear(at.normed, connection.inject, at.weights).div_(connection.count).sigmoid_().mul_(2)
            at.found.zero_()
        return at


def _rows(streams: torch.Tensor, views: PassRows) -> ConnectionOperands:
    names = ("streams_normed", "streams_low", "streams_mix", "read", "inject", "found")
    return ConnectionOperands(streams, *(views[name] for name in names))


@dataclass(slots=True)
class Streamed:
    """A layer that reads a mix of the streams and adds to all of them. Its output is added by the next connection, or
    by Pass.let_in.
    """

    residual: GatedResidual
    layer: Layer

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.residual.connection, *self.layer.parts

    def run(self, at: Pass, /) -> None:
        if self.residual.connection.inject is None:
            raise ValueError("a connection without weights to inject by cannot take what a layer finds")
        rows = self.residual.read(_rows(at.views["streams"], at.views), at.kernels, waiting=at.waiting is not None)
        at.source, at.target = rows.read, rows.found
        self.layer.run(at)
        at.waiting = rows
