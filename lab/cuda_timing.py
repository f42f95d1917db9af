"""Compares every fused CUDA kernel with plain fp32 arithmetic on the same numbers, on a CUDA device.

python -m onedesk.lab.cuda_timing [--parts PART,..] [--json]

Exit 1 if an error is larger than the types explain. Each part is reported as it finishes. `error`: |result - truth| /
|truth| (Euclidean norms) of the worst variant of a kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from ..service.console import failure, write_json
from ..service.errors import OnedeskError, RequestError
from ..service.kernels.choose import cuda_kernels
from ..service.kernels.cuda.sdpa_kernels import CudaKernels
from ..service.kernels.forward_batch import HeadShape
from ..service.kernels.reference import ReferenceKernels
from ..service.quant.formats import FP8_BLOCKS, INT8, MXFP8, NVFP4, int4
from ..service.quant.weight import Format
from . import cuda_positions
from .cuda_cases import BOUNDS, Finding, Maker, apart, wide
from .cuda_layers import layer_groups

Tell: TypeAlias = Callable[[str], object]
# The widest row that a product of these cases reads.
WIDEST = 10240
# One with many rows, and one whose columns fill neither a group nor a tile.
SHAPES = ((2560, 1024), (96, 2592))
ROWS: Sequence[int] = (1, 2, 8, 16, 300)
FORMATS: tuple[Format | None, ...] = (
    None, INT8, FP8_BLOCKS, MXFP8, int4(128), int4(32), int4(128, symmetric=False), NVFP4,
)  # fmt: skip
# Formats with their own conversion to floats. The others only have other scales.
KINDS: tuple[Format | None, ...] = (None, INT8, MXFP8, int4(128), NVFP4)
PRODUCTS: Sequence[str] = ("linear", "linear_add", "norm_linear", "norm_gate_up")
# Heads, and how many numbers of a head are rotated.
HEADS = (
    (HeadShape(32, 8, 128), 128), (HeadShape(16, 8, 128), 128), (HeadShape(8, 1, 64), 64), (HeadShape(10, 2, 128), 128),
    (HeadShape(24, 2, 256), 64), (HeadShape(16, 4, 256), 64),
)  # fmt: skip


def product_cases(activation: torch.dtype) -> Iterator[tuple[Format | None, int, int, Sequence[str]]]:
    """A format, a shape, and the products to compare: a quarter of all, because compiling takes nearly all the time.

    What is added and what is normed first depends on the format only where x becomes fixed-point. fp16 differs from
    bf16 in the conversion of numbers to floats.
    """
    (many, few), ends = SHAPES, ("linear", "norm_gate_up")
    for held in FORMATS:
        if activation == torch.bfloat16:
            yield held, *few, PRODUCTS if held in (None, INT8, int4(128)) else ends
            if held in KINDS:
                yield held, *many, PRODUCTS[1:2] if held is None else ends[1:]
        elif held in KINDS:
            yield held, *few, ends


def product_findings(
    kernels: CudaKernels, make: Maker, held: Format | None, rows: int, cols: int, products: Sequence[str] = PRODUCTS
) -> Iterator[Finding]:
    """The products with one weight, for every number of rows of x."""
    truth, weight, norm = ReferenceKernels(), make.weight(held, rows, cols), make.norm(cols)
    numbers, bound = wide(weight).t(), BOUNDS[make.activation]
    for count in ROWS:
        form = f"{held.name if held else 'float'} {rows}x{cols} rows {count}"
        x, before = make.rows(count, cols), make.rows(count, rows)
        normed = truth.rms_norm(x.float(), norm, torch.empty_like(x, dtype=torch.float32))
        plain, after_norm = x.float() @ numbers, normed @ numbers
        if "linear" in products:
            yield Finding("linear", form, apart(kernels.linear(x, weight, make.empty(count, rows)), plain), bound)
        if "linear_add" in products:
            found = kernels.linear_add(x, weight, before.clone(), make.empty(count, rows))
            yield Finding("linear_add", form, apart(found, before.float() + plain), bound)
        if "norm_linear" in products:
            found = kernels.norm_linear(x, norm, weight, make.empty(count, rows), make.empty(count, cols))
            yield Finding("norm_linear", form, apart(found, after_norm), bound)
        if "norm_gate_up" not in products:
            continue
        found = kernels.norm_gate_up(
            x, norm, weight, make.empty(count, rows // 2), make.empty(count, cols), make.empty(count, rows)
        )
        gated = truth.silu_mul(after_norm, torch.empty(count, rows // 2, device=x.device))
        # A gate far from 0 multiplies the error.
        yield Finding("norm_gate_up", form, apart(found, gated), 4 * bound)


def embedding_findings(kernels: CudaKernels, make: Maker) -> Iterator[Finding]:
    """Rows of tables in the formats that tables have."""
    ids = torch.tensor([0, 5, 255, 5], device=make.device)
    for held in (None, INT8):
        table = make.weight(held, 256, 2560)
        found = kernels.embed(ids, table, make.empty(4, 2560))
        yield Finding("embed", held.name if held else "float", apart(found, wide(table)[ids]), BOUNDS[make.activation])


def _groups(kernels: CudaKernels, make: Maker) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Everything for one activation type: the name of each part, and its findings as they are made."""
    for heads, rotated in HEADS:
        wanted = kernels.workspace_spec(heads, cuda_positions.CONTEXT, make.activation, WIDEST)
        kernels.reserve([torch.empty(shape, dtype=dtype, device=make.device) for shape, dtype in wanted])
        yield "attention", cuda_positions.attention_findings(kernels, make, heads, rotated)
        if rotated < heads.head_dim:
            yield "attention", cuda_positions.gate_findings(kernels, make, heads)
            yield "indexed", cuda_positions.indexed_findings(kernels, make, heads, rotated)
    yield from layer_groups(kernels, make)
    yield "products", embedding_findings(kernels, make)
    for held, rows, cols, products in product_cases(make.activation):
        yield "products", product_findings(kernels, make, held, rows, cols, products)


