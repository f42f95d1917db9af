"""Generates with a random network, with and without draft tokens of its multi-token prediction layer, through the
engine's own loop.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from ..service.core import Sampling
from ..service.engine.batch import Accounting, Controls
from ..service.engine.batch_loop import BatchLoop
from ..service.engine.completion import Limits, Prepared
from ..service.engine.drafting import Drafting
from ..service.engine.leaks import LeakWatch
from ..service.engine.sampler import Adjustments
from ..service.engine.stages import StageMeter
from ..service.memory.pool import Pool
from ..service.text.stops import StopStrings
from .clock import Clock
from .draft_tokens import ToldDrafting
from .made_networks import Made

log = logging.getLogger(__name__)

PROMPT = 128
CYCLES = 3
PLAIN = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, logit_bias={})


def draft_row(made: Made, pool: Pool, right: int, tokens: int, clock: Clock) -> dict[str, Any]:
    """Tokens per second without and with draft tokens, `right` percent of them right; the first pair is a warm-up."""
    plain, guessed, passes, differing = [], [], [], 0
    for cycle in range(CYCLES + 1):
        ids = torch.randint(
            3, made.blueprint.widths.vocab, (PROMPT,), generator=torch.Generator().manual_seed(cycle)
        ).tolist()
        seconds, written, _ = _write(made, pool, _prepared(made, ids, tokens, speculation=False))
        with_guesses, again, ran = _told(made, pool, _prepared(made, ids, tokens, speculation=True), right, written)
        differing += written != again
        clock.tell(
            f"drafts, {right} % right: {tokens / seconds:.1f} tokens/s without, {tokens / with_guesses:.1f} with, {ran}"
            " passes"
        )
        if cycle:
            plain.append(seconds)
            guessed.append(with_guesses)
            passes.append(ran)
        if clock.over:
            break
    ratio = statistics.median(b / a for a, b in zip(plain, guessed, strict=True)) if plain else 0.0
    costs = made.session.costs
    told = {rows: round(seconds * 1e3, 3) for rows, seconds in sorted(costs.measured.items())}
    clock.tell(f"drafts, {right} % right: time {ratio:.3f}, texts that differ {differing}")
    clock.tell(f"ms a pass by its rows {told}, of a drafted token {costs.measured_draft * 1e3:.3f}")
    return {
        "right": right,
        "ratio": ratio,
        "without_tokens_per_second": tokens / statistics.median(plain) if plain else 0.0,
        "with_tokens_per_second": tokens / statistics.median(guessed) if guessed else 0.0,
        "passes": passes,
        "differing_texts": differing,
        "pass_ms": told,
        "draft_ms": costs.measured_draft * 1e3,
    }


def _told(
    made: Made, pool: Pool, prepared: Prepared, right: int, written: Sequence[int]
) -> tuple[float, list[int], int]:
    runner = made.runner
    drafting = runner.drafting
    if drafting is not None:
        runner.drafting = cast(Drafting, ToldDrafting(drafting, right, PROMPT, written))
    try:
        return _write(made, pool, prepared)
    finally:
        runner.drafting = drafting


def _write(made: Made, pool: Pool, prepared: Prepared) -> tuple[float, list[int], int]:
    """Seconds between the first token and the last, the ids, and the number of passes."""
    blueprint, ids, times = made.blueprint, [], []
    accounting = Accounting(
        StageMeter(pool), LeakWatch("made", pool), blueprint.pass_bytes, blueprint.draft_token_bytes
    )
    for event in BatchLoop([prepared], made.session, accounting, Controls()).events(time.perf_counter()):
        if event.token is not None:
            times.append(time.perf_counter())
        if event.result is not None:
            ids = list(event.result.ids)
    return times[-1] - times[0], ids, round(accounting.meter.stages["decode"].bytes / blueprint.pass_bytes)


def _prepared(made: Made, ids: Sequence[int], tokens: int, *, speculation: bool) -> Prepared:
    limits = Limits(tokens, 0, tokens, frozenset())
    return Prepared(
        ids=tuple(ids),
        sampling=PLAIN,
        seed=0,
        limits=limits,
        reserve=tokens,
        stop=StopStrings(),
        in_reasoning=False,
        repetition_stop=False,
        tokenizer=None,
        choosable=made.blueprint.widths.vocab,
        adjustments=Adjustments(PLAIN, (), 0),
        prefix_reuse=False,
        speculation=speculation,
    )
