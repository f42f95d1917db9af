"""Converts a folder that is far larger than the memory limit, once without interruption and once killed repeatedly.
Both must write the same bytes.

    python -m onedesk.lab.conversion [--gigabytes 6] [--limit 640] [--quant int4] [--folder DIR]

The folder has one shard per layer, sparse on the disk except for its first numbers. Each child is in a real memory
limit that includes page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..service.console import write_json
from ..service.errors import FileError, OnedeskError
from ..service.kernels.cpu.compile import compile_library
from ..service.memory.budget import MIB
from ..service.model.families import family_of
from .memory_group import MemoryGroup

# A layer of 64 experts is 51 MB; its largest tensor is 33 MB.
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
FILLED = 1 << 19  # numbers of a shard that are not zero
KILLS = (0.3, 0.7)  # of all bytes that are written
SECONDS = 1800  # time limit of a child

CHILD = """
import resource, sys
open(sys.argv[1], "w").write("0")
from onedesk.service.cli.command import main
status = main(["quantize", *sys.argv[2:], "--json"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(status)
"""


def write_large(folder: Path, nbytes: int) -> None:
    """Write a checkpoint of about this many bytes, with one shard per layer."""
    layers = max(1, nbytes // (SHAPE["num_experts"] * 3 * SHAPE["moe_intermediate_size"] * SHAPE["hidden_size"] * 2))
    config = SHAPE | {"num_hidden_layers": layers}
    family = family_of(config)
    shards: dict[int, dict[str, tuple[int, ...]]] = {}
    for wanted in family.destinations(family.read_config(config)):
        shards.setdefault(wanted.part, {}).update({source.name: source.shape for source in wanted.sources})
    folder.mkdir()
    generator, names = torch.Generator().manual_seed(0), {}
    for part, tensors in shards.items():
        name = f"model-{part:05d}.safetensors"
        names.update(dict.fromkeys(tensors, name))
        _write_sparse(folder / name, tensors, torch.randn(FILLED, generator=generator).bfloat16())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_sparse(path: Path, tensors: dict[str, tuple[int, ...]], first: torch.Tensor) -> None:
    entries, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(first.view(torch.uint8).numpy().data[:end])
        file.truncate(8 + len(header) + end)


def measure_conversion(
    place: Path, nbytes: int, limit: int, quant: str, kernels: Path | None = None, kills: Sequence[float] = KILLS
) -> dict[str, Any]:
    """The document; `place` is an empty folder, `kernels` a cache with compiled kernels, `kills` shares of the bytes
    that are written.

    Raises FileError if no memory limit can be set, or a child fails.
    """
    model, trees = place / "large", [place / "whole", place / "killed"]
    write_large(model, nbytes)
    for tree in trees:
        tree.mkdir()
        (tree / "onedesk.toml").write_text('[memory]\nfloor = "32MiB"\n', encoding="utf-8")
        if kernels is None:
            compile_library(tree / "cache")  # outside of the limit: a compiler takes more memory than a conversion
        else:
            shutil.copytree(kernels, tree / "cache")
    with MemoryGroup(f"onedesk-conversion-{os.getpid()}", limit) as group:
        whole = _convert(group, model, trees[0], quant, None)
        size = _made(trees[0]).stat().st_size
        parts = [_convert(group, model, trees[1], quant, round(share * size)) for share in kills]
        parts.append(_convert(group, model, trees[1], quant, None))
        killed, hits = group.kills, group.hits
    return {
        "kind": "conversion",
        "quant": quant,
        "source_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
        "shards": len(list(model.glob("*.safetensors"))),
        "bytes": size,
        "limit": limit,
        "peak_bytes": max(whole["peak"], parts[-1]["peak"]),
        "limit_reached": hits,
        "killed_by_kernel": killed,
        "seconds": whole["seconds"],
        "killed_at": [part["written"] for part in parts[:-1]],
        "seconds_of_parts": [part["seconds"] for part in parts],
        "same_bytes": _digest(_made(trees[0])) == _digest(_made(trees[1])),
    }


def _convert(group: MemoryGroup, model: Path, tree: Path, quant: str, kill_at: int | None) -> dict[str, Any]:
    """Run one child to its end, or kill it once it has written this many bytes. A child that ends earlier was not
    killed.
    """
    options = ["--model", str(model), "--quant", quant, "--config", str(tree / "onedesk.toml")]
    command = [sys.executable, "-c", CHILD, str(group.folder / "cgroup.procs"), *options]
    began, written = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        while kill_at is not None and child.poll() is None and written < kill_at:
            time.sleep(0.01)
            written = max(
                (_size(path) for path in (tree / "cache" / "quantized").glob(".partial-*/*.safetensors")), default=0
            )
        if kill_at is not None:
            child.send_signal(signal.SIGKILL)
        answer, told = child.communicate(timeout=SECONDS)
    seconds, wanted = time.monotonic() - began, 0 if kill_at is None else -signal.SIGKILL
    if child.returncode != wanted:
        raise FileError(
            f"the conversion ended with status {child.returncode} instead of {wanted}: {(answer + told)[-400:]}"
        )
    return {"seconds": seconds, "written": written, "peak": 0 if kill_at is not None else int(told.split()[-1])}


def _size(path: Path) -> int:
    with suppress(OSError):  # it is renamed when it is complete
        return path.stat().st_size
    return 0


def _made(tree: Path) -> Path:
    (found,) = (tree / "cache" / "quantized").glob("[!.]*/weights.safetensors")
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if the bytes differ or the kernel killed a child."""
    parser = argparse.ArgumentParser(
        prog="conversion", description="convert a folder that is far larger than the memory it may have"
    )
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--limit", type=int, default=640, help="MiB of memory, page cache included")
    parser.add_argument("--quant", default="int4", choices=("int8", "int4"))
    parser.add_argument("--folder", type=Path, default=None, help="where to work (a temporary folder)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as place:
            document = measure_conversion(Path(place), round(args.gigabytes * 1e9), args.limit * MIB, args.quant)
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    write_json(document)
    return 0 if document["same_bytes"] and not document["killed_by_kernel"] else 1


if __name__ == "__main__":
    sys.exit(main())
