"""How fast a model that gave way comes back to its first token: file cold, file cached, three times in a row."""

from __future__ import annotations

import logging
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..api import pick_device
from ..config import Config
from ..console import columns
from ..errors import RequestError
from ..loader.checkpoint import open_checkpoint
from ..loader.names import ModelRoots
from .measuring_child import MeasuringChild
from .page_cache import read_whole
from .run import BenchPlan, checked_context, end_tokens, files_of_load, find_model, make_state, random_prompt
from .subject import SubjectSpec

log = logging.getLogger(__name__)

IN_A_ROW = 3
TITLES = ("FILE", "SECONDS", "WITHOUT PROMPT", "GB/s", "RAW READ", "SHARE", "FROM DISK", "CACHED AFTER")


def measure_wake(plan: BenchPlan, config: Config, roots: ModelRoots) -> dict[str, Any]:
    """The document of `onedesk bench wake`: seconds from a model that gave way to the first token after plan.prompt
    tokens, medians of plan.cycles.

    Rows by `state`: `cold`, the file's pages were evicted just before; `warm`, it was read whole just before; `row 1`
    to `row 3`, three wakes after one eviction. `wake_seconds` is `seconds` minus the first token of the open model
    (`open_seconds` of the document). `raw_seconds` is a raw read of the same files in the same state, `share` its
    seconds over `wake_seconds`. `read_bytes` came from the disk, None where the system does not count them;
    `cached_bytes` of the files are in the page cache after the wake. Raises as bench.run.measure, and RequestError for
    another engine.
    """
    if plan.against is not None:
        raise RequestError(f"only Onedesk gives way and wakes; measure wake without --against {plan.against}")
    path = find_model(plan.model, config, roots)
    checkpoint = open_checkpoint(path, roots=roots.bases)
    device, context = pick_device(plan.device).type, checked_context(plan.prompt + 1, checkpoint)
    ends = tuple(sorted(end_tokens(checkpoint)))
    task = SubjectSpec(path, device, plan.quant, context, config.cache, dict(config.memory), ends)
    ids = random_prompt(checkpoint, plan.prompt)
    with MeasuringChild("onedesk", task) as worker:
        worker.ask("load")
        worker.ask("prefill", ids=ids)  # kernels are compiled and graphs captured
        opened = statistics.median(worker.ask("prefill", ids=ids)["seconds"] for _ in range(plan.cycles))
        read = files_of_load(plan, checkpoint, config.cache)
        samples, raw = _samples(worker, ids, list(read), plan.cycles)
    nbytes = sum(read.values())
    return {
        "kind": "wake",
        "model": checkpoint.name,
        "quant": plan.quant,
        "device": device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "cycles": plan.cycles,
        "prompt": plan.prompt,
        "read_bytes_per_second": nbytes / statistics.median(raw["cold"]),
        "checkpoint_bytes": nbytes,
        "open_seconds": opened,
        "rows": [_row(state, found, raw, opened, nbytes) for state, found in samples.items()],
    }


def _samples(
    worker: MeasuringChild, ids: Sequence[int], files: Sequence[Path], cycles: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[float]]]:
    """The wakes by state, and seconds of raw reads, cold and warm."""
    samples: dict[str, list[dict[str, Any]]] = {}
    raw: dict[str, list[float]] = {"cold": [], "warm": []}

    def wake(state: str) -> None:
        found = worker.ask("wake", ids=ids, files=[str(file) for file in files])
        samples.setdefault(state, []).append(found)
        log.info("wake, %s: %.3f s", state, found["seconds"])

    for _ in range(cycles):
        for state, found in raw.items():
            make_state(state, files)
            found.append(read_whole(files))
            make_state(state, files)
            wake(state)
        make_state("cold", files)
        for number in range(1, IN_A_ROW + 1):
            wake(f"row {number}")
    return samples, raw


def _row(
    state: str, samples: Sequence[Mapping[str, Any]], raw: Mapping[str, Sequence[float]], opened: float, nbytes: int
) -> dict[str, Any]:
    seconds = statistics.median(sample["seconds"] for sample in samples)
    without = max(seconds - opened, 1e-9)
    raw_seconds = statistics.median(raw["cold" if state in ("cold", "row 1") else "warm"])
    disk = [sample["read_bytes"] for sample in samples]
    return {
        "engine": "onedesk",
        "state": state,
        "batch": 1,
        "tokens": 1,
        "tokens_per_second": None,
        "seconds": seconds,
        "wake_seconds": without,
        "load_seconds": statistics.median(sample["load_seconds"] for sample in samples),
        "bytes_per_second": nbytes / without,
        "raw_seconds": raw_seconds,
        "share": raw_seconds / without,
        "read_bytes": None if None in disk else statistics.median(disk),
        "cached_bytes": min(sample["cached_bytes"] for sample in samples),
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
    }


def wake_table(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    lines = [TITLES, *(_line(row) for row in document["rows"])]
    return (
        f"wake of {document['model']} on {document['device']} ({document['machine']}), a prompt of"
        f" {document['prompt']} tokens that takes {document['open_seconds']:.3f} s when the model is open, medians of"
        f" {document['cycles']}\n{columns(lines)}"
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    disk = "-" if row["read_bytes"] is None else f"{row['read_bytes'] / 1e9:.2f} GB"
    speed = (f"{row['bytes_per_second'] / 1e9:.2f}", f"{row['raw_seconds']:.3f}", f"{row['share']:.0%}")
    times = (f"{row['seconds']:.3f}", f"{row['wake_seconds']:.3f}")
    return (row["state"], *times, *speed, disk, f"{row['cached_bytes'] / 1e9:.2f} GB")
