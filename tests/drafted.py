"""Models with a multi-token prediction layer, opened with fixed pass costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from onedesk.service.api import OpenModel, open_model
from onedesk.service.core import Request, Result
from onedesk.service.engine.runner import Runner
from onedesk.service.engine.speculate import DraftLimits, DraftPlan, PassCosts, Speculator
from onedesk.service.memory.pool import Pool
from tiny_drafts import write_drafter, write_rigged

CONTEXT = 256
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [],
}
LEFT = {"qwen3_5": ("mlp_only_layers",), "qwen3_5_moe": ("mlp_only_layers",), "qwen4_exp": ("mlp_only_layers",)}
PROMPT = tuple(torch.randint(3, 490, (41,), generator=torch.Generator().manual_seed(3)).tolist())


class Told(PassCosts):
    """Fixed costs, not measured: each further row costs a twentieth of a pass, and so does a draft token."""

    def __init__(self, draft: float = 0.05) -> None:
        super().__init__({rows: 1 + 0.05 * (rows - 1) for rows in range(1, 9)}, draft, draft)

    def record(self, rows: int, seconds: float) -> None:
        pass

    def record_draft(self, tokens: int, unread: int, seconds: float) -> None:
        pass


def write(folder: Path, family: str, *, rigged: bool, **more: Any) -> Path:
    changes = {key: value for key, value in LAYERS.items() if key not in LEFT.get(family, ())}
    changes |= {"ple_layer_ids": [1]} if family == "qwen4_exp" else {}
    return (write_rigged if rigged else write_drafter)(folder, family, **changes, **more)


def start(folder: Path, pool: Pool, kernels: Path, **options: Any) -> OpenModel:
    model = open_model(folder, pool=pool, context=CONTEXT, sequences=3, kernel_cache=kernels, **options)
    model.load()
    tell(model)
    return model


def tell(model: OpenModel, costs: PassCosts | None = None) -> Runner:
    assert model.session is not None
    model.session.costs = costs or Told()
    return model.session.runner


def written(model: OpenModel, request: Request) -> Result:
    return next(event.result for event in model.generate(request) if event.result is not None)


def passes(model: OpenModel, result: Result) -> int:
    return round(result.stages["decode"].bytes / model._blueprint.pass_bytes)


def arbitrary(request: Request, wanted: Sequence[int], draw: random.Random, chance: float) -> type[Speculator]:
    """A speculator with drafts of random length; each draft token is right with `chance`, or comes from the layer.
    `wanted`: the right tokens.
    """

    class Arbitrary(Speculator):
        def plan(self, limits: DraftLimits) -> DraftPlan:
            at, count = len(self._lookup._ids) - len(request.ids or ()), draw.randint(0, max(0, limits.most))
            if limits.unread and count and draw.random() < 0.3:
                return DraftPlan(layer_tokens=count)
            right = [*wanted[at : at + count], *[3] * count][:count]
            return DraftPlan(
                tokens=tuple(token if draw.random() < chance else 3 + (token + 1) % 400 for token in right)
            )

    return Arbitrary
