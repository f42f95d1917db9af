"""Checks on a CUDA device with random checkpoints: the same tokens as the CPU, measured returns of memory, unchanged
text.

python -m onedesk.lab.cuda_check [--cycles 10] [--cache FOLDER] [--json]

Exit 1 if a check fails. Speeds are printed for information. Managed memory is checked too if cuda-bindings is
installed, and a small network of every family, see cuda_families.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..service.api import OpenModel, open_model, pick_device
from ..service.bench.shapes import SHAPES, write_random
from ..service.console import failure, write_json
from ..service.core import Request, Result, Sampling
from ..service.errors import ModelError, OnedeskError, RequestError
from ..service.memory.backends.managed import LASTING
from ..service.memory.budget import MIB, MemorySettings
from ..service.memory.pool import Pool, Released
from ..service.memory.truth import read_truth
from .cuda_families import NAMES, broken_rows, family_row

# Small enough for the CPU, with all parts of the family. FP32, so that both devices sum the same numbers.
SMALL: Mapping[str, Any] = {
    **SHAPES["qwen3-0.6b"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,  # tied random weights repeat one token forever
    "torch_dtype": "float32",
}
LARGE: Mapping[str, Any] = {**SHAPES["qwen3-0.6b"], "tie_word_embeddings": False}
LARGE_NAME = "qwen3-0.6b-untied"
PROMPT, TOKENS, CONTEXT = 300, 64, 1024
RETURNED_SHARE = 0.98
# Small compared with any card: asking a card for more managed memory than it has free can hang it.
MANAGED_BYTES = 256 * MIB


def prompt_of(model: OpenModel) -> tuple[int, ...]:
    """PROMPT random ids, the same for every model of one vocabulary. Longer than a prefill chunk."""
    return tuple(torch.randint(0, model.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist())


def answer(model: OpenModel) -> Result:
    """TOKENS tokens after the prompt, greedy. The whole prompt is read: its last tokens round differently after a
    cached prefix.
    """
    request = Request(ids=prompt_of(model), sampling=Sampling(temperature=0.0), max_tokens=TOKENS, prefix_reuse=False)
    result = [event.result for event in model.generate(request)][-1]
    if result is None or result.finish != "length":
        raise ModelError(f"the answer of {model.name} ended with {result and result.finish}, not after {TOKENS} tokens")
    return result


def opened(path: Path, device: str, cache: Path, settings: MemorySettings | None = None) -> OpenModel:
    """The model of `path` in its own pool."""
    return open_model(
        path, pool=made_pool(device, settings), context=CONTEXT, device=pick_device(device).type, kernel_cache=cache
    )


def made_pool(device: str, settings: MemorySettings | None = None) -> Pool:
    kind = pick_device(device).type
    return Pool(kind, settings or MemorySettings(), lambda: read_truth(kind))


def same_as_cpu(device: str, cache: Path, settings: MemorySettings | None = None) -> dict[str, Any]:
    """Whether `device` gives the CPU's tokens and scores, in FP32. `score_difference`: the largest difference of a
    log-probability.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder), SMALL, dtype=torch.float32)
        found: list[tuple[Result, list[float]]] = []
        for name, chosen in (("cpu", None), (device, settings)):
            model = opened(Path(folder), name, cache, chosen)
            found.append((answer(model), model.score(prompt_of(model))))
            model.close()
    truth, ours = found
    same = sum(a == b for a, b in zip(ours[0].ids, truth[0].ids, strict=True))
    return {
        "tokens": TOKENS,
        "same": same,
        "distinct": len(set(truth[0].ids)),
        "score_difference": _apart(ours[1], truth[1]),
    }


