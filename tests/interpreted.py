"""The Triton kernels in Triton's interpreter, on the CPU: run as a script with TRITON_INTERPRET=1, prints one JSON
document.

A process of its own, because Triton decides at its import whether it compiles or interprets. Activations are fp16: the
interpreter's own bf16 truncates, and its products of bf16 multiply the bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def results(part: str) -> dict[str, Any]:
    """The results of `part` (kernels, layers, sampler or adjusted), from a child process."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    child = subprocess.run(
        [sys.executable, __file__, part],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
        cwd=ROOT / "tests",
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


# The rest runs in the child.


def let_loops_run() -> None:
    """Triton 3.6's interpreter converts arrays of one element to int, which numpy refuses from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def kernels() -> dict[str, Any]:
    """Errors of every kernel, by its name and form: the cases of lab/cuda_timing with small sizes."""
    from itertools import islice

    import torch
    from onedesk.lab import cuda_positions as places
    from onedesk.lab import cuda_timing as cases
    from onedesk.lab.cuda_cases import Maker
    from onedesk.service.kernels.cuda.cuda_fused import FusedCudaKernels
    from onedesk.service.kernels.cuda.cuda_plan import GpuDevice
    from onedesk.service.kernels.forward_batch import HeadShape
    from onedesk.service.quant.formats import INT8, int4

    places.CONTEXT = 96
    fused, cached = (
        FusedCudaKernels(torch.float16, GpuDevice(2, 100_000, cache, early=False), asm=False) for cache in (0, 1 << 20)
    )
    heads, make = HeadShape(6, 2, 64), Maker("cpu", torch.float16)
    for one in (fused, cached):
        one.reserve(
            [torch.empty(shape, dtype=dtype) for shape, dtype in one.workspace_spec(heads, 96, torch.float16, 160)]
        )
    found = [*cases.embedding_findings(fused, make)]
    places.STEPS, places.CHUNKS, places.FEW = ([0], [31, 70]), ((33, 20),), ((62, 3),)
    found += places.attention_findings(fused, make, heads, 64)
    for held in cases.FORMATS:
        for rows, outputs in ((1, 4), (3, 18), (20, 18)):
            cases.ROWS = (rows,)
            # 160 columns fill neither a group of 128 nor a tile. Where only scales differ, the first product reveals
            # it.
            several = held in (None, INT8, int4(128))
            found += islice(cases.product_findings(fused, make, held, outputs, 160), 4 if several else 1)
    cases.ROWS = (2,)
    for held in cases.FORMATS:
        found += islice(cases.product_findings(cached, make, held, 20, 160), 4 if held in (None, INT8) else 1)
    return {f"{f.kernel} {f.form}": {"error": f.error, "bound": f.bound} for f in found}


def layers() -> dict[str, Any]:
    """As `kernels`, for the kernels of whole layers; see lab/cuda_layers."""
    import torch
    from onedesk.lab import cuda_layers as cases
    from onedesk.lab import cuda_positions as places
    from onedesk.lab.cuda_cases import Maker
    from onedesk.service.kernels.cuda import cuda_delta
    from onedesk.service.kernels.cuda.cuda_fused import FusedCudaKernels
    from onedesk.service.kernels.cuda.cuda_plan import GpuDevice
    from onedesk.service.kernels.forward_batch import HeadShape
    from onedesk.service.quant.formats import INT8, MXFP8, NVFP4, int4

    fused, make = (
        FusedCudaKernels(torch.float16, GpuDevice(2, 100_000, 0, early=False), asm=False),
        Maker("cpu", torch.float16),
    )
    fused.reserve(
        [
            torch.empty(shape, dtype=dtype)
            for shape, dtype in fused.workspace_spec(HeadShape(6, 2, 64), 96, torch.float16, 160)
        ]
    )
    small, grouped = (
        cases.ExpertCase(32, 16, 5, 2, 16, normalized=True),
        cases.ExpertCase(64, 64, 6, 1, 0, normalized=False),
    )
    found = []
    several = tuple((held, grouped, (20,)) for held in (NVFP4, int4(32, symmetric=False), INT8, MXFP8))
    for held, case, rows in ((None, small, (2, 40)), (NVFP4, grouped, (5,)), *several):
        cases.EXPERT_ROWS = rows
        found += cases.expert_findings(fused, make, held, case)
    cases.DELTA_STEPS, cases.DELTA_TRAILS, cases.DELTA_CHUNKS = (2,), (2, 5), (2, 66)
    cuda_delta.SOLVED = 16  # 24 columns make two tiles, 16 make one
    found += cases.delta_findings(fused, make, cases.delta_heads(make, 1, 2, 24, 24, False, "silu"))
    cases.STREAM_ROWS = (1, 2, 20)
    found += cases.stream_findings(fused, make, 32, 16, 4, injects=True)
    cases.NGRAM_STEPS, cases.NGRAM_TRAILS = (1, 2), (4,)
    found += cases.ngram_findings(fused, make, 2, 48, 32, 3, 2)
    heads, places.CONTEXT, places.INDEXER = HeadShape(3, 1, 64), 96, (2, 24, 16, 4)
    places.KINDS = ("verify", "same")
    places.STEPS, places.CHUNKS, places.FEW, places.INDEXED_STEPS, places.INDEXED_CHUNKS = (
        ([31, 70],),
        ((33, 9),),
        ((0, 2), (30, 3), (17, 5)),
        ([3, 66], [18, 19]),
        ((17, 9),),
    )
    found += [*places.attention_findings(fused, make, heads, 16), *places.gate_findings(fused, make, heads)]
    found += places.indexed_findings(fused, make, heads, 16)
    cases.DELTA_TRAILS, cases.DELTA_CHUNKS = (3,), (5,)
    found += cases.delta_findings(fused, make, cases.delta_heads(make, 2, 2, 8, 16, True, "sigmoid"))
    # Where a weight fits the cache, passes of a few rows stream it, also with buffers larger than the rows.
    fused.device, cases.EXPERT_ROWS = GpuDevice(2, 100_000, 1 << 20, early=False), (1, 3)
    found += cases.expert_findings(fused, make, None, small)
    return {f"{f.kernel} {f.form}": {"error": f.error, "bound": f.bound} for f in found}


def sampler() -> dict[str, Any]:
    """Tokens of the device sampler and of the host's, with their scores, for several sampling settings."""
    import numpy as np
    import torch
    from adjusted_rows import Carver
    from onedesk.service.core import Sampling
    from onedesk.service.engine import device_plan, device_sampler
    from onedesk.service.engine.sampler import Sampler
    from onedesk.service.engine.stepper import Feed

    vocab, random = 5000, torch.Generator().manual_seed(3)
    ways: list[tuple[float, int, float, float]] = [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.8, 0.0), (1.3, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1), (0.6, 20, 0.95, 0.05), (2.0, 2000, 1.0, 0.0), (1.5, 5, 0.3, 0.0),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    left: list[int] = []
    for turn, (half, dtype) in enumerate((("fp16", torch.float16), ("bf16", torch.bfloat16))):
        chooser: Any = device_sampler.DeviceSampler(Carver(), 8, vocab, half, early=False)  # type: ignore[arg-type]
        scores = (torch.randn(8, vocab, generator=random) * 3).to(dtype)
        scores[:, 4900:] = 60  # ids that the tokenizer lacks
        samplers = [
            Sampler(Sampling(t, k, p, m, 0.0, 0.0, 1.0), 9 * turn + i, [], 4900) for i, (t, k, p, m) in enumerate(ways)
        ]
        feeds = [Feed(None, one, 5, -1, 0, wanted=True) for one in samplers]  # type: ignore[arg-type]
        plan = np.zeros((device_plan.PLAN_ROWS, 8), np.int32)
        needs = device_plan.write_plan(plan, feeds, list(range(8)))
        chooser.choose(scores, torch.from_numpy(plan), needs)
        for i, one in enumerate(samplers):
            ours, host = int(chooser.chosen[i]), one.choose(scores[i].float())
            rows.append(
                {"way": i, "ours": ours, "host": host, "scores": [float(scores[i, ours]), float(scores[i, host])]}
            )
        left += [int(chooser._counts.abs().sum()), int(chooser._seen.abs().sum())]
        chooser.choose(scores[:1], torch.from_numpy(plan[:, :1].copy()), device_plan.Needs())
        rows.append(
            {
                "way": 0,
                "ours": int(chooser.chosen[0]),
                "host": int(scores[0, :4900].float().argmax()),
                "scores": [0.0, 0.0],
            }
        )
        scores[0, 7] = float("nan")
        broken = []
        for drawn in (True, False):
            chooser.choose(scores[:2], torch.from_numpy(plan[:, :2].copy()), device_plan.Needs(draws=drawn))
            broken.append(int(chooser.chosen[0]))
        left += [one + 1 for one in broken]
    return {"rows": rows, "left": left}


def adjusted() -> dict[str, Any]:
    """Rows with bias, penalties, masks and log-probabilities; see adjusted_rows."""
    import adjusted_rows

    return adjusted_rows.adjusted()


if __name__ == "__main__":
    let_loops_run()
    print(json.dumps({"kernels": kernels, "layers": layers, "sampler": sampler, "adjusted": adjusted}[sys.argv[1]]()))
