"""Gated delta net layers: tokens are mixed through states of constant size, one per value head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..cache.recurrent import RecurrentStates
from ..kernels.delta_rule import (
    DeltaHeads,
    DeltaOperands,
    convolve_chunk,
    convolve_step,
    delta_chunk,
    delta_step,
    unit,
)
from ..kernels.forward_batch import NormWeight, Slots, VerifyPass
from ..kernels.operands import LayerPart
from ..quant.weight import Weight
from .layers import Pass
from .named import NamedWeights
from .shape import DecoderConfig, DeltaShape, layer_norm
from .spec import Destination, Source


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The required tensors. The convolution's inputs and the gates are one matrix, and so are the two rates per head,
    which keep at least 8 bits.
    """
    shape, hidden, key, part = _shape(config), config.widths.hidden, f"{layer}.", layer + 1
    name, wide = f"model.layers.{layer}.linear_attn.", shape.channels + shape.values
    projections = (("qkvz", wide),) if shape.fused else (("qkv", shape.channels), ("z", shape.values))
    rates = (("ba", 2 * shape.value_heads),) if shape.fused else (("b", shape.value_heads), ("a", shape.value_heads))
    taps = Source(name + "conv1d.weight", (shape.channels, 1, shape.taps))
    yield from layer_norm(config, layer, "delta_norm", "input_layernorm")
    for what, stored, bits in (("projection", projections, 4), ("rates", rates, 8)):
        sources = tuple(Source(f"{name}in_proj_{which}.weight", (rows, hidden)) for which, rows in stored)
        yield Destination(key + what, sources, part, bits=bits)
    yield Destination(key + "taps", (taps,), part, wide=True, turn="taps_first")
    yield Destination(key + "decay", (Source(name + "A_log", (shape.value_heads,)),), part, wide=True, turn="minus_exp")
    yield Destination(key + "delta_bias", (Source(name + "dt_bias", (shape.value_heads,)),), part, wide=True)
    yield Destination(key + "out_norm", (Source(name + "norm.weight", (shape.value_dim,)),), part, wide=True)
    yield Destination(key + "delta_output", (Source(name + "out_proj.weight", (hidden, shape.values)),), part)


def build(config: DecoderConfig, weights: NamedWeights, layer: int, index: int) -> GatedDelta:
    """The layer over its weights; `index` counts only the layers that store recurrent states."""
    at, shape = weights.of(layer), _shape(config)
    heads = DeltaHeads(
        *(shape.key_heads, shape.group, shape.key_dim, shape.value_dim, shape.fused, shape.gate),
        taps=at.plain("taps").view(shape.taps, shape.channels),
        decay=at.plain("decay").view(shape.key_heads, shape.group),
        bias=at.plain("delta_bias").view(shape.key_heads, shape.group),
        norm=at.norm("out_norm", config.eps),
    )
    norm = None if config.streams else at.norm("delta_norm", config.eps)
    return GatedDelta(heads, index, norm, at["projection"], at["rates"], at["delta_output"])


def _shape(config: DecoderConfig) -> DeltaShape:
    if config.delta is None:
        raise ValueError("a family without delta nets has only attention layers")
    return config.delta


@dataclass(slots=True)
class GatedDelta:
    """Pre-norm gated delta net (Yang et al. 2024) after a short convolution, as in Qwen3-Next and Qwen3.5.

    projection [channels + values, hidden], rates [2 * value_heads, hidden], both as DeltaHeads says; output [hidden,
    values].
    """

    heads: DeltaHeads
    index: int
    norm: NormWeight | None
    projection: Weight
    rates: Weight
    output: Weight

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.projection, self.rates, self.output, self.heads

    def run(self, at: Pass, /) -> None:
        kernels, views, states, slots = at.kernels, at.views, at.cache.states, at.batch.slots
        if states is None or slots is None:
            raise ValueError("the session's cache has no recurrent states")
        projected, rates, mixed = views["delta_projected"], views["delta_rates"], views["delta_mixed"]
        at.project(self.norm, self.projection, projected)
        at.project(self.norm, self.rates, rates)
        windows, held = states.of_layer(self.index)
        step = DeltaOperands(projected, rates, windows, held, slots, mixed, isinstance(at.batch, VerifyPass))
        if not (kernels.delta_step if at.batch.state_per_row else kernels.delta_chunk)(self.heads, step):
            self._mix(at, states, slots)
        kernels.linear_add(mixed, self.output, at.target, views["normed"])

    def _mix(self, at: Pass, states: RecurrentStates, slots: Slots) -> None:
        """From projections to gated outputs. States are read from the pass's source slots and written to its target
        slots.
        """
        heads, mixed, count = self.heads, at.views["delta_mixed"], at.ids.shape[0]
        seen, gates, beta, speed = self._split(at.views["delta_projected"], at.views["delta_rates"])
        parts = seen.float(), heads.decay * F.softplus(speed.float() + heads.bias), beta.float().sigmoid()
        if isinstance(at.batch, VerifyPass):
            rows = [slice(row, row + 1) for row in range(count)]
            answers = torch.cat([self._step(states, slots.part(row), *(part[row] for part in parts)) for row in rows])
        elif at.batch.state_per_row:
            answers = self._step(states, slots, *parts)
        else:
            windows, held = states.read(self.index, slots.source)
            convolved, window = convolve_chunk(parts[0], windows[0], heads.taps)
            answers = delta_chunk(*self._heads(convolved), *parts[1:], held[0])
            states.write(self.index, slots.target, (window[None], held))
        at.kernels.rms_norm(answers, heads.norm, answers)
        opened = torch.sigmoid(gates.float()) if heads.gate == "sigmoid" else F.silu(gates.float())
        mixed.view(answers.shape).copy_(answers.mul_(opened))

    def _step(
        self, states: RecurrentStates, slots: Slots, seen: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Decode one token per sequence; returns the outputs [S, H, R, E]."""
        windows, held = states.read(self.index, slots.source)
        convolved, windows = convolve_step(seen, windows, self.heads.taps)
        answers = delta_step(*self._heads(convolved), decay, beta, held)
        states.write(self.index, slots.target, (windows, held))
        return answers

    def _split(
        self, projected: torch.Tensor, rates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The convolution's input [T, channels], gates [T, H, R, E], and the two rates [T, H, R] each."""
        s, count = self.heads, projected.shape[0]
        if not s.fused:
            seen, gates = projected.split((s.channels, s.values), dim=1)
            beta, speed = rates.view(count, 2, s.key_heads, s.group).unbind(1)
            return seen, gates.view(count, s.key_heads, s.group, s.value_dim), beta, speed
        each = s.group * s.value_dim
        parts = projected.view(count, s.key_heads, -1).split((s.key_dim, s.key_dim, each, each), dim=2)
        seen = torch.cat([part.reshape(count, -1) for part in parts[:3]], dim=1)
        beta, speed = rates.view(count, s.key_heads, 2, s.group).unbind(2)
        return seen, parts[3].view(count, s.key_heads, s.group, s.value_dim), beta, speed

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [T, H, D] of length 1 (queries scaled by D^-0.5), values [T, H, R, E]."""
        s, count = self.heads, convolved.shape[0]
        queries, keys, values = convolved.split((s.keys, s.keys, s.values), dim=1)
        queries, keys = (unit(part.view(count, s.key_heads, s.key_dim)) for part in (queries, keys))
        return queries * s.key_dim**-0.5, keys, values.view(count, s.key_heads, s.group, s.value_dim)
