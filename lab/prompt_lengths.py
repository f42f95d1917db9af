"""How prefill time grows with the prompt's length, in total and for the layers with a recurrent state, on small random
hybrid models.

    python -m onedesk.lab.prompt_lengths [--lengths 1024,2048,4096,8192,16384] [--families qwen3_next,qwen4_exp]
    [--cycles 3]

One thread, and processor time: other programs on the cores do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..service.bench.run import random_prompt
from ..service.bench.shapes import write_random
from ..service.cache.paged import PagedKV
from ..service.config import load_config
from ..service.console import write_json
from ..service.engine.runner import Runner
from ..service.engine.session import Opening, draw_blueprint, open_session
from ..service.errors import OnedeskError
from ..service.kernels.operands import LayerPart
from ..service.loader.checkpoint import open_checkpoint
from ..service.memory.budget import MemorySettings
from ..service.memory.pool import Pool
from ..service.memory.truth import read_truth
from ..service.model.delta import GatedDelta
from ..service.model.layers import Layer, Pass
from ..service.model.streams import Streamed

COMMON: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": 2,
}
STREAMS: Mapping[str, Any] = {
    "output_gate_type": "sigmoid",
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_layer_ids": [2],
    "ple_embed_dim": 256,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 20011,
    "split_ngram_parts": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {**COMMON, "model_type": "qwen3_next"},
    "qwen4_exp": {**COMMON, **STREAMS, "model_type": "qwen4_exp_text"},
}


@dataclass(slots=True)
class Timed:
    """A layer whose processor time is added up."""

    layer: Layer
    seconds: float = 0.0

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.layer.parts

    def run(self, at: Pass, /) -> None:
        began = time.process_time()
        self.layer.run(at)
        self.seconds += time.process_time() - began


def measure_lengths(family: str, lengths: Sequence[int], cycles: int, cache: Path) -> dict[str, Any]:
    """One row per length: median processor seconds of a prompt and of its delta nets, and their ratios to the previous
    row.
    """
    with tempfile.TemporaryDirectory() as place:
        write_random(Path(place), FAMILIES[family], dtype=torch.float32)
        checkpoint = open_checkpoint(Path(place))
        pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
        opened = open_session(
            family, draw_blueprint(checkpoint, torch.device("cpu"), max(lengths) + 1), Opening(pool, cache)
        )
        opened.settle()
        timed = _time_delta_nets(opened.runner)
        seconds: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
        for cycle in range(cycles + 1):
            for length in lengths:
                taken = _read(opened.runner, opened.runner.kv, random_prompt(checkpoint, length, cycle), timed)
                if cycle:  # the first one is a warm-up
                    seconds[length].append(taken)
        opened.release()
    medians = {
        length: [statistics.median(part) for part in zip(*found, strict=True)] for length, found in seconds.items()
    }
    rows = []
    for before, length in zip((None, *lengths), lengths, strict=False):
        whole, linear = medians[length]
        ratios = (whole / medians[before][0], linear / medians[before][1]) if before is not None else (None, None)
        rows.append(
            {
                "tokens": length,
                "seconds": whole,
                "linear_seconds": linear,
                "ratio": ratios[0],
                "linear_ratio": ratios[1],
            }
        )
    return {"kind": "lengths", "family": family, "cycles": cycles, "rows": rows}


def _time_delta_nets(runner: Runner) -> list[Timed]:
    found = []
    for block in runner.network.blocks:
        streamed = block.mixer if isinstance(block.mixer, Streamed) else None
        layer = streamed.layer if streamed else block.mixer
        if isinstance(layer, GatedDelta):
            found.append(Timed(layer))
            if streamed:
                streamed.layer = found[-1]
            else:
                block.mixer = found[-1]
    return found


def _read(runner: Runner, kv: PagedKV, ids: Sequence[int], timed: Sequence[Timed]) -> tuple[float, float]:
    for layer in timed:
        layer.seconds = 0.0
    with kv.open(len(ids)) as sequence:
        began = time.process_time()
        runner.prefill(sequence, ids, None, lambda _: None)
        return time.process_time() - began, sum(layer.seconds for layer in timed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; one document per family, one line each."""
    parser = argparse.ArgumentParser(prog="lengths", description="measure how reading a prompt grows with its length")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args(argv)
    lengths, families = [int(length) for length in args.lengths.split(",")], args.families.split(",")
    if args.cycles < 1 or min(lengths) < 1 or not set(families) <= set(FAMILIES):
        parser.error(f"--cycles and --lengths begin at 1, --families are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    try:
        cache = load_config(args.config).cache
        for family in families:
            write_json(measure_lengths(family, lengths, args.cycles, cache))
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
