"""Time to the first token of a model that is not open: loading and prefill overlapped, one after the other, and
warm.
"""

from __future__ import annotations

import logging
import platform
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..api import pick_device
from ..config import Config
from ..console import columns
from ..loader.checkpoint import Checkpoint, open_checkpoint
from ..loader.names import ModelRoots
from ..memory.read_bandwidth import keep_ceiling, known_ceiling
from ..memory.truth import read_truth
from .ceiling import read_ceiling
from .measuring_child import Engine, MeasuringChild
from .run import (
    BenchPlan,
    bytes_per_pass,
    checked_context,
    end_tokens,
    find_model,
    make_state,
    random_prompt,
)
from .subject import SubjectSpec

log = logging.getLogger(__name__)

# Tokens of the shared prefix and of each prompt after it; a model with a shorter context gets half of its context.
PREFIX, TAIL = 1000, 24
TITLES = ("ENGINE", "FILE", "OVERLAP", "SECONDS", "PREFILL", "WAITED", "TOKENS/s", "PEAK GB")


@dataclass(frozen=True, slots=True)
class _FirstTokenRoute:
    """One way to the first token."""

    engine: Engine
    state: str
    overlap: bool


def measure_first_token(plan: BenchPlan, config: Config, roots: ModelRoots) -> dict[str, Any]:
    """The document of `onedesk bench ttft`: seconds from a closed model to the first token after a prompt of
    plan.prompt tokens.

    The cases take turns; medians of plan.cycles. Cold: the file's pages were evicted just before. `overlap_share` is
    cold with overlap over cold without. The last two rows are of an open model: a prompt that is read whole, and one
    whose prefix is cached;
    `prefix_share` is the second's time over the first's. Raises as bench.run.measure.
    """
    path = find_model(plan.model, config, roots)
    checkpoint = open_checkpoint(path, roots=roots.bases)
    device = pick_device(plan.device).type
    prefix, tail = _prefix_of(checkpoint)
    context = max(checked_context(plan.prompt + 1, checkpoint), prefix + tail + 1)
    task = SubjectSpec(
        path, device, plan.quant, context, config.cache, dict(config.memory), tuple(sorted(end_tokens(checkpoint)))
    )
    ids = random_prompt(checkpoint, plan.prompt)
    cases = [
        _FirstTokenRoute("onedesk", "cold", True),
        _FirstTokenRoute("onedesk", "cold", False),
        _FirstTokenRoute("onedesk", "warm", True),
        _FirstTokenRoute("onedesk", "warm", False),
    ]
    if plan.against:
        cases += [_FirstTokenRoute(plan.against, "cold", False), _FirstTokenRoute(plan.against, "warm", False)]
    kept: list[dict[str, Any]] = []
    ceiling = known_ceiling(config.cache, device)
    if ceiling is None:
        ceiling = read_ceiling(device, available=read_truth(device).available, cache=config.cache)
        keep_ceiling(config.cache, device, ceiling)
    engines: list[Engine] = ["onedesk", *([plan.against] if plan.against else [])]
    samples: dict[_FirstTokenRoute, list[dict[str, Any]]] = {case: [] for case in cases}
    with ExitStack() as ended:
        workers = {name: ended.enter_context(MeasuringChild(name, task)) for name in engines}
        for worker in workers.values():  # imports and compiled kernels are not part of a first token
            worker.ask("first_token", ids=ids[:1], overlap=False)
            worker.ask("unload")
        for cycle in range(plan.cycles):
            for case in cases:
                cached = make_state(case.state, checkpoint.files)
                samples[case].append(
                    workers[case.engine].ask("first_token", ids=ids, overlap=case.overlap) | {"cached": cached}
                )
                workers[case.engine].ask("unload")
                log.info("%s, cycle %d of %d: %.3f s", case, cycle + 1, plan.cycles, samples[case][-1]["seconds"])
        kept = _prefix_samples(workers["onedesk"], checkpoint, prefix, tail, plan.cycles)
    read = bytes_per_pass(checkpoint, plan)
    rows = [
        _row(case, found, plan.prompt, bytes_per_pass(checkpoint, plan, case.engine), ceiling)
        for case, found in samples.items()
    ]
    rows += [_prefix_row(state, kept, prefix + tail, read, ceiling) for state in ("read", "kept")]
    return {
        "kind": "ttft",
        "model": checkpoint.name,
        "quant": plan.quant,
        "device": device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "read_bytes_per_second": ceiling,
        "cycles": plan.cycles,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "overlap_share": rows[0]["seconds"] / rows[1]["seconds"],
        "prefix_tokens": prefix,
        "prefix_share": rows[-1]["seconds"] / rows[-2]["seconds"],
        "rows": rows,
    }


