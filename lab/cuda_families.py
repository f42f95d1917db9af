"""Small random networks of every family on a CUDA device: scores close to the CPU's, and equal steps with and without a
graph.

python -m onedesk.lab.cuda_families [--device cuda|cpu] [--families NAME,..] [--json]

Exit 1 if a check fails. Each family is reported as it finishes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..service.api import OpenModel, open_model
from ..service.bench.shapes import write_random
from ..service.config import load_config
from ..service.console import failure, write_json
from ..service.core import Request, Sampling
from ..service.engine.session import pick_device
from ..service.engine.stepper import HostStepper
from ..service.errors import OnedeskError
from ..service.memory.budget import MemorySettings
from ..service.memory.pool import Pool
from ..service.memory.truth import read_truth
from .flash_next import shape_of

# One published shape per family, scaled down.
NAMES: Mapping[str, str] = {
    "qwen3_moe": "Qwen3-30B-A3B",
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_5": "Qwen3.5-4B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "qwen4_exp": "Qwen3.8-Flash-Next",
}
# Longer than the small indexer's budget, than a block and than a few rows, and no multiple of them.
PROMPT, TOKENS, CONTEXT, ROWS = 203, 24, 512, 3
# Median difference of a log-probability between activations of 16 and of 32 bits that rounding explains. Plain torch in
# BF16 has medians of 0.002 to 0.023 on these networks, and a worst of 0.63, where rounding selects another expert; they
# spread by 0.2 to 0.6.
DIFFERENCE = 0.05
# Without a draw, so that tokens of equal score cannot be exchanged.
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(
        temperature=0.0,
        presence_penalty=1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias={5: 1.5, 6: -100.0},
    ),
)


def broken_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The failed checks, in words."""
    found: list[str] = []
    for row in rows:
        if not row["score_difference"] <= DIFFERENCE:
            found.append(
                f"{row['family']}: log-probabilities are {row['score_difference']:.3f} from the CPU's in the median"
            )
        if row["device"] == "cuda" and not row["graph"]:
            found.append(f"{row['family']}: its steps are no graph ({row['kernels']})")
        if row["other_texts"]:
            texts = f"{row['other_texts']} of {ROWS * len(SAMPLINGS)} texts"
            found.append(f"{row['family']}: {texts} are other ones than without a graph")
    return found


def family_row(family: str, device: str, cache: Path) -> dict[str, Any]:
    """Whether a step of the family is a graph, how far its scores are from the CPU's, and how many texts differ with
    and without a graph.
    """
    config = shape_of(NAMES[family], tiny=True)[1]
    config = dict(config.get("text_config", config)) | {"tie_word_embeddings": False}
    vocab = config["vocab_size"]
    ids = [
        torch.randint(3, vocab, (PROMPT - 40 * row,), generator=torch.Generator().manual_seed(row)).tolist()
        for row in range(ROWS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder), config)
        model = _opened(Path(folder), "cpu", cache)
        truth = model.score(tuple(ids[0]))
        model.close()
        model = _opened(Path(folder), device, cache)
        ours = model.score(tuple(ids[0]))
        texts = _texts(model, ids)
        session = model.session
        graph = session is not None and not isinstance(session.stepper, HostStepper)
        if session is not None and graph:
            session.stepper.close()
            session.stepper = HostStepper(session.runner)
        again, kernels = _texts(model, ids), model.kernels
        model.close()
    apart = [abs(a - b) for a, b in zip(ours, truth, strict=True)]
    return {
        "family": family,
        "device": pick_device(device).type,
        "kernels": kernels,
        "graph": graph,
        "score_difference": statistics.median(apart),
        "worst_difference": max(apart),
        "other_texts": sum(a != b for a, b in zip(texts, again, strict=True)),
        "distinct": len({token for text in texts for token in text}),
    }


def _opened(path: Path, device: str, cache: Path) -> OpenModel:
    kind = pick_device(device).type
    pool = Pool(kind, MemorySettings(), lambda: read_truth(kind))
    return open_model(path, pool=pool, context=CONTEXT, device=kind, kernel_cache=cache, sequences=ROWS)


def _texts(model: OpenModel, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """TOKENS tokens after each prompt, greedy, as one batch; without and with penalties and a bias."""
    requests = [
        Request(ids=tuple(row), sampling=sampling, max_tokens=TOKENS, prefix_reuse=False)
        for sampling in SAMPLINGS
        for row in ids
    ]
    found = {
        event.request: list(event.result.ids) for event in model.generate_batch(requests) if event.result is not None
    }
    return [found[row] for row in range(len(requests))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="cuda_families", description="check a small network of every family on a CUDA device"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--families", default=",".join(NAMES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    wanted, rows = args.families.split(","), []
    if not set(wanted) <= set(NAMES):
        parser.error(f"--families is {args.families}; known are {', '.join(NAMES)}")
    try:
        for family in wanted:
            rows.append(family_row(family, args.device, load_config(None).cache))
            sys.stderr.write(f"{rows[-1]}\n")
            sys.stderr.flush()
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"cuda_families: {error}\n")
        return 1
    broken = broken_rows(rows)
    sys.stderr.write("".join(line + "\n" for line in broken))
    if args.json:
        write_json({"kind": "cuda_families", "rows": rows, "failures": broken})
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
