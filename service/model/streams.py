"""A residual of several streams: each layer reads a mix of them, weighed number by number, and adds what it found to each by a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kernels.forward_batch import NormWeight
from ..kernels.operands import JointRows, Part, StreamJoint
from ..kernels.reference import ReferenceKernels
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
    return GatedResidual(StreamJoint(shape.count, norm, at[key + "_down"], at[key + "_up"], at[key + "_inject"] if inject else None))


def _shape(config: DecoderConfig) -> StreamShape:
    if config.streams is None:
        raise ValueError("the family has one residual stream")
    return config.streams


@dataclass(slots=True)
class GatedResidual:
    """What a layer, or the head, reads of residual streams."""

    joint: StreamJoint

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.joint,)

    def mix(self, streams: torch.Tensor, views: PassRows, kernels: ReferenceKernels, /) -> torch.Tensor:
        """views["read"] [T, hidden]: the mix of streams [T, streams * hidden]."""
        return self.read(_rows(streams, views), kernels).read

    def read(self, at: JointRows, kernels: ReferenceKernels, /, *, waiting: bool = False) -> JointRows:
        """Fills `at` in as JointRows says; `waiting`: once what it says of the joint before is let in."""
        joint = self.joint
        if waiting:
            if kernels.inject_and_read(joint, at):
                return at
            kernels.inject(at)
        if kernels.read_streams(joint, at):
            return at
        heads = (at.streams.shape[0], *joint.norm.weight.shape)
        kernels.rms_norm(at.streams.view(heads), joint.norm, at.normed.view(heads))
        low = kernels.linear(at.normed, joint.down, at.low)
        F.silu(low.div_(joint.count), inplace=True)
        kernels.linear(low, joint.up, at.mixed).sigmoid_().mul_(at.normed)
        torch.mean(at.mixed.view(heads), dim=1, out=at.read)
        if joint.inject is not None:
            kernels.linear(at.normed, joint.inject, at.weights).div_(joint.count).sigmoid_().mul_(2)
            at.found.zero_()
        return at


def _rows(streams: torch.Tensor, views: PassRows) -> JointRows:
    names = ("streams_normed", "streams_low", "streams_mix", "read", "inject", "found")
    return JointRows(streams, *(views[name] for name in names))


@dataclass(slots=True)
class Streamed:
    """A layer that reads a mix of the streams and adds to all of them: what it found waits for the next one, or for Pass.let_in."""

    residual: GatedResidual
    layer: Layer

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.residual.joint, *self.layer.parts

    def run(self, at: Pass, /) -> None:
        if self.residual.joint.inject is None:
            raise ValueError("a joint without weights to inject by cannot take what a layer finds")
        rows = self.residual.read(_rows(at.views["streams"], at.views), at.kernels, waiting=at.waiting is not None)
        at.source, at.target = rows.read, rows.found
        self.layer.run(at)
        at.waiting = rows
