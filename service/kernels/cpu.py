"""Kernels for the CPU: the five operations of a pass as compiled C, each one parallel region.

Decode reads every stored weight once and is bound by that; prompts are bound by arithmetic (gemv.c, gemm.c and attention.c say how).
Integer weights meet activations of 15 bits: an element of x is wrong by at most the largest of its span of up to 128 columns / 65534, so
y[r] by at most sum over spans of largest |x| * sum |w[r]| / 65534, beside the rounding of an fp32 sum. BF16 activations would be 256 times
coarser.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..quant.weight import Weight
from .native import ADD, GATE, STORE, Attention, Native, Product, StoredWeight, describe
from .reference import Buffer, ReferenceKernels
from .rows import FEW_ROWS, HeadShape, NormWeight, RotaryTable, Rows

# What gemm.c and attention.c take at once at most (widest vectors): rows of x, columns and rows of a panel, query rows of a tile.
MANY_ROWS, DEPTH, PANEL, TILE_ROWS = 264, 256, 32, 60
# The most queries that share a key head in attention.c, and what its head widths are a multiple of on any processor.
MOST_GROUP, HEAD_STEP = 64, 16
ALIGNMENT = 64
# Addresses are kept of so many weights; a network has some hundred.
KEPT = 4096


@dataclass(slots=True)
class _Plan:
    """A product's structure and its address. `held` are the tensors that it points into."""

    product: Product
    address: int
    outputs: int
    held: Weight


@dataclass(slots=True)
class _Mixing:
    """The same for attention over the cache of one layer."""

    attention: Attention
    address: int
    made_for: tuple[NormWeight, NormWeight, RotaryTable]
    held: tuple[torch.Tensor, ...]

    def suits(self, q_norm: NormWeight, k_norm: NormWeight, rotary: RotaryTable) -> bool:
        return self.made_for[0] is q_norm and self.made_for[1] is k_norm and self.made_for[2] is rotary


