"""Where the time of a wake goes: raw reads, pinned copies, and reading into a device by readers, next to whole wakes.

python -m onedesk.lab.wake_rates [--model qwen3-4b] [--device auto|cpu|cuda] [--cache FOLDER] [--readers 2,4,8]
    [--cycles 1] [--json]

The random checkpoint is written to FOLDER (a temporary one by default, removed at the end). With qwen3-4b, 8 GB, it
takes about two minutes on a GPU, half of it for writing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..service.api import pick_device
from ..service.bench.page_cache import evict, read_whole
from ..service.bench.run import BenchPlan
from ..service.bench.shapes import SHAPES, random_checkpoint
from ..service.bench.wake import measure_wake, wake_table
from ..service.config import Config
from ..service.console import columns, failure, write_json
from ..service.errors import OnedeskError
from ..service.loader.bounce import host_buffer
from ..service.loader.checkpoint import Checkpoint, open_checkpoint
from ..service.loader.names import ModelRoots
from ..service.loader.stream import stream_tensors

COPY_BYTES, COPIES = 256 << 20, 8
WARM_REPEATS = 3


def rates(checkpoint: Checkpoint, device: torch.device, readers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of {"what", "state", "readers", "seconds", "bytes_per_second"}; warm ones are medians of WARM_REPEATS."""
    rows: list[dict[str, Any]] = []

    def add(what: str, nbytes: int, run: Callable[[], None], state: str = "", count: int = 0) -> None:
        found = []
        for _ in range(1 if state == "cold" else WARM_REPEATS):
            if state == "cold":
                evict(checkpoint.files)
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - started)
        seconds = statistics.median(found)
        rate = nbytes / seconds
        rows.append({"what": what, "state": state, "readers": count, "seconds": seconds, "bytes_per_second": rate})

    size, target = checkpoint.weight_bytes, torch.empty(checkpoint.weight_bytes, dtype=torch.uint8, device=device)
    for pinned in (False, True) if device.type == "cuda" else ():
        buffer, part = host_buffer(COPY_BYTES, pinned=pinned), target[:COPY_BYTES]

        def copy(buffer: torch.Tensor = buffer, part: torch.Tensor = part) -> None:
            for _ in range(COPIES):
                part.copy_(buffer, non_blocking=True)

        add("pinned copy" if pinned else "copy", COPY_BYTES * COPIES, copy)
    jobs, at = [], 0
    for info in checkpoint.tensors.values():
        jobs.append((info, target[at : at + info.nbytes]))
        at += info.nbytes
    for state in ("cold", "warm"):
        for count in readers:
            add("raw read", size, lambda count=count: _raw(checkpoint.files, count), state, count)
            add("into the device", size, lambda count=count: _fill(jobs, count), state, count)
    return rows


def _raw(files: Sequence[Path], readers: int) -> None:
    read_whole(files, readers=readers)


def _fill(jobs: Sequence[Any], readers: int) -> None:
    stream_tensors(jobs, drop_behind=False, readers=readers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="wake_rates", description="measure raw reads, pinned copies and reads into a device, next to whole wakes"
    )
    parser.add_argument("--model", default="qwen3-4b", choices=tuple(SHAPES), help="the shape of the random checkpoint")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cache", type=Path, help="folder for the checkpoint and compiled kernels")
    parser.add_argument("--readers", default="2,4,8", help="numbers of reader threads, such as 2,4,8")
    parser.add_argument("--cycles", type=int, default=1, help="repetitions of the wakes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            document = measured(args, args.cache or Path(folder) / "cache")
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"wake_rates: {error}\n")
        return 1
    if args.json:
        write_json(document)
    else:
        sys.stdout.write(summary(document) + "\n")
    return 0


def summary(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    lines = [("WHAT", "FILE", "READERS", "SECONDS", "GB/s")]
    for row in document["rates"]:
        speed = (f"{row['seconds']:.3f}", f"{row['bytes_per_second'] / 1e9:.2f}")
        lines.append((row["what"], row["state"] or "-", str(row["readers"] or "-"), *speed))
    return f"{columns(lines)}\n\n{wake_table(document['wakes'])}"


def measured(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """The document: {"write_seconds", "rates", "wakes"}."""
    started = time.perf_counter()
    path = random_checkpoint(args.model, cache)
    written = time.perf_counter() - started
    device = pick_device(args.device)
    found = rates(open_checkpoint(path), device, [int(part) for part in args.readers.split(",")])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    plan = BenchPlan("wake", str(path), device=device.type, prompt=16, cycles=args.cycles)
    wakes = measure_wake(plan, Config(tree=cache.parent), ModelRoots([]))
    return {"write_seconds": written, "rates": found, "wakes": wakes}


if __name__ == "__main__":
    sys.exit(main())
