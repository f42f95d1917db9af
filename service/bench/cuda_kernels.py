"""Every fused CUDA kernel against plain arithmetic in fp32 on the same numbers, on a CUDA device.

    python -m onedesk.service.bench.cuda_kernels [--json]

Exit 1 if one is further off than its types explain. `error`: |result - truth| / |truth| (Euclidean norms) of the worst form of a kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OnedeskError, RequestError
from ..kernels.cuda import CudaKernels, cuda_kernels
from ..kernels.reference import ReferenceKernels
from ..kernels.rows import BLOCK, HeadShape, NormWeight, RotaryTable, Rows
from ..quant.formats import FP8_BLOCKS, INT8, int4
from ..quant.weight import Format, QuantizedWeight, Weight, dequantize, pack_nibbles
from ..setup.console import failure, write_json

# Rounding a result to bf16 is 1.7e-3, to fp16 2.1e-4; a norm or a gate between rounds twice.
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
# One with many rows, one whose columns fill neither a group nor a tile.
SHAPES = ((2560, 1024), (96, 2592))
ROWS: Sequence[int] = (1, 2, 8, 16, 300)
FORMATS: tuple[Format | None, ...] = (None, INT8, FP8_BLOCKS, int4(128), int4(32), int4(128, symmetric=False))
HEADS = (HeadShape(32, 8, 128), HeadShape(16, 8, 128), HeadShape(8, 1, 64), HeadShape(10, 2, 128))
CONTEXT = 1024
# Lengths before a decode step, one a sequence; and where a chunk begins and how long it is.
STEPS: Sequence[Sequence[int]] = ([0], [1], [255], [1023], [5, 700], [31, 32, 33, 64], [0, 9, 99, 999, 1, 500, 1023, 640])
CHUNKS: Sequence[tuple[int, int]] = ((0, 7), (0, 300), (37, 5), (500, 129))


@dataclass(frozen=True, slots=True)
class Finding:
    """How far a kernel was off, and how far it may be."""

    kernel: str
    form: str
    error: float
    bound: float


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    """|found - truth| / |truth|; infinite where something is no number."""
    error = (found.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(found.float()).all()) else float("inf")


class Maker:
    """Random numbers on a device, the same at every run."""

    def __init__(self, device: str, activation: torch.dtype) -> None:
        self.device, self.activation = device, activation
        self._random = torch.Generator(device=device).manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=self.device)

    def rows(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).to(self.activation)

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for a result, filled with what is no number: an element that nobody writes shows."""
        return torch.full(shape, float("nan"), device=self.device, dtype=self.activation)

    def norm(self, cols: int) -> NormWeight:
        return NormWeight(self.normal(cols).abs() + 0.5, 1e-6)

    def weight(self, held: Format | None, rows: int, cols: int) -> Weight:
        """Random numbers in the format; one row and one group of zeros, one huge number."""
        if held is None:
            weight = self.rows(rows, cols)
            weight[1] = 0
            weight[2, 3] = 300
            return weight
        scales = self.normal(rows, held.groups(cols)) * 0.01
        scales[1] = 0
        scales[2, 0] = 0.05
        if held.name == "int4":
            nibbles = torch.randint(0, 16, (rows, cols), generator=self._random, device=self.device).to(torch.uint8)
            offsets = None if held.symmetric else (self.normal(rows, held.groups(cols)) * 0.05).half()
            return QuantizedWeight(held, rows, cols, pack_nibbles(nibbles), scales.half(), offsets)
        if held.name == "fp8":
            return QuantizedWeight(held, rows, cols, self.normal(rows, cols).to(torch.float8_e4m3fn), scales)
        q = torch.randint(-127, 128, (rows, cols), generator=self._random, device=self.device).to(torch.int8)
        return QuantizedWeight(held, rows, cols, q, scales)


def wide(weight: Weight) -> torch.Tensor:
    """The weight's numbers in fp32."""
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()


