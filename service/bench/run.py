"""One measurement: engines in processes of their own, repeated in turn, medians of each, compared with the machine's
read bandwidth.
"""

from __future__ import annotations

import logging
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..api import pick_device
from ..catalog.composition import compose
from ..catalog.decode_speed import DecodeSpeed, TokenReads, shown_speed
from ..config import Config
from ..console import columns
from ..engine.session import draw_blueprint
from ..errors import FileError, ModelError, RequestError
from ..loader.checkpoint import Checkpoint, open_checkpoint
from ..loader.names import ModelRoots
from ..memory.read_bandwidth import keep_ceiling
from ..memory.truth import read_truth
from .ceiling import read_ceiling
from .measuring_child import Engine, MeasuringChild
from .onedesk_subject import lead_tokens
from .page_cache import Residency, evict, read_whole
from .samplings import GREEDY
from .shapes import SHAPES, random_checkpoint
from .subject import SubjectSpec

log = logging.getLogger(__name__)

Kind = Literal["load", "prefill", "decode", "ttft", "wake", "handover"]
SMALLEST_CONTEXT = 2
WARM_UP_TOKENS = 3
# Engines that decode batches.
BATCHED = ("onedesk", "transformers", "llama.cpp")
LOAD_TITLES = ("ENGINE", "FILE", "SECONDS", "RAW READ", "GB/s", "SHARE", "READ AND KEPT", "SHARE", "PEAK / SIZE")
RUN_TITLES = (
    "ENGINE",
    "SAMPLING",
    "BATCH",
    "PROMPT",
    "TOKENS",
    "TOKENS/s",
    "GB/s",
    "SHARE",
    "EXPECTED",
    "PEAK GB",
    "MAJOR FAULTS A TOKEN",
    "ALLOCATIONS A TOKEN",
    "OF FIRST",
)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure: `tokens` to decode after `prompt` tokens, in batches of the sizes `batches`, with each of
    `samplings` (keys of SAMPLINGS), each `cycles` times.
    """

    kind: Kind
    model: str
    quant: str = "none"
    device: str = "auto"
    tokens: int = 64
    prompt: int = 512
    cycles: int = 5
    against: Literal["transformers", "llama.cpp"] | None = None
    batches: tuple[int, ...] = (1,)
    samplings: tuple[str, ...] = (GREEDY,)


def measure(plan: BenchPlan, config: Config, roots: ModelRoots) -> dict[str, Any]:
    """The document of `onedesk bench`. Bytes are integers, times seconds, `share` is of the read ceiling (of a load: of
    the raw read).

    Raises ModelError, FileError, MemoryFull, RequestError, and PeerError when the peer is absent or fails.
    """
    path = find_model(plan.model, config, roots)
    checkpoint = open_checkpoint(path, roots=roots.bases)
    device = pick_device(plan.device).type
    ends = tuple(sorted(end_tokens(checkpoint)))
    task = SubjectSpec(
        path, device, plan.quant, _context(plan, checkpoint), config.cache, dict(config.memory), ends, max(plan.batches)
    )
    available = read_truth(device).available
    ceiling = read_ceiling(device, available=available, cache=config.cache)
    engines: list[Engine] = ["onedesk", *([plan.against] if plan.against else [])]
    with ExitStack() as ended:
        workers = [ended.enter_context(MeasuringChild(engine, task)) for engine in engines]
        rows = (
            _load_rows(plan, files_of_load(plan, checkpoint, config.cache), workers)
            if plan.kind == "load"
            else _run_rows(plan, checkpoint, workers)
        )
    ceiling = max(ceiling, read_ceiling(device, available=available, cache=config.cache))
    keep_ceiling(config.cache, device, ceiling)
    if plan.kind == "decode":
        rows = _with_estimates(rows, plan, checkpoint, DecodeSpeed(device, ceiling, config.cache))
    return {
        "kind": plan.kind,
        "model": checkpoint.name,
        "quant": plan.quant,
        "device": device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "read_bytes_per_second": ceiling,
        "cycles": plan.cycles,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "rows": [row if plan.kind == "load" else row | {"share": row["bytes_per_second"] / ceiling} for row in rows],
    }


def bench_table(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    load = document["kind"] == "load"
    lines = [
        LOAD_TITLES if load else RUN_TITLES,
        *(_load_line(row) if load else _run_line(row) for row in document["rows"]),
    ]
    head = (
        f"{document['kind']} of {document['model']} on {document['device']} ({document['machine']}), medians of"
        f" {document['cycles']}"
    )
    return f"{head}; memory reads {document['read_bytes_per_second'] / 1e9:.1f} GB/s\n{columns(lines)}"


def _load_line(row: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{row['seconds']:.3f}", f"{row['raw_seconds']:.3f}", f"{row['bytes_per_second'] / 1e9:.2f}")
    kept = (f"{row['fresh_seconds']:.3f}", f"{row['fresh_share']:.0%}")
    return (row["engine"], row["state"], *times, f"{row['share']:.0%}", *kept, f"{row['peak_share']:.2f}")


def _run_line(row: dict[str, Any]) -> tuple[str, ...]:
    counts = (row.get("major_faults_per_token"), row.get("allocations_per_token"))
    speed = (f"{row['tokens_per_second']:.2f}", f"{row['bytes_per_second'] / 1e9:.2f}", f"{row['share']:.0%}")
    speed = (*speed, shown_speed(row.get("expected_tokens_per_second")))
    rows = (row["engine"], row["sampling"], str(row["batch"]), str(row["prompt"]), str(row["tokens"]))
    first = f"{row['of_first']:.3f}"
    return (*rows, *speed, f"{row['peak_bytes'] / 1e9:.2f}", *("-" if n is None else f"{n:g}" for n in counts), first)


def find_model(name: str, config: Config, roots: ModelRoots) -> Path:
    """A model by name or path; else the random checkpoint of that shape, written into the cache on first use."""
    try:
        return roots.find(name)
    except (ModelError, FileError) as error:
        if name not in SHAPES:
            raise ModelError(f"{error}; or measure a random checkpoint: {', '.join(SHAPES)}") from error
        return random_checkpoint(name, config.cache)


def _context(plan: BenchPlan, checkpoint: Checkpoint) -> int:
    if plan.kind == "load":
        allowed = checkpoint.config.get("max_position_embeddings")
        return min(2048, allowed) if isinstance(allowed, int) else 2048
    tokens = 1 if plan.kind == "prefill" else plan.tokens + lead_tokens(plan.prompt, max(plan.batches))
    return checked_context(plan.prompt + tokens, checkpoint)


def checked_context(wanted: int, checkpoint: Checkpoint) -> int:
    """`wanted` tokens of context. Raises RequestError if the model allows fewer."""
    allowed = checkpoint.config.get("max_position_embeddings")
    if isinstance(allowed, int) and wanted > allowed:
        raise RequestError(
            f"the measurement takes {wanted} tokens of context and {checkpoint.name} allows {allowed}; ask for fewer"
        )
    return wanted


def end_tokens(checkpoint: Checkpoint) -> Iterator[int]:
    """The ids that would end an answer, so that a measurement can forbid them."""
    for source in (checkpoint.generation, checkpoint.config):
        value = source.get("eos_token_id")
        yield from {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}


def random_prompt(checkpoint: Checkpoint, tokens: int, seed: int = 1) -> list[int]:
    """Ids of the model's vocabulary, the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, int(checkpoint.config["vocab_size"]), (tokens,), generator=generator).tolist()


