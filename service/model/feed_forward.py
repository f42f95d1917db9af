"""Feed-forward layers: dense, or experts of which each token uses a few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels.forward_batch import NormWeight
from ..kernels.operands import ExpertOperands, ExpertWeights, LayerPart, SharedWeights
from ..quant.weight import Weight
from .layers import Pass
from .named import NamedWeights
from .shape import DecoderConfig, ExpertShape, layer_norm
from .spec import FLOATING, Destination, Source


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The required tensors. Gate and up are one matrix; experts are stacked, stored as one tensor or one per expert."""
    w, key, part, name = config.widths, f"{layer}.", layer + 1, f"model.layers.{layer}.mlp."
    yield from layer_norm(config, layer, "forward_norm", "post_attention_layernorm")
    if config.experts is not None and config.is_sparse(layer):
        yield from _wanted_experts(config.experts, w.hidden, key, part, name)
        return
    yield Destination(key + "gate_up", _gate_up(name, w.intermediate, w.hidden), part)
    yield Destination(key + "down", (Source(name + "down_proj.weight", (w.hidden, w.intermediate)),), part)


def _gate_up(name: str, width: int, hidden: int) -> tuple[Source, ...]:
    return tuple(Source(f"{name}{which}_proj.weight", (width, hidden)) for which in ("gate", "up"))


def _wanted_experts(shape: ExpertShape, hidden: int, key: str, part: int, name: str) -> Iterator[Destination]:
    """The router keeps its type: rounding would change the choice of experts."""
    count, width, used = shape.count, shape.width, shape.active / shape.count
    yield Destination(key + "router", (Source(name + "gate.weight", (count, hidden)),), part, bits=FLOATING)
    gate_up = tuple(source for expert in range(count) for source in _gate_up(f"{name}experts.{expert}.", width, hidden))
    joined = _joined(shape, name + "experts.gate_up_proj", 2 * width, hidden)
    yield Destination(key + "experts_gate_up", gate_up, part, joined=joined, used=used)
    down = tuple(Source(f"{name}experts.{expert}.down_proj.weight", (hidden, width)) for expert in range(count))
    joined = _joined(shape, name + "experts.down_proj", hidden, width)
    yield Destination(key + "experts_down", down, part, joined=joined, used=used)
    if not shape.shared:
        return
    yield Destination(
        key + "shared_gate", (Source(name + "shared_expert_gate.weight", (1, hidden)),), part, bits=FLOATING
    )
    yield Destination(key + "shared_gate_up", _gate_up(name + "shared_expert.", shape.shared, hidden), part)
    yield Destination(
        key + "shared_down", (Source(name + "shared_expert.down_proj.weight", (hidden, shape.shared)),), part
    )


def _joined(shape: ExpertShape, name: str, rows: int, columns: int) -> Source:
    stored = (shape.count, columns, rows) if shape.by_columns else (shape.count, rows, columns)
    return Source(name, (shape.count * rows, columns), stored, shape.by_columns)


def build(config: DecoderConfig, weights: NamedWeights, layer: int) -> FeedForward | Experts:
    """The layer over its weights."""
    at = weights.of(layer)
    shape = config.experts
    if shape is None or not config.is_sparse(layer):
        return FeedForward(at.norm("forward_norm", config.eps), at["gate_up"], at["down"])
    norm = None if config.streams else at.norm("forward_norm", config.eps)
    gate_up, down = at.parts("experts_gate_up", shape.count), at.parts("experts_down", shape.count)
    shared = SharedWeights(at["shared_gate"], at["shared_gate_up"], at["shared_down"]) if shape.shared else None
    return Experts(norm, ExpertWeights(shape.active, shape.normalized, at["router"], gate_up, down, shared))


@dataclass(slots=True)
class FeedForward:
    """Gated feed-forward (Shazeer 2020): gate_up [2 * intermediate, hidden], down [hidden, intermediate]."""

    norm: NormWeight
    gate_up: Weight
    down: Weight

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.gate_up, self.down

    def run(self, at: Pass, /) -> None:
        kernels, views = at.kernels, at.views
        normed, gated = views["normed"], views["gated"]
        kernels.norm_gate_up(at.source, self.norm, self.gate_up, gated, normed, views["both"])
        kernels.linear_add(gated, self.down, at.target, normed)


@dataclass(slots=True)
class Experts:
    """Sparse experts after their norm. Where no fused kernel takes all of them, the host reads the router's choice."""

    norm: NormWeight | None
    weights: ExpertWeights

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return (self.weights,)

    def run(self, at: Pass, /) -> None:
        normed, views = at.normed(self.norm), at.views
        router, spare = (
            views["router"],
            (views["shared_gate"], views["shared_gated"]) if self.weights.shared else (normed, normed),
        )
        rows = ExpertOperands(
            normed, at.target, router, views["routed"], views["expert_gated"], *spare, views.get("picks", normed)
        )
        if not at.kernels.run_experts(self.weights, rows):
            self._run_parts(at, normed)

    def _run_parts(self, at: Pass, normed: torch.Tensor) -> None:
        chosen, weights = self._choose(at, normed)
        if self.weights.shared is not None:
            self._run_shared(at, normed, self.weights.shared)
        # Sort the choices by expert, so that each expert's weights are read once.
        order = chosen.argsort(stable=True)
        rows, weights = order // self.weights.active, weights[order][:, None]
        done = 0
        for expert, count in enumerate(chosen.bincount(minlength=len(self.weights.gate_up)).tolist()):
            if count:
                self._run_expert(at, normed, expert, rows[done : done + count], weights[done : done + count])
                done += count

    def _choose(self, at: Pass, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row and their weights in fp32, [rows * active] each."""
        likely = at.kernels.linear(normed, self.weights.router, at.views["router"]).float().softmax(-1)
        weights, chosen = likely.topk(self.weights.active, dim=-1)
        if self.weights.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen.view(-1), weights.view(-1)

    @staticmethod
    def _run_shared(at: Pass, normed: torch.Tensor, shared: SharedWeights) -> None:
        kernels, views = at.kernels, at.views
        gated = views["shared_gated"]
        kernels.gate_up(normed, shared.gate_up, gated, views["shared_both"])
        gated.mul_(torch.sigmoid(kernels.linear(normed, shared.gate, views["shared_gate"])))
        kernels.linear_add(gated, shared.down, at.target, views["routed"])

    def _run_expert(
        self, at: Pass, normed: torch.Tensor, expert: int, rows: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Apply one expert to the rows [n] of the pass, scaled by its weight [n, 1]."""
        kernels, count = at.kernels, rows.shape[0]
        views = at.scratch.rows(count)
        gated, routed = views["expert_gated"], views["routed"]
        every = count == normed.shape[0]
        mine = normed if every else torch.index_select(normed, 0, rows, out=routed)
        kernels.gate_up(mine, self.weights.gate_up[expert], gated, views["expert_both"])
        gated.mul_(weights)
        if every:
            kernels.linear_add(gated, self.weights.down[expert], at.target, routed)
        else:
            at.target.index_add_(0, rows, kernels.linear(gated, self.weights.down[expert], routed))