def product_findings(kernels: CudaKernels, make: Maker, held: Format | None, rows: int, cols: int) -> Iterator[Finding]:
    """The products with one weight, for every number of rows of x."""
    truth, weight, norm = ReferenceKernels(), make.weight(held, rows, cols), make.norm(cols)
    numbers, bound = wide(weight).t(), BOUNDS[make.activation]
    for count in ROWS:
        form = f"{held.name if held else 'float'} {rows}x{cols} rows {count}"
        x, before = make.rows(count, cols), make.rows(count, rows)
        normed = truth.rms_norm(x.float(), norm, torch.empty_like(x, dtype=torch.float32))
        plain, behind = x.float() @ numbers, normed @ numbers
        yield Finding("linear", form, apart(kernels.linear(x, weight, make.empty(count, rows)), plain), bound)
        found = kernels.linear_add(x, weight, before.clone(), make.empty(count, rows))
        yield Finding("linear_add", form, apart(found, before.float() + plain), bound)
        found = kernels.norm_linear(x, norm, weight, make.empty(count, rows), make.empty(count, cols))
        yield Finding("norm_linear", form, apart(found, behind), bound)
        found = kernels.norm_gate_up(x, norm, weight, make.empty(count, rows // 2), make.empty(count, cols), make.empty(count, rows))
        gated = truth.silu_mul(behind, torch.empty(count, rows // 2, device=x.device))
        # A gate far from 0 multiplies what it is off.
        yield Finding("norm_gate_up", form, apart(found, gated), 4 * bound)


def attention_findings(kernels: CudaKernels, make: Maker, heads: HeadShape) -> Iterator[Finding]:
    """Decode steps of several batches and lengths, and chunks at several places."""
    table = CONTEXT // BLOCK
    angles = torch.arange(CONTEXT, device=make.device)[:, None] / 1e6 ** (
        torch.arange(0, heads.head_dim, 2, device=make.device) / heads.head_dim
    )
    rotary, q_norm, k_norm = RotaryTable(angles.cos(), angles.sin()), make.norm(heads.head_dim), make.norm(heads.head_dim)
    for lengths in [*STEPS, *CHUNKS]:
        chunk = isinstance(lengths, tuple)
        count = lengths[1] if chunk else len(lengths)
        sequences = 1 if chunk else count
        blocks = torch.randperm(sequences * table, device=make.device).view(sequences, table).int()
        positions = torch.arange(lengths[0], sum(lengths)) if chunk else torch.tensor(lengths)
        rows = Rows(positions.int().to(make.device), blocks, lengths[0] if chunk else None, CONTEXT)
        keys, values = (make.rows(sequences * table, heads.kv_heads, BLOCK, heads.head_dim) for _ in range(2))
        qkv, wide_keys, wide_values = make.rows(count, heads.qkv), keys.float(), values.float()
        out = torch.empty(count, heads.queries, device=make.device)
        truth = ReferenceKernels().attend(qkv.float(), heads, q_norm, k_norm, rotary, wide_keys, wide_values, rows, out)
        found = kernels.attend(qkv, heads, q_norm, k_norm, rotary, keys, values, rows, make.empty(count, heads.queries))
        form = f"{heads.heads}/{heads.kv_heads} of {heads.head_dim}, {'chunk' if chunk else 'step'} {lengths}"
        bound = 2 * BOUNDS[make.activation]
        yield Finding("attend", form, apart(found, truth), bound)
        yield Finding("attend, cache", form, max(apart(keys, wide_keys), apart(values, wide_values)), bound)


def embedding_findings(kernels: CudaKernels, make: Maker) -> Iterator[Finding]:
    """Rows of tables in the formats that tables have."""
    ids = torch.tensor([0, 5, 255, 5], device=make.device)
    for held in (None, INT8):
        table = make.weight(held, 256, 2560)
        found = kernels.embed(ids, table, make.empty(4, 2560))
        yield Finding("embed", held.name if held else "float", apart(found, wide(table)[ids]), BOUNDS[make.activation])


def findings(device: str, activation: torch.dtype) -> Iterator[Finding]:
    """Everything, for one type of activations. Raises RequestError where there are no fused kernels."""
    kernels = cuda_kernels(activation)
    if type(kernels) is CudaKernels:
        raise RequestError(f"there is nothing to compare here: {kernels.reason}")
    make = Maker(device, activation)
    for heads in HEADS:
        wanted = kernels.workspace(heads, CONTEXT, activation, max(cols for _, cols in SHAPES))
        kernels.reserve([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted])
        yield from attention_findings(kernels, make, heads)
    yield from embedding_findings(kernels, make)
    for held in FORMATS:
        for rows, cols in SHAPES:
            yield from product_findings(kernels, make, held, rows, cols)


def check(device: str = "cuda") -> dict[str, Any]:
    """The document; `failures` lists what was too far off."""
    if not torch.cuda.is_available():
        raise RequestError("torch sees no CUDA device here; there is nothing to check")
    found = [(str(a).removeprefix("torch."), finding) for a in BOUNDS for finding in findings(device, a)]
    worst: dict[tuple[str, str], Finding] = {}
    for name, finding in found:
        known = worst.get((name, finding.kernel))
        if known is None or finding.error / finding.bound > known.error / known.bound:
            worst[name, finding.kernel] = finding
    rows = [{"activation": name, "kernel": f.kernel, "worst": f.form, "error": f.error, "bound": f.bound} for (name, _), f in worst.items()]
    bad = [f"{name} {f.kernel}, {f.form}: {f.error:.1e} is more than {f.bound:.1e}" for name, f in found if not f.error <= f.bound]
    return {"kind": "cuda_kernels", "device": torch.cuda.get_device_name(), "forms": len(found), "rows": rows, "failures": bad}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cuda_kernels", description="compare the fused CUDA kernels with plain arithmetic")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    tell: Callable[[str], object] = (sys.stderr if args.json else sys.stdout).write
    try:
        document = check()
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"cuda_kernels: {error}\n")
        return 1
    for row in document["rows"]:
        tell(f"{row['activation']:>9} {row['kernel']:<14} {row['error']:.1e} of {row['bound']:.1e}  ({row['worst']})\n")
    tell("".join(line + "\n" for line in document["failures"][:40]) or f"{document['forms']} forms, all within their bounds\n")
    if args.json:
        write_json(document)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
