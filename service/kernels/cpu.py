"""Kernels for the CPU: the five operations of a pass as compiled C, each one parallel region.

Decode reads every stored weight once and is bound by that; prompts are bound by arithmetic (gemv.c, gemm.c and attention.c say how).
Integer weights meet activations of 15 bits: an element of x is wrong by at most the largest of its span of up to 128 columns / 65534, so
y[r] by at most sum over spans of largest |x| * sum |w[r]| / 65534, beside the rounding of an fp32 sum. BF16 activations would be 256 times
coarser.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..quant.weight import QuantizedWeight, Weight
from .cpu_limits import ALIGNMENT, HEAD_STEP, MANY_ROWS, MOST_ACTIVE, PANEL, STREAM_STEP, fits, fits_delta, shared_bytes, thread_bytes
from .delta import DeltaHeads, DeltaStep
from .native import ADD, GATE, KINDS, STORE, Attention, Delta, Joint, Native, Product, SparseExperts, StoredWeight, describe
from .parts import ExpertRows, ExpertWeights, JointRows, StreamJoint
from .reference import Buffer, ReferenceKernels
from .rows import FEW_ROWS, HeadShape, NormWeight, RotaryTable, Rows

log = logging.getLogger(__name__)

# Calls are kept of so many places: a decode step has some hundred for each batch, and each expert of a sparse layer two (about 1 KB each).
KEPT = 1 << 15


@dataclass(slots=True)
class _Call:
    """A structure that is filled in, and the function that takes its address.

    A decode step makes the same calls again and again, with the same objects at the same places: each call is kept by their identities,
    and `held` keeps them alive.
    """

    run: Callable[[int], None]
    structure: Product | Attention | Delta | Joint | SparseExperts
    address: int
    held: tuple[object, ...]


class CpuKernels(ReferenceKernels):
    """Compiled where weights and heads are of a kind that the C has (`compiled` counts the calls), plain torch elsewhere (`plain`)."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__(torch.float32)
        self.threads = threads or torch.get_num_threads()
        self._native = Native(library)
        self.reason = f"compiled for {self._native.instructions}, {self.threads} threads"
        self.compiled = self.plain = 0
        self._weights: dict[int, tuple[StoredWeight, Weight]] = {}
        self._calls: dict[tuple[int, ...], _Call] = {}
        self._declined: dict[int, StreamJoint | ExpertWeights] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self._shared = self._each = 0

    @classmethod
    def workspace(cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int) -> tuple[Buffer, ...]:
        """Room for x of a product and for each thread; where attention.c has nothing for the heads, the reference's keys and values too."""
        threads = torch.get_num_threads()
        room: tuple[Buffer, ...] = (((shared_bytes(columns) + threads * thread_bytes(columns, heads) + ALIGNMENT,), torch.uint8),)
        return room if fits(heads, HEAD_STEP) else (*room, *super().workspace(heads, positions, activation, columns))

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        self._room, *rest = buffers
        super().reserve(rest)
        self._calls.clear()

    def quantize(self, target: QuantizedWeight, values: torch.Tensor, work: torch.Tensor) -> bool:
        stored, kind = describe(target), KINDS.get(values.dtype)
        # A row in fp32, and its nibbles as bytes.
        room = work if work.numel() * 4 >= 5 * (target.cols + PANEL) else torch.empty(2 * (target.cols + PANEL))
        if (
            stored is None
            or kind is None
            or target.format.name not in ("int8", "int4")
            or not (values.is_contiguous() and values.device.type == "cpu")
        ):
            return False
        wrong = self._native.pack_rows(ctypes.addressof(stored), kind, values.data_ptr(), room.data_ptr())
        if wrong >= 0:
            target.scales[wrong] = float("nan")  # whoever asked looks why
        return True

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        stored = self._stored(table)
        if stored is None or not (_plain_rows(out) and ids.is_contiguous() and ids.dtype == torch.int64):
            return super().embed(ids, table, out)
        count, cols = out.shape
        if count != ids.shape[0] or cols != stored.cols:
            raise ValueError(f"{tuple(out.shape)} has no room for {ids.shape[0]} rows of {stored.cols}")
        wrong = self._native.embed_rows(ctypes.addressof(stored), ids.data_ptr(), count, out.data_ptr())
        if wrong >= 0:
            raise IndexError(f"id {int(ids[wrong])} is not in a table of {stored.rows} rows")
        return out

    def linear(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        return out if self._product(STORE, x, None, weight, out) else super().linear(x, weight, out)

    def norm_linear(self, x: torch.Tensor, norm: NormWeight, weight: Weight, out: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return out if self._product(STORE, x, norm, weight, out) else super().norm_linear(x, norm, weight, out, normed)

    def linear_add(self, x: torch.Tensor, weight: Weight, residual: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        return residual if self._product(ADD, x, None, weight, residual) else super().linear_add(x, weight, residual, spare)

    def norm_gate_up(
        self, x: torch.Tensor, norm: NormWeight, gate_up: Weight, out: torch.Tensor, normed: torch.Tensor, both: torch.Tensor
    ) -> torch.Tensor:
        return out if self._product(GATE, x, norm, gate_up, out) else super().norm_gate_up(x, norm, gate_up, out, normed, both)

    def gate_up(self, x: torch.Tensor, gate_up: Weight, out: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        return out if self._product(GATE, x, None, gate_up, out) else super().gate_up(x, gate_up, out, both)

    def attend(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        q_norm: NormWeight,
        k_norm: NormWeight,
        rotary: RotaryTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
    ) -> torch.Tensor:
        parts = (qkv, heads, q_norm, k_norm, rotary, keys, values, rows, out)
        call = self._attend_call(*parts)
        if call is None:
            self.plain += 1
            return super().attend(*parts)
        call.run(call.address)
        self.compiled += 1
        return out

    def attend_chosen(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        q_norm: NormWeight,
        k_norm: NormWeight,
        rotary: RotaryTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
        chosen: torch.Tensor,
        ratio: int,
    ) -> bool:
        call = self._attend_call(qkv, heads, q_norm, k_norm, rotary, keys, values, rows, out) if len(chosen) <= FEW_ROWS else None
        if call is None or not isinstance(call.structure, Attention):
            self.plain += 1
            return False
        a = call.structure
        a.chosen, a.most, a.ratio = chosen.data_ptr(), chosen.shape[1], ratio
        call.run(call.address)
        a.chosen = None
        self.compiled += 1
        return True

    def delta_step(self, heads: DeltaHeads, step: DeltaStep) -> bool:
        key = (id(heads), id(step.projected), id(step.rates), id(step.windows), id(step.slots), id(step.out))
        call = self._calls.get(key)
        if call is None:
            call = self._delta(heads, step)
            if call is None:
                self.plain += 1
                return False
            self._keep(key, call)
        call.run(call.address)
        self.compiled += 1
        return True

    def _delta(self, heads: DeltaHeads, step: DeltaStep) -> _Call | None:
        held = (step.projected, step.rates, step.windows, step.states, heads.taps, heads.decay, heads.bias, heads.norm.weight, step.out)
        if not fits_delta(heads) or not all(map(_plain_rows, held)):
            return None
        d = Delta(rows=step.out.shape[0], taps_count=heads.taps.shape[0], eps=heads.norm.eps, threads=self.threads)
        d.key_heads, d.group, d.key_dim, d.value_dim = heads.key_heads, heads.group, heads.key_dim, heads.value_dim
        d.fused, d.sigmoid = heads.fused, heads.gate == "sigmoid"
        d.projected, d.rates, d.windows, d.states, d.taps, d.decay, d.bias, d.norm, d.out = (tensor.data_ptr() for tensor in held)
        d.sources, d.targets = step.slots.source.data_ptr(), step.slots.target.data_ptr()
        return _Call(self._native.delta_rows, d, ctypes.addressof(d), (*held, heads, step.slots))

    def read_streams(self, joint: StreamJoint, at: JointRows) -> bool:
        key = (id(joint), id(at.streams), id(at.normed), id(at.read))
        return at.streams.shape[0] <= FEW_ROWS and self._at_once(key, joint, lambda: self._joint(joint, at))

    def inject(self, at: JointRows) -> None:
        rows, count = at.weights.shape
        hidden = at.found.shape[1]
        if hidden % STREAM_STEP or not (_plain_rows(at.streams) and _plain_rows(at.weights) and _plain_rows(at.found)):
            super().inject(at)
            return
        self._native.inject_rows(at.streams.data_ptr(), at.weights.data_ptr(), at.found.data_ptr(), rows, count, hidden)

    def run_experts(self, experts: ExpertWeights, at: ExpertRows) -> bool:
        key = (id(experts), id(at.x), id(at.out), id(at.scores), id(at.routed))
        return at.x.shape[0] <= FEW_ROWS and self._at_once(key, experts, lambda: self._experts(experts, at))

    def _at_once(self, key: tuple[int, ...], part: StreamJoint | ExpertWeights, make: Callable[[], _Call | None]) -> bool:
        """Whether the call under `key` could be made; a part that there is none for is remembered, and the first of its type told of."""
        call = self._calls.get(key)
        if call is None:
            call = None if id(part) in self._declined else make()
            if call is None:
                if not any(type(other) is type(part) for other in self._declined.values()):
                    log.info("%s of this network run operation by operation: their formats or widths are not compiled", type(part).__name__)
                self._declined[id(part)] = part
                self.plain += 1
                return False
            self._keep(key, call)
        call.run(call.address)
        self.compiled += 1
        return True

    def _joint(self, joint: StreamJoint, at: JointRows) -> _Call | None:
        stored = self._all_stored(joint.down, joint.up, *([joint.inject] if joint.inject is not None else []))
        held = (at.streams, joint.norm.weight, at.normed, at.low, at.mixed, at.read, at.weights, at.found)
        rows, hidden = at.read.shape
        if stored is None or hidden % STREAM_STEP or not all(map(_plain_rows, held)):
            return None
        scratch = self._scratch_of(stored)
        j = Joint(rows=rows, count=joint.count, hidden=hidden, rank=joint.down.shape[0], threads=self.threads, eps=joint.norm.eps)
        j.streams, j.norm, j.normed, j.low, j.mixed, j.read, j.weights, j.found = (tensor.data_ptr() for tensor in held)
        j.down = self._fill(STORE, at.normed, stored[0], at.low, scratch)
        j.up = self._fill(STORE, at.low, stored[1], at.mixed, scratch)
        if joint.inject is None:
            j.found = None
        else:
            j.inject = self._fill(STORE, at.normed, stored[2], at.weights, scratch)
        return _Call(self._native.joint_rows, j, ctypes.addressof(j), (*held, joint))

    def _experts(self, experts: ExpertWeights, at: ExpertRows) -> _Call | None:
        shared, count = experts.shared, len(experts.gate_up)
        weights = (shared.gate, shared.gate_up, shared.down) if shared else ()
        stored = self._all_stored(experts.router, *weights, *experts.gate_up, *experts.down)
        held = (at.x, at.out, at.scores, at.routed, at.gated, *((at.shared_gate, at.shared_gated) if shared else ()))
        if stored is None or experts.active > min(MOST_ACTIVE, count) or not all(map(_plain_rows, held)):
            return None
        ups, downs = ((StoredWeight * count)(*part) for part in (stored[-2 * count : -count], stored[-count:]))
        scratch = self._scratch_of([*stored[: -2 * count], ups[0], downs[0]])
        e = SparseExperts(count=count, active=experts.active, normalized=experts.normalized, shared=shared is not None)
        e.rows, e.hidden, e.width = *at.x.shape, at.gated.shape[1]
        e.gate_ups, e.downs = ctypes.addressof(ups), ctypes.addressof(downs)
        e.x, e.out, e.scores, e.routed, e.gated = (tensor.data_ptr() for tensor in held[:5])
        e.router = self._fill(STORE, at.x, stored[0], at.scores, scratch)
        e.gate_up = self._fill(GATE, at.x, ups[0], at.gated, scratch)
        e.down = self._fill(STORE, at.gated, downs[0], at.routed, scratch)
        if shared:
            e.shared_gate = self._fill(STORE, at.x, stored[1], at.shared_gate, scratch)
            e.shared_gate_up = self._fill(GATE, at.x, stored[2], at.shared_gated, scratch)
            e.shared_down = self._fill(ADD, at.shared_gated, stored[3], at.out, scratch)
        return _Call(self._native.expert_rows, e, ctypes.addressof(e), (*held, ups, downs, experts))

    def rms_norm(self, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> torch.Tensor:
        weight = norm.weight
        if (
            not (_plain_rows(x) and _plain_rows(out) and _plain_rows(weight))
            or x.shape != out.shape
            or x.shape[-weight.dim() :] != weight.shape
        ):
            return super().rms_norm(x, norm, out)
        cols = x.shape[-1]
        rows, period = x.numel() // cols, weight.numel() // cols
        self._native.norm_rows(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, cols, period, norm.eps, self.threads)
        return out

    def _attend_call(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        q_norm: NormWeight,
        k_norm: NormWeight,
        rotary: RotaryTable,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
    ) -> _Call | None:
        key = (id(qkv), id(q_norm), id(k_norm), id(rotary), id(keys), id(values), id(rows), id(out))
        call = self._calls.get(key)
        if call is not None:
            if isinstance(call.structure, Attention):
                call.structure.longest = rows.longest
            return call
        ready = _plain_rows(qkv) and _plain_rows(out) and keys.dtype == values.dtype == torch.float32
        if not ready or not fits(heads, self._native.attention_width):
            return None
        count = qkv.shape[0]
        a = Attention(q_eps=q_norm.eps, k_eps=k_norm.eps, half=rotary.cos.shape[1], block_ahead=keys.stride(0), threads=self.threads)
        a.keys, a.values, a.q_norm, a.k_norm = keys.data_ptr(), values.data_ptr(), q_norm.weight.data_ptr(), k_norm.weight.data_ptr()
        a.cos, a.sin, a.qkv, a.out = rotary.cos.data_ptr(), rotary.sin.data_ptr(), qkv.data_ptr(), out.data_ptr()
        a.heads, a.kv_heads, a.dim, a.tokens = heads.heads, heads.kv_heads, heads.head_dim, count
        a.positions, a.tables, a.table_ahead = rows.positions.data_ptr(), rows.tables.data_ptr(), rows.tables.stride(0)
        a.chunk = rows.start is not None
        a.scratch, a.stride = self._scratch(0, self._native.attention_scratch(heads.heads, heads.kv_heads, heads.head_dim))
        a.longest = rows.longest
        run = self._native.attend_rows if rows.start is None or count <= FEW_ROWS else self._native.attend_chunk
        call = _Call(run, a, ctypes.addressof(a), (qkv, q_norm, k_norm, rotary, keys, values, rows, out))
        if rows.start is None:
            self._keep(key, call)
        return call

    def _product(self, mode: int, x: torch.Tensor, norm: NormWeight | None, weight: Weight, out: torch.Tensor) -> bool:
        """Whether the product could be done; plain torch must do it otherwise."""
        key = (mode, id(x), id(norm), id(weight), id(out))
        call = self._calls.get(key)
        if call is None:
            call = self._product_call(mode, x, norm, weight, out)
            if call is None:
                self.plain += 1
                return False
            if x.shape[0] <= FEW_ROWS:
                self._keep(key, call)
        call.run(call.address)
        self.compiled += 1
        return True

    def _product_call(self, mode: int, x: torch.Tensor, norm: NormWeight | None, weight: Weight, out: torch.Tensor) -> _Call | None:
        stored = self._stored(weight)
        if stored is None or not (_plain_rows(x) and _plain_rows(out)):
            return None
        product, count = self._fill(mode, x, stored, out, self._scratch(*self._needs(stored))), x.shape[0]
        if norm is not None:
            product.norm, product.eps = norm.weight.data_ptr(), norm.eps
        run = self._native.gemv if count <= FEW_ROWS else self._native.gemm
        return _Call(run, product, ctypes.addressof(product), (x, norm, weight, out))

    def _fill(self, mode: int, x: torch.Tensor, stored: StoredWeight, out: torch.Tensor, scratch: tuple[int, int]) -> Product:
        count, cols = x.shape
        outputs = stored.rows // 2 if mode == GATE else stored.rows
        if cols != stored.cols or out.numel() != count * outputs:
            weight = f"({stored.rows}, {stored.cols})"
            raise ValueError(f"{tuple(x.shape)} times a weight {weight} does not give {tuple(out.shape)}")
        product = Product(w=stored, mode=mode, x=x.data_ptr(), out=out.data_ptr(), tokens=count, threads=self.threads)
        product.scratch, product.stride = scratch
        return product

    def _keep(self, key: tuple[int, ...], call: _Call) -> None:
        if len(self._calls) >= KEPT:
            self._calls.clear()
        self._calls[key] = call

    def _stored(self, weight: Weight) -> StoredWeight | None:
        """What `describe` says, once a weight."""
        found = self._weights.get(id(weight))
        if found is None:
            stored = describe(weight)
            if stored is None:
                return None
            if len(self._weights) >= KEPT:
                self._weights.clear()
            found = self._weights[id(weight)] = stored, weight
        return found[0]

    def _all_stored(self, *weights: Weight) -> list[StoredWeight] | None:
        """`_stored` of each; None where there is nothing for one of them."""
        found = [self._stored(weight) for weight in weights]
        known = [stored for stored in found if stored is not None]
        return known if len(known) == len(found) else None

    def _scratch_of(self, stored: Sequence[StoredWeight]) -> tuple[int, int]:
        """`_scratch` for products with any of the weights."""
        needs = [self._needs(one) for one in stored]
        return self._scratch(max(shared for shared, _ in needs), max(each for _, each in needs))

    def _needs(self, stored: StoredWeight) -> tuple[int, int]:
        """Bytes that any product with this weight takes: shared by all threads, and of each."""
        address, many = ctypes.addressof(stored), (ctypes.c_int64 * 2)()
        self._native.gemm_scratch(address, MANY_ROWS, ctypes.addressof(many))
        return many[0], max(many[1], self._native.gemv_scratch(address, FEW_ROWS))

    def _scratch(self, shared: int, each: int) -> tuple[int, int]:
        """Address of the room and bytes of it for each thread; memory of our own where none was reserved that is large enough."""
        self._shared, self._each = max(self._shared, shared), -(-max(self._each, each) // ALIGNMENT) * ALIGNMENT
        needed = self._shared + self.threads * self._each + ALIGNMENT
        if self._room.numel() < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
            self._calls.clear()  # they point into the room before
        return -(-self._room.data_ptr() // ALIGNMENT) * ALIGNMENT, self._each


def _plain_rows(rows: torch.Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.is_contiguous()