def _apart(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference between two rows of log-probabilities."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def give_way_cycles(path: Path, device: str, cache: Path, cycles: int) -> dict[str, Any]:
    """Answer, evict, measure with the driver, wake and answer again, `cycles` times; see `row_of` for the figures per
    cycle.

    `drift_bytes`: how much less the device has free at the end than after the first third of the cycles.
    """
    model = opened(path, device, cache)
    first, scores, weights = answer(model), model.score(prompt_of(model)), model.weight_checksums()
    steady = answer(model).ids == first.ids
    rows: list[dict[str, Any]] = []
    for _ in range(cycles):
        held, before = model.held_bytes(), free_bytes(device)
        released = model.give_way()
        free = free_bytes(device)
        row = row_of(held, released, free - before) | {"free": free}
        again = answer(model)  # read while the weights still load
        row |= {
            "wake_seconds": again.seconds["first_token"],
            "same": again.ids == first.ids,
            "same_once_there": answer(model).ids == first.ids,
            "score_difference": _apart(model.score(prompt_of(model)), scores),
            "weights_same": model.weight_checksums() == weights,
        }
        rows.append(row)
    stages, kernels = answer(model).stages, model.kernels
    model.close()
    return {
        "model": model.name,
        "kernels": kernels,
        "steady": steady,
        "distinct": len(set(first.ids)),
        "prefill_tokens_per_second": PROMPT / stages["prefill"].seconds,
        "decode_tokens_per_second": (TOKENS - 1) / stages["decode"].seconds,
        "decode_allocations": stages["decode"].allocations,
        "drift_bytes": rows[cycles // 3]["free"] - rows[-1]["free"],
        "rows": rows,
    }


def managed_memory(device: str, cache: Path) -> dict[str, Any]:
    """What managed memory does on this machine: `can`, bytes returned, bytes on the card while half was moved to the
    host and after all was touched again, whether the content stayed, and the tokens of the small model. Only `missing`
    if it cannot be used.
    """
    settings = MemorySettings(managed=True)
    try:
        pool = made_pool(device, settings)
    except RequestError as error:
        return {"missing": str(error)}
    before, truth = free_bytes(device), pool.backend.capabilities()
    lease = pool.lease("check", "weights", MANAGED_BYTES)
    taken = before - free_bytes(device)
    lease.carve((MANAGED_BYTES // 8,), torch.int64).copy_(torch.arange(MANAGED_BYTES // 8, device=device))
    content, slab = lease.checksum(), lease.placement.slab
    slab.advise("aside", 0, MANAGED_BYTES // 2)
    aside = lease.resident(), before - free_bytes(device)
    same = lease.checksum() == content  # the card touches what was moved to the host
    lease.populate()
    advised = [advice for advice in LASTING if lease.advise(advice)]
    returned = lease.release()
    return {
        "can": dict(truth),
        "advised": advised,
        "bytes": {"asked": returned.asked, "measured": returned.measured, "on_card": taken, "half_aside": aside[1]},
        "counted_half_aside": aside[0],
        "content_same": same,
        "same_as_cpu": same_as_cpu(device, cache, settings),
    }


def row_of(held: int, released: Sequence[Released], driver: int) -> dict[str, Any]:
    """One eviction: bytes held before, bytes asked and measured by the pool, bytes freed by the driver's figure,
    seconds.
    """
    asked, measured = sum(item.asked for item in released), sum(item.measured for item in released)
    return {
        "held": held,
        "asked": asked,
        "measured": measured,
        "driver": driver,
        "seconds": sum(item.seconds for item in released),
    }


def free_bytes(device: str) -> int:
    """The device's free bytes by its driver, after emptying torch's cache, so that only live memory counts."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def broken(equal: Mapping[str, Any], gave: Mapping[str, Any], managed: Mapping[str, Any]) -> list[str]:
    """The failed checks, in words."""
    rows = gave["rows"]
    found = [] if "missing" in managed else _broken_managed(managed)
    if equal["same"] != equal["tokens"]:
        found.append(f"{equal['same']} of {equal['tokens']} tokens are those of the CPU")
    for name, whole in (("driver", "held"), ("measured", "asked")):
        least = min(row[name] / row[whole] for row in rows)
        if least < RETURNED_SHARE:
            found.append(f"a give-way returned {least:.1%} of the bytes {whole}, by the figure {name}")
    if not gave["steady"]:
        found.append("the same question had two answers although the model stayed in memory")
    for name, words in (
        ("same", "the text while waking was another one"),
        ("same_once_there", "the text after waking was another one"),
        ("weights_same", "weights were other ones after waking"),
    ):
        count = sum(not row[name] for row in rows)
        if count:
            found.append(f"{words}, {count} of {len(rows)} times")
    return found


def _broken_managed(managed: Mapping[str, Any]) -> list[str]:
    found, nbytes, equal = [], managed["bytes"], managed["same_as_cpu"]
    if nbytes["measured"] < RETURNED_SHARE * MANAGED_BYTES or nbytes["asked"] != MANAGED_BYTES:
        found.append(f"managed memory returned {nbytes['measured']} of {MANAGED_BYTES} bytes")
    if (
        abs(nbytes["half_aside"] - MANAGED_BYTES // 2) > MANAGED_BYTES // 20
        or managed["counted_half_aside"] != MANAGED_BYTES // 2
    ):
        found.append(f"with half of {MANAGED_BYTES} bytes set aside the card still held {nbytes['half_aside']}")
    if not managed["content_same"]:
        found.append("managed memory held other bytes after a part was set aside")
    if equal["same"] != equal["tokens"]:
        found.append(f"{equal['same']} of {equal['tokens']} tokens are those of the CPU in managed memory")
    return found


def check(cycles: int, cache: Path) -> dict[str, Any]:
    """The document; `failures` lists the failed checks. Raises OnedeskError, and RequestError without a CUDA device."""
    device = pick_device("cuda").type
    started = time.perf_counter()
    equal, managed = same_as_cpu(device, cache), managed_memory(device, cache)
    path = cache / "bench" / LARGE_NAME
    path.mkdir(parents=True, exist_ok=True)
    write_random(path, LARGE)
    gave = give_way_cycles(path, device, cache, cycles)
    families = [family_row(family, device, cache) for family in NAMES]
    return {
        "kind": "cuda_check",
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "seconds": time.perf_counter() - started,
        "allocator": torch.cuda.get_allocator_backend(),
        "failures": broken(equal, gave, managed) + broken_rows(families),
        "same_as_cpu": equal,
        "managed": managed,
        "give_way": gave,
        "families": families,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="cuda_check", description="check the engine on a CUDA device with random checkpoints"
    )
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument(
        "--cache",
        type=Path,
        help="where the random checkpoint and compiled kernels are kept; otherwise they are temporary",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.cycles < 1:
        parser.error(f"--cycles is {args.cycles}; use a whole number from 1")
    try:
        with tempfile.TemporaryDirectory() as folder:
            document = check(args.cycles, args.cache or Path(folder))
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"cuda_check: {error}\n")
        return 1
    (sys.stderr if args.json else sys.stdout).write(summary(document))
    if args.json:
        write_json(document)
    return 1 if document["failures"] else 0


def summary(document: Mapping[str, Any]) -> str:
    """The document for people."""
    equal, gave, managed = document["same_as_cpu"], document["give_way"], document["managed"]
    least = min(row["driver"] / row["held"] for row in gave["rows"])
    lines = [
        f"{document['device']}, torch {document['torch']}, {document['seconds']:.0f} s",
        (
            f"FP32: {equal['same']} of {equal['tokens']} tokens are those of the CPU, log-probabilities within"
            f" {equal['score_difference']:.1e}"
        ),
        (
            f"{gave['model']} in BF16, evicted and back {len(gave['rows'])} times: at least {least:.1%} returned by the"
            " driver's figure"
        ),
        f"the device has {gave['drift_bytes'] / MIB:.1f} MiB less free than after the first third of them",
        (
            f"prefill {gave['prefill_tokens_per_second']:.0f} tokens/s, decode {gave['decode_tokens_per_second']:.1f}"
            " tokens/s"
        ),
        f"steps in a graph: {', '.join(row['family'] for row in document['families'] if row['graph']) or 'none'}",
        f"managed memory: {managed.get('missing') or ', '.join(name for name, can in managed['can'].items() if can)}",
        *document["failures"],
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
