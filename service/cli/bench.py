"""`onedesk bench`: measure this machine, with its read bandwidth and other engines in the same run."""

from __future__ import annotations

import argparse

from ..bench.samplings import GREEDY, SAMPLINGS
from ..config import load_config
from ..console import UsageError, write_json
from ..loader.files import short
from .options import SUCCESS, Subcommands, batches, whole_from


def add_to(subcommands: Subcommands) -> None:
    """Add `bench` to the command."""
    parser = subcommands.add(
        "bench", run, "Measure load, prefill, decode, first token, wake or hand-over, and the read bandwidth."
    )
    kinds = ("load", "prefill", "decode", "ttft", "wake", "handover")
    what = "what is measured; ttft: time to first token; wake: the same for a model that gave way"
    parser.add_argument("kind", choices=kinds, help=what)
    batch = "batch sizes to decode, each 1 (the default) to 8"
    parser.add_argument("--batch", type=batches, default=[1], metavar="1,2,4,8", help=batch)
    parser.add_argument(
        "--tokens", type=whole_from(2), default=0, metavar="N", help="tokens to decode; default 64, handover 16"
    )
    prompt = "tokens of the prompt; default 512, decode 128, wake 16"
    parser.add_argument("--prompt", type=whole_from(1), default=0, metavar="N", help=prompt)
    sampling = f"settings to decode with, in turn: {', '.join(SAMPLINGS)}; default greedy"
    parser.add_argument("--sampling", type=_samplings, default=[GREEDY], metavar="NAME,...", help=sampling)
    cycles = "repetitions of each measurement; default 5, handover 300"
    parser.add_argument("--cycles", type=whole_from(1), default=0, metavar="N", help=cycles)
    parser.add_argument(
        "--against", choices=("transformers", "llama.cpp"), help="measure this engine too, in the same run"
    )


def _samplings(text: str) -> list[str]:
    """Read "greedy,card"."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SAMPLINGS]:
        raise argparse.ArgumentTypeError(f"{short(unknown[0])} is none of {', '.join(SAMPLINGS)}")
    return names


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    from ..bench.kinds import kind_table, measure_kind
    from ..bench.run import BenchPlan
    from ..catalog.inventory import default_model, model_roots
    from ..engine.buffers import MAX_BATCH

    if args.batch != [1] and (args.kind != "decode" or max(args.batch) > MAX_BATCH):
        raise UsageError(
            f"--batch {','.join(map(str, args.batch))}: only decode is measured in batches, of up to {MAX_BATCH}"
            " sequences"
        )
    if args.sampling != [GREEDY] and args.kind != "decode":
        raise UsageError(
            f"--sampling {','.join(args.sampling)}: only decode is measured with settings other than greedy"
        )
    config = load_config(args.config)
    name = args.model or ("" if args.kind == "handover" else default_model(config))
    if name is None:
        raise UsageError(
            "no model is named; use --model NAME, FOLDER, FILE, or a shape such as qwen3-0.6b (random weights)"
        )
    plan = BenchPlan(
        args.kind,
        name,
        args.quant,
        args.device,
        args.tokens,
        args.prompt,
        args.cycles,
        args.against,
        tuple(args.batch),
        tuple(args.sampling),
    )
    document = measure_kind(plan, config, model_roots(config))
    write_json(document) if args.json else print(kind_table(document))
    return SUCCESS