def bytes_per_pass(checkpoint: Checkpoint, plan: BenchPlan, engine: Engine = "onedesk") -> int:
    """Bytes of the weights in memory that a pass of `engine` reads; for llama.cpp, those of our own quantization of the
    same width.
    """
    quant = "none" if engine == "transformers" else plan.quant
    return draw_blueprint(checkpoint, pick_device(plan.device), SMALLEST_CONTEXT, quant).pass_bytes


def _run_rows(plan: BenchPlan, checkpoint: Checkpoint, workers: Sequence[MeasuringChild]) -> list[dict[str, Any]]:
    prompts = [random_prompt(checkpoint, plan.prompt, seed) for seed in range(1, max(plan.batches) + 1)]
    measured = [
        _Case(worker, batch, sampling)
        for batch in plan.batches
        for worker in workers
        if batch == 1 or worker.engine in BATCHED
        for sampling in (plan.samplings if worker.engine == "onedesk" else (GREEDY,))
    ]
    samples: dict[_Case, list[dict[str, Any]]] = {case: [] for case in measured}
    for worker in workers:
        worker.ask("load")
    for case in measured:
        case.ask(plan, prompts, WARM_UP_TOKENS)
    for cycle in range(plan.cycles):
        for case in measured:
            sample = case.ask(plan, prompts, plan.tokens)
            samples[case].append(sample)
            log.info("%s %s, %d of %d: %.3f s", plan.kind, case.title, cycle + 1, plan.cycles, sample["seconds"])
    rows = [
        _run_row(case, plan, found, bytes_per_pass(checkpoint, plan, case.worker.engine))
        for case, found in samples.items()
    ]
    first = {(row["engine"], row["batch"]): row["tokens_per_second"] for row in reversed(rows)}
    return [row | {"of_first": row["tokens_per_second"] / first[row["engine"], row["batch"]]} for row in rows]


def _with_estimates(
    rows: list[dict[str, Any]], plan: BenchPlan, checkpoint: Checkpoint, speed: DecodeSpeed
) -> list[dict[str, Any]]:
    """The rows with the expected speed, see _with_expected. The median share of this run is kept after all."""
    blueprint = draw_blueprint(checkpoint, pick_device(plan.device), SMALLEST_CONTEXT, plan.quant)
    reads = TokenReads(blueprint.pass_bytes, compose(checkpoint.config).active, blueprint.config.layers)
    made = [_with_expected(row, reads, speed) for row in rows]
    alone = [row["tokens_per_second"] for row in made if row["expected_ratio"] is not None]
    if alone:
        speed.keep(reads, statistics.median(alone))
    return made


