"""Kernels for the CPU: a compiled GEMV for decode, tiled widening for prefill.

Measured on a 2-core EPYC with AVX-512 (read ceiling 27 GB/s), all matrix products of one Qwen3-0.6B token: torch bf16 9.5 GB/s,
tiles widened with torch 5.7 GB/s, this GEMV 23-27 GB/s.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from .reference import TILE_ELEMENTS, ReferenceKernels, causal_mask
from .unfinished import work_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("gemv.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-fopenmp")
# Up to so many rows of x a pass over the weights is bound by reading them; beyond, fp32 tiles and a matrix product win.
GEMV_ROWS = 8
SYMBOLS = {torch.bfloat16: "gemv_bf16", torch.float16: "gemv_f16", torch.float32: "gemv_f32"}


class CpuKernels(ReferenceKernels):
    """The compiled GEMV where the weights' type has one, torch elsewhere."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__(torch.float32)
        self.threads = threads or torch.get_num_threads()
        self.reason = f"compiled GEMV, {self.threads} threads"
        self.gemv_calls = 0
        self._gemv = {dtype: _bind(library, symbol) for dtype, symbol in SYMBOLS.items() if hasattr(library, symbol)}
        self._tile = torch.empty(TILE_ELEMENTS)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gemv = self._gemv.get(weight.dtype)
        tokens, cols = x.shape
        ready = x.dtype == torch.float32 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
        if gemv is not None and tokens <= GEMV_ROWS and ready:
            gemv(weight.data_ptr(), x.data_ptr(), out.data_ptr(), weight.shape[0], cols, tokens, self.threads)
            self.gemv_calls += 1
            return out
        if weight.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        return self._tiled(x, weight, out)

    def _tiled(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows, cols = weight.shape
        step = max(1, TILE_ELEMENTS // cols)
        tile = self._tile if cols <= TILE_ELEMENTS else torch.empty(cols)
        for row in range(0, rows, step):
            part = weight[row : row + step]
            wide = tile[: part.numel()].view_as(part).copy_(part)
            out[:, row : row + step] = torch.mm(x, wide.t())
        return out

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = q.shape
        if tokens == 1:
            return super().attention(q, k, v, start, out)
        kv_heads, length, _ = k.shape
        group = heads // kv_heads
        # One "head" a KV head with its group's queries stacked: torch's own grouped form would repeat K and V.
        grouped = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * tokens, dim)
        visible = causal_mask(tokens, length, q.device).repeat(group, 1)
        mixed = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=visible)
        return out.copy_(mixed.view(kv_heads, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim))


def _bind(library: ctypes.CDLL, symbol: str) -> Callable[..., None]:
    function = getattr(library, symbol)
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4
    function.restype = None
    return function


def compile_library(cache: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return the compiled GEMV, building it once a machine into `cache`, or None and the reason why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    target = cache / f"gemv-{_key(compiler or '')}.so"
    if not target.exists():
        if compiler is None:
            return None, "no C compiler (cc, gcc or clang) was found; install one for the fast decode path"
        failed = _build(compiler, target)
        if failed:
            return None, failed
    try:
        return ctypes.CDLL(str(target)), ""
    except OSError as error:
        log.debug("the compiled GEMV does not load", exc_info=error)
        return None, f"the compiled GEMV does not load; delete {target.name} in the cache, so that it is built anew"


def _key(compiler: str) -> str:
    parts = (SOURCE.read_bytes(), " ".join((compiler, *FLAGS)).encode(), platform.machine().encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the processor's name and features (a tree can move between machines)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(compiler: str, target: Path) -> str:
    """Compile into a temporary folder and move the result into place, so that two builders cannot disturb each other."""
    # torch's own OpenMP, where it carries one, so that both share a pool of threads.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))] or ["-fopenmp"]
    try:
        with work_folder(target.parent, "gemv") as folder:
            compiled, linked = folder / "gemv.o", folder / "gemv.so"
            for command in (
                [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), "-o", str(linked), *openmp],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
                if done.returncode != 0:
                    lines = done.stderr.strip().splitlines()
                    reason = lines[-1].replace(f"{folder}/", "") if lines else done.returncode
                    return f"the C compiler refused the GEMV: {reason}"
            linked.replace(target)
    except OSError as error:
        return f"the GEMV could not be compiled: {error.strerror} in the cache folder; make it a folder that can be written, with some room"
    except subprocess.TimeoutExpired as error:
        return f"the GEMV could not be compiled: the compiler took more than {error.timeout:g} s"
    return ""
