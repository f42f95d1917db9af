"""All that `onedesk bench` can measure, by kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Config
from ..loader.names import ModelRoots
from .first_token import first_token_table, measure_first_token
from .handover import PICTURE_BYTES, handover_table, measure_handover
from .run import BenchPlan, bench_table, measure
from .wake import measure_wake, wake_table

KINDS = ("load", "prefill", "decode", "ttft", "wake", "handover")
DEFAULT_CYCLES, DEFAULT_TOKENS = 5, 64
# Tokens of the prompt: as in the figures that speeds are held against.
DEFAULT_PROMPTS = {"decode": 128, "wake": 16}
DEFAULT_PROMPT = 512
HANDOVER_CYCLES = 300
HANDOVER_TOKENS = 16


def measure_kind(plan: BenchPlan, config: Config, roots: ModelRoots) -> dict[str, Any]:
    """The document of plan.kind; cycles, tokens and prompt of 0 are the kind's own default. Raises as
    bench.run.measure.
    """
    if plan.kind == "handover":
        return measure_handover(
            config,
            roots,
            model=plan.model or None,
            device=plan.device,
            cycles=plan.cycles or HANDOVER_CYCLES,
            tokens=plan.tokens or HANDOVER_TOKENS,
            picture=PICTURE_BYTES,
        )
    prompt = plan.prompt or DEFAULT_PROMPTS.get(plan.kind, DEFAULT_PROMPT)
    plan = replace(plan, cycles=plan.cycles or DEFAULT_CYCLES, tokens=plan.tokens or DEFAULT_TOKENS, prompt=prompt)
    measures = {"ttft": measure_first_token, "wake": measure_wake}
    return measures.get(plan.kind, measure)(plan, config, roots)


def kind_table(document: dict[str, Any]) -> str:
    """A document of `measure_kind` for a terminal."""
    tables = {"ttft": first_token_table, "wake": wake_table, "handover": handover_table}
    return tables.get(document["kind"], bench_table)(document)
