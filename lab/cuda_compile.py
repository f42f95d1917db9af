"""Checks that every Triton kernel compiles for GPUs that are not here, fits their shared memory and does not spill
registers.

python -m onedesk.lab.cuda_compile [--arch 80,86,..] [--shape NAME,..] [--part PART,..] [--jobs 2] [--json]

It compiles what the host code launches for published shapes on such a device, see cuda_launches; nothing runs. Exit 1
if something does not compile or does not fit, or if no shape launches a kernel. Triton caches compiled kernels: a
second run is short.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..service.console import failure, write_json
from ..service.errors import OnedeskError
from ..service.kernels.cuda.cuda_plan import GpuDevice
from .cuda_launches import (
    SHAPES,
    KernelVariant,
    kernels_of_tree,
    launches_of,
    part_of,
    parts_of_tree,
    target_of,
)

# A device of each architecture. Shared memory per program: CUDA C++ programming guide, table of technical
# specifications per compute capability (163, 99, 227 KiB). Processors: A100, RTX 3090, RTX 4090, H200, B200, RTX 5090,
# DGX Spark. Programmatic dependent launch as in kernels/cuda/cuda_fused.
DEVICES: Mapping[int, GpuDevice] = {
    80: GpuDevice(108, 163 << 10, 40 << 20, early=False),
    86: GpuDevice(82, 99 << 10, 6 << 20, early=False),
    89: GpuDevice(128, 99 << 10, 72 << 20, early=False),
    90: GpuDevice(132, 227 << 10, 50 << 20, early=True),
    100: GpuDevice(148, 227 << 10, 126 << 20, early=True),
    120: GpuDevice(170, 99 << 10, 96 << 20, early=True),
    121: GpuDevice(48, 99 << 10, 24 << 20, early=True),
}
SPARK = 121
# Characters kept from the end of an error.
TOLD = 300


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled kernel: bytes of shared memory, registers per thread, spilled bytes; or the error."""

    launch: KernelVariant
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    error: str = ""

    def row(self, arch: int) -> dict[str, Any]:
        launch, limit = self.launch, DEVICES[arch].shared
        row = {"arch": arch, "part": launch.part, "kernel": launch.name, "form": launch.form, "first": launch.first}
        fits = not self.error and self.shared <= limit
        return row | {
            "shared": self.shared,
            "registers": self.registers,
            "spilled": self.spilled,
            "fits": fits,
            "error": self.error,
        }


def compiled(launch: KernelVariant, arch: int) -> Compiled:
    """Compile the variant for compute capability arch / 10."""
    from triton import compile as compile_source
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    try:
        made = compile_source(source, target=target_of(arch), options=dict(launch.options))
    except (TritonError, RuntimeError) as error:  # a failed MLIR pass raises RuntimeError
        reason = error.__cause__ or error
        return Compiled(launch, error=" ".join(str(reason).split())[-TOLD:] or type(reason).__name__)
    registers, stack = resources(made.asm["cubin"])
    spilled = spilled_bytes(made.asm["ptx"], arch) if stack else 0
    return Compiled(launch, made.metadata.shared, registers, spilled)


def resources(binary: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of its stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":", 1) for word in said.split() if word.startswith(("REG:", "STACK:")))
    return int(words["REG"]), int(words["STACK"])