def first_token_table(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    lines = [TITLES, *(_line(row) for row in document["rows"])]
    return (
        f"first token of {document['model']} on {document['device']} ({document['machine']}), a prompt of"
        f" {document['rows'][0]['tokens']} tokens, medians of {document['cycles']}\n{columns(lines)}\ncold, with"
        f" overlap: {document['overlap_share']:.2f} of the time without\nopen, with {document['prefix_tokens']} tokens"
        f" in the prefix cache: {document['prefix_share']:.3f} of the time without"
    )


def _prefix_of(checkpoint: Checkpoint) -> tuple[int, int]:
    allowed = checkpoint.config.get("max_position_embeddings")
    if not isinstance(allowed, int) or allowed > PREFIX + TAIL:
        return PREFIX, TAIL
    return allowed // 2, min(TAIL, allowed // 4)


def _prefix_samples(
    worker: MeasuringChild, checkpoint: Checkpoint, prefix: int, tail: int, cycles: int
) -> list[dict[str, Any]]:
    """A prefix of its own in each cycle, so that only what the cycle itself kept is reused."""
    worker.ask("load")
    samples = []
    for cycle in range(cycles + 1):
        ids = random_prompt(checkpoint, prefix + 3 * tail, 100 + cycle)
        tails = [ids[at : at + tail] for at in range(prefix, prefix + 3 * tail, tail)]
        samples.append(worker.ask("prefix", ids=ids[:prefix], tails=tails))
        log.info(
            "prefix cache, cycle %d of %d: %.3f s of %.3f s", cycle, cycles, samples[-1]["kept"], samples[-1]["read"]
        )
    worker.ask("unload")
    return samples[1:]


def _prefix_row(
    state: str, samples: Sequence[dict[str, Any]], tokens: int, read: int, ceiling: float
) -> dict[str, Any]:
    seconds = statistics.median(sample[state] for sample in samples)
    return {
        "engine": "onedesk",
        "state": f"open, {state}",
        "overlap": False,
        "batch": 1,
        "tokens": tokens,
        "seconds": seconds,
        "prefill_seconds": seconds,
        "waited_seconds": None,
        "tokens_per_second": tokens / seconds,
        "bytes_per_second": read / seconds,
        "share": read / seconds / ceiling,
        "cached_before_bytes": 0,
        "cached_tokens": samples[0]["cached"] if state == "kept" else 0,
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
    }


def _row(
    case: _FirstTokenRoute, samples: Sequence[dict[str, Any]], tokens: int, read: int, ceiling: float
) -> dict[str, Any]:
    seconds = statistics.median(sample["seconds"] for sample in samples)
    waits = [sample["waited"] for sample in samples]
    return {
        "engine": case.engine,
        "state": case.state,
        "overlap": case.overlap,
        "batch": 1,
        "tokens": tokens,
        "seconds": seconds,
        "prefill_seconds": statistics.median(sample["prefill"] for sample in samples),
        "waited_seconds": None if None in waits else statistics.median(waits),
        "tokens_per_second": tokens / seconds,
        "bytes_per_second": read / seconds,
        "share": read / seconds / ceiling,
        "cached_before_bytes": max(sample["cached"] for sample in samples),
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    waited = "-" if row["waited_seconds"] is None else f"{row['waited_seconds']:.3f}"
    times = (f"{row['seconds']:.3f}", f"{row['prefill_seconds']:.3f}", waited)
    overlap = "yes" if row["overlap"] else "no"
    return (
        row["engine"],
        row["state"],
        overlap,
        *times,
        f"{row['tokens_per_second']:.0f}",
        f"{row['peak_bytes'] / 1e9:.2f}",
    )