class CpuKernels(ReferenceKernels):
    """Compiled where weights and heads are of a kind that the C has (`compiled` counts the calls), plain torch elsewhere (`plain`)."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__(torch.float32)
        self.threads = threads or torch.get_num_threads()
        self._native = Native(library)
        self.reason = f"compiled for {self._native.instructions}, {self.threads} threads"
        self.compiled = self.plain = 0
        self._plans: dict[int, _Plan] = {}
        self._mixings: dict[int, _Mixing] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self._shared = self._each = 0

    @classmethod
    def workspace(cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int) -> tuple[Buffer, ...]:
        """Room for x of a product and for each thread; where attention.c has nothing for the heads, the reference's keys and values too."""
        threads = torch.get_num_threads()
        room: tuple[Buffer, ...] = (((_shared_bytes(columns) + threads * _thread_bytes(columns, heads) + ALIGNMENT,), torch.uint8),)
        return room if _fits(heads, HEAD_STEP) else (*room, *super().workspace(heads, positions, activation, columns))

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        self._room, *rest = buffers
        super().reserve(rest)
        self._plans.clear()
        self._mixings.clear()

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        plan = self._plan(table)
        if plan is None or not (_plain_rows(out) and ids.is_contiguous() and ids.dtype == torch.int64):
            return super().embed(ids, table, out)
        count, cols = out.shape
        if count != ids.shape[0] or cols != plan.product.w.cols:
            raise ValueError(f"{tuple(out.shape)} has no room for {ids.shape[0]} rows of {plan.product.w.cols}")
        wrong = self._native.embed_rows(plan.address, ids.data_ptr(), count, out.data_ptr())
        if wrong >= 0:
            raise IndexError(f"id {int(ids[wrong])} is not in a table of {plan.product.w.rows} rows")
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
        ready = _plain_rows(qkv) and _plain_rows(out) and keys.dtype == values.dtype == torch.float32
        if not ready or not _fits(heads, self._native.attention_width):
            self.plain += 1
            return super().attend(qkv, heads, q_norm, k_norm, rotary, keys, values, rows, out)
        mixing = self._mixings.get(id(keys))
        if mixing is None or not mixing.suits(q_norm, k_norm, rotary):
            mixing = self._mixing(heads, q_norm, k_norm, rotary, keys, values)
        a, count = mixing.attention, qkv.shape[0]
        a.qkv, a.out, a.tokens = qkv.data_ptr(), out.data_ptr(), count
        a.positions, a.tables, a.table_ahead = rows.positions.data_ptr(), rows.tables.data_ptr(), rows.tables.stride(0)
        a.chunk, a.longest = rows.start is not None, rows.longest
        many = rows.start is not None and count > FEW_ROWS
        (self._native.attend_chunk if many else self._native.attend_rows)(mixing.address)
        self.compiled += 1
        return out

    def _product(self, mode: int, x: torch.Tensor, norm: NormWeight | None, weight: Weight, out: torch.Tensor) -> bool:
        """Whether the product could be done; plain torch must do it otherwise."""
        plan = self._plans.get(id(weight)) or self._plan(weight)
        if plan is None or not (_plain_rows(x) and _plain_rows(out)):
            self.plain += 1
            return False
        product, (count, cols) = plan.product, x.shape
        outputs = plan.outputs // 2 if mode == GATE else plan.outputs
        if cols != product.w.cols or out.numel() != count * outputs:
            raise ValueError(f"{tuple(x.shape)} times a weight {tuple(weight.shape)} does not give {tuple(out.shape)}")
        product.mode, product.tokens, product.x, product.out = mode, count, x.data_ptr(), out.data_ptr()
        if norm is None:
            product.norm = None
        else:
            product.norm, product.eps = norm.weight.data_ptr(), norm.eps
        (self._native.gemv if count <= FEW_ROWS else self._native.gemm)(plan.address)
        self.compiled += 1
        return True

    def _plan(self, weight: Weight) -> _Plan | None:
        """Made once a weight: kept by the object, which the plan keeps alive."""
        plan = self._plans.get(id(weight))
        if plan is None:
            stored = describe(weight)
            if stored is None:
                return None
            if len(self._plans) >= KEPT:
                self._plans.clear()
            product = Product(w=stored, threads=self.threads)
            product.scratch, product.stride = self._scratch(*self._needs(stored))
            plan = self._plans[id(weight)] = _Plan(product, ctypes.addressof(product), stored.rows, weight)
        return plan

    def _mixing(
        self, heads: HeadShape, q_norm: NormWeight, k_norm: NormWeight, rotary: RotaryTable, keys: torch.Tensor, values: torch.Tensor
    ) -> _Mixing:
        held = (keys, values, q_norm.weight, k_norm.weight, rotary.cos, rotary.sin)
        a = Attention(q_eps=q_norm.eps, k_eps=k_norm.eps, half=rotary.cos.shape[1], block_ahead=keys.stride(0), threads=self.threads)
        a.keys, a.values, a.q_norm, a.k_norm, a.cos, a.sin = (tensor.data_ptr() for tensor in held)
        a.heads, a.kv_heads, a.dim = heads.heads, heads.kv_heads, heads.head_dim
        a.scratch, a.stride = self._scratch(0, self._native.attention_scratch(heads.heads, heads.kv_heads, heads.head_dim))
        mixing = self._mixings[id(keys)] = _Mixing(a, ctypes.addressof(a), (q_norm, k_norm, rotary), held)
        return mixing

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
            self._plans.clear()  # they point into the room before
            self._mixings.clear()
        return -(-self._room.data_ptr() // ALIGNMENT) * ALIGNMENT, self._each


def _plain_rows(rows: torch.Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.is_contiguous()


def _fits(heads: HeadShape, step: int) -> bool:
    return heads.head_dim % step == 0 and heads.heads // heads.kv_heads <= MOST_GROUP


def _shared_bytes(columns: int) -> int:
    return MANY_ROWS * -(-columns // DEPTH) * DEPTH * 4 + 4 * ALIGNMENT


def _thread_bytes(columns: int, heads: HeadShape) -> int:
    row = -(-columns // DEPTH) * DEPTH * 4
    panels = 2 * PANEL * DEPTH * 4 + 2 * MANY_ROWS * PANEL * 4
    tile = max(TILE_ROWS, heads.heads // heads.kv_heads + TILE_ROWS - 48)
    mixing = (2 * heads.head_dim + 34) * tile * 4 + 32 * heads.head_dim * 4
    return max((FEW_ROWS + 1) * row, 2 * row + panels, mixing) + 16 * ALIGNMENT