def spilled_bytes(ptx: str, arch: int) -> int:
    """Bytes that a thread spills. A stack may have other reasons."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(arch)}",
            file.name,
            "-o",
            "/dev/null",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max((int(count) for count in re.findall(r"(\d+) bytes spill stores", said)), default=0)


def check(
    archs: Sequence[int], shapes: Mapping[str, Sequence[str]], parts: Sequence[str] = (), jobs: int = 2
) -> dict[str, Any]:
    """The document; `failures` lists what does not compile or fit, and kernels that no shape launches. Raises
    RequestError.
    """
    rows: list[dict[str, Any]] = []
    summaries = []
    for arch in archs:
        began = time.perf_counter()
        launches = [launch for launch in launches_of(arch, DEVICES[arch], shapes) if not parts or launch.part in parts]
        own = []
        with ThreadPoolExecutor(jobs) as pool:
            for found in pool.map(partial(compiled, arch=arch), launches):
                own.append(found.row(arch))
                _tell(f"{len(own)} of {len(launches)}: {line_of(own[-1])}")
        rows += own
        summaries.append(summary(arch, own, time.perf_counter() - began))
        _tell(summary_line(summaries[-1]))
    failures = [line_of(row) for row in rows if not row["fits"]]
    if shapes == SHAPES:
        launched = {row["kernel"] for row in rows}
        kernels = [name for name, kernel in kernels_of_tree().items() if not parts or part_of(kernel) in parts]
        failures += [f"no shape launches {name}" for name in kernels if name not in launched]
    return {"kind": "cuda_compile", "archs": summaries, "rows": rows, "failures": failures}


def summary(arch: int, rows: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The table row of an architecture."""
    return {
        "arch": arch,
        "kernels": len({row["kernel"] for row in rows}),
        "forms": len(rows),
        "compiled": sum(not row["error"] for row in rows),
        "fit": sum(row["fits"] for row in rows),
        "shared": max((row["shared"] for row in rows), default=0),
        "limit": DEVICES[arch].shared,
        "spilling": sum(row["spilled"] > 0 for row in rows),
        "spilled": max((row["spilled"] for row in rows), default=0),
        "seconds": seconds,
    }


def line_of(row: Mapping[str, Any]) -> str:
    """A variant as one line."""
    limit = DEVICES[row["arch"]].shared
    became = (
        f"{row['shared'] / 1024:.1f} of {limit >> 10} KiB shared, {row['registers']} registers, {row['spilled']} bytes"
        " spilled"
    )
    return f"sm_{row['arch']} {row['kernel']}: {row['error'] or became}  ({row['first']}; {row['form']})"


def summary_line(row: Mapping[str, Any]) -> str:
    """The result of `summary` as one line."""
    return (
        f"sm_{row['arch']}: {row['fit']} of {row['forms']} forms of {row['kernels']} kernels compile and fit, "
        "the largest takes "
        f"{row['shared'] / 1024:.1f} of {row['limit'] >> 10} KiB; "
        f"{row['spilling']} spill, at most {row['spilled']} bytes; "
        f"{row['seconds']:.0f} s"
    )


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="cuda_compile", description="compile all Triton kernels for GPUs that need not be here"
    )
    known = {"arch": [str(arch) for arch in DEVICES], "shape": list(SHAPES), "part": parts_of_tree()}
    parser.add_argument("--arch", default=str(SPARK), help=f"of {', '.join(known['arch'])}; else {SPARK}")
    parser.add_argument("--shape", default="", help=f"of {', '.join(SHAPES)}; else all")
    parser.add_argument("--part", default="", help=f"of {', '.join(known['part'])}; else all")
    parser.add_argument("--jobs", type=int, default=2, help="forms that are compiled at a time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    chosen = {option: [name for name in getattr(args, option).split(",") if name] for option in known}
    for option, names in chosen.items():
        if not set(names) <= set(known[option]):
            parser.error(f"--{option} is {getattr(args, option)}; known are {', '.join(known[option])}")
    shapes = {name: SHAPES[name] for name in chosen["shape"] or SHAPES}
    try:
        with redirect_stdout(sys.stderr):  # Triton prints what ptxas refuses
            document = check([int(arch) for arch in chosen["arch"]], shapes, chosen["part"], max(1, args.jobs))
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"cuda_compile: {error}\n")
        return 1
    if args.json:
        write_json(document)
    else:
        sys.stdout.write("".join(summary_line(row) + "\n" for row in document["archs"]))
    sys.stderr.write("".join(line + "\n" for line in document["failures"]))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