def findings(device: str, activation: torch.dtype, parts: Sequence[str], tell: Tell) -> Iterator[Finding]:
    """The findings of `parts` (all if none is named). A kernel that does not compile has an infinite error.

    Raises RequestError if there are no fused kernels.
    """
    from triton.errors import TritonError

    kernels = cuda_kernels(activation)
    if type(kernels) is CudaKernels:
        raise RequestError(f"there is nothing to compare here: {kernels.reason}")
    for name, group in _groups(kernels, Maker(device, activation)):
        if parts and name not in parts:
            continue
        began, count = time.perf_counter(), 0
        try:
            for finding in group:
                count += 1
                yield finding
        except TritonError as error:
            yield Finding(
                name, f"after {count} of its variants: {str(error).strip().splitlines()[-1]}", float("inf"), 0.0
            )
        tell(f"{activation} {name}: {count} forms, {time.perf_counter() - began:.1f} s")


def check(device: str = "cuda", parts: Sequence[str] = (), tell: Tell = lambda _: None) -> dict[str, Any]:
    """The document; `failures` lists what exceeds its bound."""
    if not torch.cuda.is_available():
        raise RequestError("torch sees no CUDA device here; there is nothing to check")
    found = [(str(a).removeprefix("torch."), finding) for a in BOUNDS for finding in findings(device, a, parts, tell)]
    worst: dict[tuple[str, str], Finding] = {}
    for name, finding in found:
        known = worst.get((name, finding.kernel))
        if known is None or finding.off > known.off:
            worst[name, finding.kernel] = finding
    rows = [
        {"activation": name, "kernel": f.kernel, "worst": f.form, "error": f.error, "bound": f.bound}
        for (name, _), f in worst.items()
    ]
    bad = [
        f"{name} {f.kernel}, {f.form}: {f.error:.1e} is more than {f.bound:.1e}"
        for name, f in found
        if not f.error <= f.bound
    ]
    return {
        "kind": "cuda_timing",
        "device": torch.cuda.get_device_name(),
        "forms": len(found),
        "rows": rows,
        "failures": bad,
    }


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="cuda_timing", description="compare the fused CUDA kernels with plain arithmetic"
    )
    parser.add_argument(
        "--parts", default="", help="of attention, indexed, experts, delta, streams, ngrams, products; else all"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    show: Callable[[str], object] = (sys.stderr if args.json else sys.stdout).write
    try:
        document = check(parts=[part for part in args.parts.split(",") if part], tell=_tell)
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"cuda_timing: {error}\n")
        return 1
    for row in document["rows"]:
        show(f"{row['activation']:>9} {row['kernel']:<14} {row['error']:.1e} of {row['bound']:.1e}  ({row['worst']})\n")
    show(
        "".join(line + "\n" for line in document["failures"][:40])
        or f"{document['forms']} forms, all within their bounds\n"
    )
    if args.json:
        write_json(document)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
