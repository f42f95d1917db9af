"""Decode, prefill and memory of a published shape with random weights made on the device: Qwen3.8-Flash-Next with 4-bit
experts.

    python -m onedesk.lab.flash_next [--model qwen3.8-flash-next] [--experts int4|nvfp4|bf16] [--batch 1,8] [--seconds
    240] [--prompt 2048] [--tokens 128] [--drafts 85,0] [--device cuda|cpu] [--tiny] [--folder FOLDER] [--profile FILE]
    [--json]

Every result is reported at once (stderr), and no new part starts after `--seconds`. The first pass of each kind
compiles and is reported separately. `--tiny`: the same layers, small, for a machine without a GPU. The table's file is
sparse and takes no disk space. `--drafts`: with the multi-token prediction layer, of whose draft tokens this percentage
is right; texts with and without drafts in turn. `--profile`: the time of one more prompt and ten more steps per kernel,
in a file of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..service.bench.ceiling import read_ceiling
from ..service.cache.paged import SequenceKV
from ..service.catalog.composition import compose
from ..service.catalog.forms import STORES, Form
from ..service.catalog.known_configs import PUBLISHED, published_name
from ..service.catalog.plan import NodeLoad
from ..service.config import load_config
from ..service.console import failure, write_json
from ..service.core import Sampling
from ..service.engine.sampler import Sampler
from ..service.engine.session import Blueprint, pick_device, sketch
from ..service.engine.stepper import Feed
from ..service.errors import OnedeskError, RequestError
from ..service.memory.budget import MemorySettings
from ..service.memory.pool import Pool
from ..service.memory.truth import read_truth
from ..service.quant.formats import NVFP4, int4
from ..service.quant.weight import Format
from .clock import Clock
from .draft_layers import draft_row
from .made_networks import Made, made_blueprint, make

EXPERTS: Mapping[str, Format | None] = {"int4": int4(128), "int4-g32": int4(32), "nvfp4": NVFP4, "bf16": None}
# Makes a shape small but keeps every kind of layer; head_dim and widths suit the fused kernels.
TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hc_lowrank": 32,
    "ple_embed_dim": 256,
    "ngram_vocab_size_base": 1009,
    "eos_token_id": 2,
    "split_ngram_parts": 4,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "max_position_embeddings": 4096,
}


PROFILED = 10  # steps


def shape_of(name: str, *, tiny: bool) -> tuple[str, dict[str, Any]]:
    """The published name and its config, small if `tiny`. Raises RequestError."""
    known = published_name(name)
    if known is None:
        raise RequestError(f"no published shape is called {name!r}; known are {', '.join(PUBLISHED)}")
    config = dict(PUBLISHED[known])
    if tiny:
        inner = dict(config.get("text_config", config))
        inner |= {key: value for key, value in TINY.items() if key in inner}
        inner.pop("layer_types", None)
        config = {**config, "text_config": inner} if "text_config" in config else inner
    return known, config


def measure(args: argparse.Namespace, folder: Path, clock: Clock) -> dict[str, Any]:
    """The document; parts that there was no time for are missing. Raises OnedeskError."""
    name, config = shape_of(args.model, tiny=args.tiny)
    if args.drafts:  # draft tokens are rigged through the head, which must not be the embedding
        inner = config.get("text_config", {})
        config |= {"tie_word_embeddings": False} | (
            {"text_config": {**inner, "tie_word_embeddings": False}} if inner else {}
        )
    stated: dict[str, Any] = dict(load_config(None).memory)
    device, settings = pick_device(args.device), MemorySettings(**stated)
    context = args.prompt + args.tokens * 4 + 64
    blueprint = made_blueprint(
        config, device, context, EXPERTS[args.experts], folder, max(args.batch), draft=bool(args.drafts)
    )
    need = blueprint.need
    clock.tell(
        f"{name}: weights {need.weights / 1e9:.2f} GB, caches {need.kv / 1e9:.2f} GB, scratch"
        f" {need.scratch / 1e9:.2f} GB"
    )
    document: dict[str, Any] = {
        "kind": "flash_next",
        "model": name,
        "experts": args.experts,
        "device": str(device),
        "tiny": args.tiny,
    }
    ceiling = read_ceiling(device.type, available=read_truth(device.type).available, repeats=3)
    before = _held(device)
    pool = Pool(device.type, settings, lambda: read_truth(device.type))
    made = make(blueprint, pool, load_config(None).cache)
    _wait(device)
    captured = made.runner.network.captured
    clock.tell(
        f"made; read ceiling {ceiling / 1e9:.0f} GB/s; {made.kernels.reason}; a step is"
        f" {'a graph' if captured else 'NOT a graph'}"
    )
    document |= {"need": need.weights + need.kv + need.scratch, "captured": captured, "read_bytes_per_second": ceiling}
    try:
        document["prefill"] = prefill_rows(made, args.prompt, clock, args.profile)
        document["decode"] = [
            row for batch in args.batch if not clock.over for row in [decode_row(made, batch, args, ceiling, clock)]
        ]
        document["drafts"] = [
            row for right in args.drafts if not clock.over for row in [draft_row(made, pool, right, args.tokens, clock)]
        ]
        document["memory"] = memory_row(name, args, blueprint, _held(device) - before, clock)
    finally:
        made.release()
    return document


def prefill_rows(made: Made, tokens: int, clock: Clock, profile: Path | None) -> dict[str, Any]:
    """A prompt of this many tokens, repeated; the first time compiles."""
    seconds: list[float] = []
    for turn in range(4):
        if turn and clock.over:
            break
        with made.runner.kv.open(tokens + 1) as sequence:
            began = time.perf_counter()
            made.runner.prefill(sequence, _ids(made, tokens, turn), None, lambda _: None)
            _wait(made.blueprint.device)
            seconds.append(time.perf_counter() - began)
        clock.tell(
            f"prefill of {tokens}: {seconds[-1]:.3f} s, {tokens / seconds[-1]:,.0f} tokens/s"
            + ("" if turn else " (compiles)")
        )
    if profile is not None:
        with made.runner.kv.open(tokens + 1) as sequence, told(profile, f"prefill of {tokens}", made.blueprint.device):
            made.runner.prefill(sequence, _ids(made, tokens, 9), None, lambda _: None)
    best = statistics.median(seconds[1:]) if len(seconds) > 1 else seconds[0]
    return {"tokens": tokens, "first_seconds": seconds[0], "seconds": seconds[1:], "tokens_per_second": tokens / best}


def decode_row(made: Made, batch: int, args: argparse.Namespace, ceiling: float, clock: Clock) -> dict[str, Any]:
    """This many sequences after a short prompt. The first steps compile and capture; the others are timed singly."""
    sampler = Sampler(Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0), 0, [], made.blueprint.widths.vocab)
    sequences = [made.runner.kv.open(args.prompt // 8 + 4 * args.tokens) for _ in range(batch)]
    tokens: list[int] = []
    for row, sequence in enumerate(sequences):
        scores = made.runner.prefill(sequence, _ids(made, max(8, args.prompt // 16), 50 + row), None, lambda _: None)
        tokens.append(int(scores.argmax()))
    seconds: list[float] = []
    began = time.perf_counter()
    for _ in range(3):
        tokens = _step(made, sequences, tokens, sampler)
    first = time.perf_counter() - began
    clock.tell(f"decode, {batch} rows: the first 3 steps {first:.2f} s (compiles, captures)")
    for _ in range(args.tokens):
        began = time.perf_counter()
        tokens = _step(made, sequences, tokens, sampler)
        seconds.append(time.perf_counter() - began)
        if clock.over:
            break
    if args.profile is not None:
        with told(args.profile, f"{PROFILED} steps of {batch} rows", made.blueprint.device):
            for _ in range(PROFILED):
                tokens = _step(made, sequences, tokens, sampler)
    for sequence in sequences:
        sequence.close()
    rate = batch * len(seconds) / sum(seconds)
    read = made.blueprint.pass_bytes / statistics.median(seconds)
    clock.tell(
        f"decode, {batch} rows: {rate:.1f} tokens/s, a step {statistics.median(seconds) * 1e3:.2f} ms (median; least "
        f"{min(seconds) * 1e3:.2f}), {read / 1e9:.0f} GB/s at one row's experts, {read / ceiling:.0%} of the ceiling"
    )
    return {
        "batch": batch,
        "tokens_per_second": rate,
        "step_seconds": statistics.median(seconds),
        "share": read / ceiling,
        "first": first,
    }


@contextmanager
def told(path: Path, what: str, device: torch.device) -> Iterator[None]:
    """Append to the file the kernels that the block ran, with counts and times, longest first."""
    kinds = [
        torch.profiler.ProfilerActivity.CPU,
        *([torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []),
    ]
    with torch.profiler.profile(activities=kinds) as profiler:
        began = time.perf_counter()
        yield
        _wait(device)
        seconds = time.perf_counter() - began
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"== {what}: {seconds:.4f} s under the profiler\n")
        file.write(profiler.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=60) + "\n")


def _step(made: Made, sequences: Sequence[SequenceKV], tokens: Sequence[int], sampler: Sampler) -> list[int]:
    made.stepper.launch(
        [Feed(kv, sampler, token, -1, 0, wanted=True) for kv, token in zip(sequences, tokens, strict=True)]
    )
    return [picked.token for picked in made.stepper.collect()]


def memory_row(name: str, args: argparse.Namespace, blueprint: Blueprint, held: int, clock: Clock) -> dict[str, Any]:
    """The device's memory in use, compared with the bytes requested, and with what `doctor --plan` counts for this
    variant and number of sequences.
    """
    need = blueprint.need.weights + blueprint.need.kv + blueprint.need.scratch
    row: dict[str, Any] = {"need": need, "held": held, "share": held / need}
    clock.tell(f"memory: the device holds {held / 1e9:.2f} GB, asked for {need / 1e9:.2f} GB ({held / need - 1:+.1%})")
    if not args.tiny and args.experts in STORES:
        form = Form(f"experts {args.experts}", {"experts": args.experts}, {"experts": args.experts})
        planned = planned_bytes(form, blueprint, args.device)
        row |= {"plan_bytes": planned, "of_plan": held / planned}
        clock.tell(f"memory: the plan of this form counts {planned / 1e9:.2f} GB ({held / planned - 1:+.1%})")
    return row


def planned_bytes(form: Form, blueprint: Blueprint, device: str) -> int:
    """Bytes by the arithmetic of `doctor --plan`, with keys and values of several sequences."""
    network, context = compose(blueprint.checkpoint.config), blueprint.context
    weights = form.held_bytes(network) + (form.draft_bytes(network) if blueprint.config.draft else 0)
    load = NodeLoad(weights, 0, sketch(network.module, blueprint.config, pick_device(device)))
    return load.weights + load.kv(context) + (blueprint.sequences - 1) * context * load.kv_token + load.scratch(context)


def _ids(made: Made, count: int, seed: int) -> list[int]:
    return torch.randint(
        3, made.blueprint.widths.vocab, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _held(device: torch.device) -> int:
    """Bytes in use on the device, by its driver; unknown for the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="flash_next", description="measure a published shape with random weights made on the device"
    )
    parser.add_argument("--model", default="Qwen3.8-Flash-Next")
    parser.add_argument("--experts", choices=list(EXPERTS), default="int4")
    parser.add_argument("--batch", type=_numbers, default=[1])
    parser.add_argument("--drafts", type=_numbers, default=[])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the sparse table lies")
    parser.add_argument("--profile", type=Path, help="a file that takes what each kernel cost")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            document = measure(args, args.folder or Path(folder), Clock(args.seconds))
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"flash_next: {error}\n")
        return 1
    if args.json:
        write_json(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