def _with_expected(row: dict[str, Any], reads: TokenReads, speed: DecodeSpeed) -> dict[str, Any]:
    """The row of Onedesk's own decode at batch 1 with the speed that was to be expected before this run, and the
    measured one relative to it; None in other rows.
    """
    if (row["engine"], row["batch"]) != ("onedesk", 1):
        return row | {"expected_tokens_per_second": None, "expected_ratio": None}
    expected, measured = speed.tokens_per_second(reads), row["tokens_per_second"]
    return row | {"expected_tokens_per_second": expected, "expected_ratio": measured / expected}


@dataclass(frozen=True, slots=True)
class _Case:
    """One row of a run."""

    worker: MeasuringChild
    batch: int
    sampling: str

    @property
    def title(self) -> str:
        return f"{self.worker.engine}, {self.batch} rows, {self.sampling}"

    def ask(self, plan: BenchPlan, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        if plan.kind != "decode":
            return self.worker.ask(plan.kind, ids=prompts[0])
        return self.worker.ask("decode", prompts=prompts[: self.batch], tokens=tokens, sampling=self.sampling)


def _run_row(case: _Case, plan: BenchPlan, samples: Sequence[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": case.worker.engine, "batch": case.batch, "prompt": plan.prompt}
    row["sampling"] = case.sampling
    peak = {"peak_bytes": max(sample["peak_bytes"] for sample in samples)}
    if plan.kind == "prefill":
        seconds = statistics.median(sample["seconds"] for sample in samples)
        row |= {"tokens": plan.prompt, "seconds": seconds} | peak
        return row | {"tokens_per_second": plan.prompt / seconds, "bytes_per_second": nbytes / seconds}
    step = statistics.median(sample["seconds"] / sample["steps"] for sample in samples)
    allocations = [sample["allocations"] for sample in samples]
    steps = max(sample["steps"] for sample in samples)
    return row | {
        "tokens": plan.tokens,
        "seconds": step * steps,
        **peak,
        "tokens_per_second": case.batch / step,
        "bytes_per_second": nbytes / step,
        "major_faults_per_token": statistics.median(sample["major_faults"] for sample in samples) / steps,
        "allocations_per_token": None if None in allocations else max(allocations) / steps,
    }


def files_of_load(plan: BenchPlan, checkpoint: Checkpoint, cache: Path) -> Mapping[Path, int]:
    """The files read to open the model, and the bytes of weights in each; the converted file if the model was converted
    before.
    """
    blueprint = draw_blueprint(checkpoint, pick_device(plan.device), SMALLEST_CONTEXT, plan.quant, cache)
    infos = {reading.info for tensor in blueprint.plan.tensors for reading in tensor.readings}
    return {
        file: sum(info.nbytes for info in infos if info.file == file) for file in sorted({info.file for info in infos})
    }


def _load_rows(plan: BenchPlan, read: Mapping[Path, int], workers: Sequence[MeasuringChild]) -> list[dict[str, Any]]:
    """Cold: the files were evicted just before. Warm: they were read whole just before. Each with raw reads of the same
    files, into small buffers and (`fresh`) into new memory.
    """
    files = list(read)
    for worker in workers:  # imports and compiled kernels are not part of a load
        worker.ask("load")
        worker.ask("unload")
    raw: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(plan.cycles):
        for state, found in raw.items():
            make_state(state, files)
            small = read_whole(files)
            make_state(state, files)
            found.append((small, read_whole(files, fresh=True)))
        for worker in workers:
            for state in ("cold", "warm"):
                cached = make_state(state, files)
                samples.setdefault((worker.engine, state), []).append(
                    worker.ask("load", files=[str(file) for file in files]) | {"cached": cached}
                )
                worker.ask("unload")
    return [
        _load_row(engine, state, found, raw[state], sum(read.values())) for (engine, state), found in samples.items()
    ]


def _load_row(
    engine: str, state: str, samples: Sequence[dict[str, Any]], raw: Sequence[tuple[float, float]], nbytes: int
) -> dict[str, Any]:
    seconds = statistics.median(sample["seconds"] for sample in samples)
    raw_seconds, fresh_seconds = (statistics.median(found) for found in zip(*raw, strict=True))
    peak = max(sample["peak_bytes"] for sample in samples)
    return {
        "engine": engine,
        "state": state,
        "batch": 1,
        "tokens": 0,
        "tokens_per_second": None,
        "seconds": seconds,
        "raw_seconds": raw_seconds,
        "bytes_per_second": nbytes / seconds,
        "share": raw_seconds / seconds,
        "fresh_seconds": fresh_seconds,
        "fresh_share": fresh_seconds / seconds,
        "cached_before_bytes": max(sample["cached"] for sample in samples),
        "read_bytes": nbytes,
        "peak_bytes": peak,
        "peak_share": peak / nbytes,
    }


def make_state(state: str, files: Sequence[Path]) -> int:
    """Evict the files or read them whole; returns the bytes that are in the page cache now (a tmpfs or another
    reader keeps some).
    """
    if state == "warm":
        read_whole(files)
    else:
        evict(files)
    residency = Residency(files)
    cached = residency.resident()
    residency.close()
    return cached
