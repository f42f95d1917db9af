"""Kernels for the CPU: the operations of a pass as compiled C, each one parallel region.

Decode reads every stored weight once and is bound by that. Prompts are bound by arithmetic (see gemv.c, gemm.c and
attention.c). Integer weights meet activations of 15 bits: an element of x is wrong by at most the largest of its span
of up to 128 columns / 65534. So y[r] is wrong by at most the sum over spans of largest |x| * sum |w[r]| / 65534, plus
the rounding of an fp32 sum. BF16 activations would be 256 times coarser.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence

import torch

from ...quant.weight import QuantizedWeight, Weight
from ..delta_rule import DeltaHeads, DeltaOperands
from ..forward_batch import FEW_ROWS, HeadShape, NormWeight
from ..operands import (
    AttentionHeads,
    AttentionOperands,
    ConnectionOperands,
    ExpertOperands,
    ExpertWeights,
    HyperConnection,
    Indexer,
    IndexerOperands,
    NgramOperands,
    NgramWeights,
)
from ..reference import Buffer, ReferenceKernels
from . import cpu_operands
from .captured_calls import CallCache, NativeCall, plain_rows
from .cpu_limits import (
    ALIGNMENT,
    HEAD_STEP,
    PANEL,
    fits,
    shared_bytes,
    thread_bytes,
)
from .native import (
    ADD,
    GATE,
    KINDS,
    STORE,
    Native,
    describe,
)

log = logging.getLogger(__name__)


class CpuKernels(ReferenceKernels):
    """Runs compiled C if weights and heads are supported (`compiled` counts these calls), otherwise plain torch
    (`plain`).
    """

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__(torch.float32)
        self.threads = threads or torch.get_num_threads()
        self._native = Native(library)
        self.reason = f"compiled for {self._native.instructions}, {self.threads} threads"
        self._calls = CallCache(self._native, self.threads)
        self._declined: dict[int, object] = {}

    @property
    def compiled(self) -> int:
        """Calls made in C."""
        return self._calls.compiled

    @property
    def plain(self) -> int:
        """Operations left to plain torch."""
        return self._calls.plain

    @classmethod
    def workspace_spec(
        cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int
    ) -> tuple[Buffer, ...]:
        """Space for x of a product and for each thread; if attention.c does not support the heads, also the reference's
        keys and values.
        """
        threads = torch.get_num_threads()
        workspace: tuple[Buffer, ...] = (
            ((shared_bytes(columns) + threads * thread_bytes(columns, heads) + ALIGNMENT,), torch.uint8),
        )
        return (
            workspace
            if fits(heads, HEAD_STEP)
            else (*workspace, *super().workspace_spec(heads, positions, activation, columns))
        )

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        workspace, *rest = buffers
        super().reserve(rest)
        self._calls.use(workspace)

    def forget_calls(self) -> None:
        self._calls.forget()

    def run_captured(self, owner: object, index: int, work: Callable[[], None]) -> None:
        self._calls.run_captured(owner, index, work)

    def quantize(self, target: QuantizedWeight, values: torch.Tensor, work: torch.Tensor) -> bool:
        stored, kind = describe(target), KINDS.get(values.dtype)
        # A row in fp32, and its nibbles as bytes.
        workspace = work if work.numel() * 4 >= 5 * (target.cols + PANEL) else torch.empty(2 * (target.cols + PANEL))
        if (
            stored is None
            or kind is None
            or target.format.name not in ("int8", "int4")
            or not (values.is_contiguous() and values.device.type == "cpu")
        ):
            return False
        wrong = self._native.pack_rows(ctypes.addressof(stored), kind, values.data_ptr(), workspace.data_ptr())
        if wrong >= 0:
            target.scales[wrong] = float("nan")  # the caller finds out why
        return True

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        stored = self._calls.stored(table)
        if stored is None or not (plain_rows(out) and ids.is_contiguous() and ids.dtype == torch.int64):
            return super().embed(ids, table, out)
        count, cols = out.shape
        if count != ids.shape[0] or cols != stored.cols:
            raise ValueError(f"{tuple(out.shape)} does not fit {ids.shape[0]} rows of {stored.cols}")
        wrong = self._native.embed_rows(ctypes.addressof(stored), ids.data_ptr(), count, out.data_ptr())
        if wrong >= 0:
            raise IndexError(f"id {int(ids[wrong])} is not in a table of {stored.rows} rows")
        return out

    def linear(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        return out if self._product(STORE, x, None, weight, out) else super().linear(x, weight, out)

    def norm_linear(
        self, x: torch.Tensor, norm: NormWeight, weight: Weight, out: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        return out if self._product(STORE, x, norm, weight, out) else super().norm_linear(x, norm, weight, out, normed)

    def linear_add(self, x: torch.Tensor, weight: Weight, residual: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        return (
            residual
            if self._product(ADD, x, None, weight, residual)
            else super().linear_add(x, weight, residual, spare)
        )

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm: NormWeight,
        gate_up: Weight,
        out: torch.Tensor,
        normed: torch.Tensor,
        both: torch.Tensor,
    ) -> torch.Tensor:
        return (
            out
            if self._product(GATE, x, norm, gate_up, out)
            else super().norm_gate_up(x, norm, gate_up, out, normed, both)
        )

    def gate_up(self, x: torch.Tensor, gate_up: Weight, out: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        return out if self._product(GATE, x, None, gate_up, out) else super().gate_up(x, gate_up, out, both)

    def attend(self, heads: AttentionHeads, at: AttentionOperands) -> torch.Tensor:
        def build() -> NativeCall | None:
            a = cpu_operands.attention(self._calls, heads, at)
            few = not at.batch.one_sequence or at.qkv.shape[0] <= FEW_ROWS
            return (
                None
                if a is None
                else NativeCall.of(self._native.attend_rows if few else self._native.attend_chunk, a, heads, at)
            )

        return at.out if self._calls.make(_step_key(heads, at), build) else super().attend(heads, at)

    def attend_indexed(
        self, heads: AttentionHeads, at: AttentionOperands, indexer: Indexer, keyed: IndexerOperands
    ) -> bool:
        key = _step_key(heads, at, indexer, keyed.indexed, keyed.tails, keyed.pooled)
        return self._calls.make(key, lambda: cpu_operands.indexed(self._calls, heads, at, indexer, keyed))

    def split_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        if not self._gates(self._native.split_gates, projected, heads, qkv, mixed):
            super().split_gates(projected, heads, qkv, mixed)

    def apply_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        if not self._gates(self._native.apply_gates, projected, heads, qkv, mixed):
            super().apply_gates(projected, heads, qkv, mixed)

    def _gates(
        self,
        run: Callable[[int], None],
        projected: torch.Tensor,
        heads: HeadShape,
        qkv: torch.Tensor,
        mixed: torch.Tensor,
    ) -> bool:
        def build() -> NativeCall | None:
            found = cpu_operands.gates(heads, projected, qkv, mixed)
            return None if found is None else NativeCall.of(run, found, projected, qkv, mixed)

        return self._calls.make(_few_key(mixed, run, projected, qkv), build)

    def delta_step(self, heads: DeltaHeads, step: DeltaOperands) -> bool:
        key = (
            id(heads),
            id(step.projected),
            id(step.rates),
            id(step.windows),
            id(step.slots),
            id(step.out),
            step.verify,
        )
        return self._calls.make(key, lambda: cpu_operands.delta(self._calls, heads, step))

    def add_ngrams(self, weights: NgramWeights, at: NgramOperands) -> bool:
        key = (id(weights), id(at.embedded), id(at.streams), id(at.windows), id(at.slots))
        return self._at_once(key, weights, lambda: cpu_operands.ngram(self._calls, weights, at))

    def read_connection(self, connection: HyperConnection, at: ConnectionOperands) -> bool:
        key = (id(connection), id(at.streams), id(at.normed), id(at.read))
        return at.streams.shape[0] <= FEW_ROWS and self._at_once(
            key, connection, lambda: cpu_operands.connection(self._calls, connection, at)
        )

    def inject(self, at: ConnectionOperands) -> None:
        if not self._calls.make(
            _few_key(at.found, at.streams, at.weights), lambda: cpu_operands.injection(self._calls, at)
        ):
            super().inject(at)

    def run_experts(self, experts: ExpertWeights, at: ExpertOperands) -> bool:
        key = (id(experts), id(at.x), id(at.out), id(at.scores), id(at.routed))
        return at.x.shape[0] <= FEW_ROWS and self._at_once(
            key, experts, lambda: cpu_operands.experts(self._calls, experts, at)
        )

    def _at_once(self, key: tuple[int, ...], part: object, build: Callable[[], NativeCall | None]) -> bool:
        """Whether the call under `key` was made. A part without a compiled form is remembered; the first of its type is
        logged.
        """

        def build_or_tell() -> NativeCall | None:
            call = None if id(part) in self._declined else build()
            if call is None:
                if not any(type(other) is type(part) for other in self._declined.values()):
                    log.info(
                        "%s of this network run operation by operation: their formats or widths are not compiled",
                        type(part).__name__,
                    )
                self._declined[id(part)] = part
            return call

        return self._calls.make(key, build_or_tell)

    def rms_norm(self, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> torch.Tensor:
        # Not kept: normed rows may not be buffers of a pass.
        return (
            out
            if self._calls.make(None, lambda: cpu_operands.norm(self._calls, x, norm, out))
            else super().rms_norm(x, norm, out)
        )

    def _product(self, mode: int, x: torch.Tensor, norm: NormWeight | None, weight: Weight, out: torch.Tensor) -> bool:
        """Whether the product was done. Otherwise plain torch must do it."""
        key = (mode, id(x), id(norm), id(weight), id(out)) if x.shape[0] <= FEW_ROWS else None
        return self._calls.make(key, lambda: self._product_call(mode, x, norm, weight, out))

    def _product_call(
        self, mode: int, x: torch.Tensor, norm: NormWeight | None, weight: Weight, out: torch.Tensor
    ) -> NativeCall | None:
        calls = self._calls
        stored = calls.stored(weight)
        if stored is None or not (plain_rows(x) and plain_rows(out)):
            return None
        product, few = calls.product(mode, x, stored, out, calls.scratch_of([stored])), x.shape[0] <= FEW_ROWS
        if norm is not None:
            product.norm, product.eps = norm.weight.data_ptr(), norm.eps
        return NativeCall.of(self._native.gemv if few else self._native.gemm, product, x, norm, weight, out)


def _step_key(heads: AttentionHeads, at: AttentionOperands, *parts: object) -> tuple[int, ...] | None:
    """The key of a call of a decode step or verify pass. Calls of other chunks are not kept."""
    if not at.batch.state_per_row:
        return None
    return id(heads), id(at.qkv), id(at.keys), id(at.values), id(at.batch), id(at.out), *map(id, parts)


def _few_key(rows: torch.Tensor, *parts: object) -> tuple[int, ...] | None:
    """The key of a call for a few rows. Views of many rows are new objects each time, so their calls are not kept."""
    return None if rows.shape[0] > FEW_ROWS else (id(rows), *map(id, parts))
