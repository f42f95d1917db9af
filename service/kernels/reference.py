"""Every operation in plain torch: the reference that faster kernels are tested against, and the path that works
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from ..quant.weight import QuantizedWeight, Weight, dequantize
from .delta_rule import DeltaHeads, DeltaOperands
from .forward_batch import BLOCK, ForwardBatch, HeadShape, NormWeight, PrefillChunk
from .operands import (
    AttentionHeads,
    AttentionOperands,
    ConnectionOperands,
    ExpertOperands,
    ExpertWeights,
    HyperConnection,
    Indexer,
    IndexerOperands,
    LayerPart,
    NgramOperands,
    NgramWeights,
)

# fp32 elements of a widened weight tile. 1 MiB stays in a core's L2, where the product reads it again.
TILE_ELEMENTS = 1 << 18

# A buffer that kernels ask for: shape and type.
Buffer: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class ReferenceKernels:
    """Activations and sums in `activation` (fp32 on CPU). Weights have any floating or quantized type and are never
    widened as a whole.

    A pass calls `embed`, `norm_linear`, `attend`, `linear_add` and `norm_gate_up`. Here they are built from the small
    operations. T is the number of rows of the pass. A fused path need not touch the buffers named `normed`, `both` and
    `spare`.
    """

    name = "reference"

    def __init__(self, activation: torch.dtype = torch.float32) -> None:
        self.activation = activation
        self.reason = "plain torch"
        self._contiguous: Sequence[torch.Tensor] = ()

    def forget_calls(self) -> None:
        """Drop whatever is kept of calls so far: buffers that they used are about to be returned."""

    @classmethod
    def workspace_spec(
        cls, heads: HeadShape, positions: int, activation: torch.dtype, columns: int
    ) -> tuple[Buffer, ...]:
        """The buffers that `reserve` needs for sequences of up to `positions` tokens: here one layer's keys and values,
        gathered.

        `columns` is the widest row that a product reads.
        """
        blocks = -(-positions // BLOCK)
        return (((heads.kv_heads * blocks * BLOCK * heads.head_dim,), activation),) * 2

    def reserve(self, buffers: Sequence[torch.Tensor]) -> None:
        """Use `buffers`, as listed by `workspace_spec`, for the life of the kernels. Without
        them every call allocates.
        """
        self._contiguous = tuple(buffers)

    def captures(self, heads: HeadShape, parts: Iterable[LayerPart]) -> bool:
        """Whether a CUDA graph can hold a decode step, or a few rows of one sequence, over these parts: no kernel reads
        values on the host.
        """
        return False

    def quantize(self, target: QuantizedWeight, values: torch.Tensor, work: torch.Tensor) -> bool:
        """Quantize `values` [rows, cols] into `target` like quantize_into, but faster. False if there is no such way.

        `work` is fp32 with undefined content. Several threads may call this at once. If a number is NaN, infinite or
        too large for a scale, the scale is left non-finite.
        """
        return False

    def embed(self, ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [T] int64 of `table` [vocab, hidden] into `out` [T, hidden]."""
        return out.copy_(dequantize(table.take_rows(ids)) if isinstance(table, QuantizedWeight) else table[ids])

    def linear(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
        """out [T, rows] = x [T, cols] @ weight [rows, cols]^T."""
        quantized = isinstance(weight, QuantizedWeight)
        if not quantized and weight.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        rows, cols = weight.shape
        step = max(1, TILE_ELEMENTS // cols)
        for row in range(0, rows, step):
            tile = dequantize(weight.row_slice(row, row + step)) if quantized else weight[row : row + step]
            out[:, row : row + step] = x @ tile.to(x.dtype).t()
        return out

    def norm_linear(
        self, x: torch.Tensor, norm: NormWeight, weight: Weight, out: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        """out [T, rows] = rms_norm(x [T, cols]) @ weight [rows, cols]^T; normed [T, cols]."""
        return self.linear(self.rms_norm(x, norm, normed), weight, out)

    def linear_add(self, x: torch.Tensor, weight: Weight, residual: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
        """residual [T, rows] += x [T, cols] @ weight [rows, cols]^T; spare [T, rows]. Returns the residual."""
        return residual.add_(self.linear(x, weight, spare))

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm: NormWeight,
        gate_up: Weight,
        out: torch.Tensor,
        normed: torch.Tensor,
        both: torch.Tensor,
    ) -> torch.Tensor:
        """out [T, I] = silu(gate) * up with (gate, up) = rms_norm(x [T, H]) @ gate_up [2I, H]^T; normed [T, H], both
        [T, 2I].
        """
        return self.silu_mul(self.norm_linear(x, norm, gate_up, both, normed), out)

    def gate_up(self, x: torch.Tensor, gate_up: Weight, out: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """Like `norm_gate_up` for rows that are already normed, as experts have them."""
        return self.silu_mul(self.linear(x, gate_up, both), out)

    def attend(self, heads: AttentionHeads, at: AttentionOperands) -> torch.Tensor:
        """Attention of a layer over its paged cache, from projections to mixed values. Returns at.out.

        Queries and keys are normed per head and rotated, keys and values are written, then every row attends to its
        sequence up to itself.
        """
        q, batch = self.rotate_and_store(heads, at), at.batch
        mixed = at.out.view(q.shape)
        if isinstance(batch, PrefillChunk):
            held = self.contiguous(at.keys, at.values, batch.tables[0], batch.start + q.shape[0])
            self.attention(q, *held, batch.start, mixed)
            return at.out
        for row, position in enumerate(batch.positions.tolist()):
            held = self.contiguous(at.keys, at.values, batch.tables[row], position + 1)
            self.attention(q[row : row + 1], *held, position, mixed[row : row + 1])
        return at.out

    def attend_indexed(
        self, heads: AttentionHeads, at: AttentionOperands, indexer: Indexer, keyed: IndexerOperands
    ) -> bool:
        """Like `attend`, but each row sees the key blocks that the indexer selects for it, and the tokens after the
        last full key block. Updates the pooled keys and the tails.

        Returns False and does nothing if there is no faster way than the small operations.
        """
        return False

    def split_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        """Copy everything but the gates of projected [T, heads.queries + heads.qkv] into qkv [T, heads.qkv]. Each head
        has its queries, then its gates.
        """
        count, queries = qkv.shape[0], heads.queries
        wanted = projected[:, : 2 * queries].view(count, heads.heads, 2, heads.head_dim)[:, :, 0]
        qkv[:, :queries].view(count, heads.heads, heads.head_dim).copy_(wanted)
        qkv[:, queries:].copy_(projected[:, 2 * queries :])

    def apply_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        """Multiply mixed [T, heads.queries] by the sigmoid of the gates in `projected`."""
        count = mixed.shape[0]
        gates = projected[:, : 2 * heads.queries].view(count, heads.heads, 2, heads.head_dim)[:, :, 1]
        mixed.view(count, heads.heads, heads.head_dim).mul_(torch.sigmoid(gates))

    def rotate_and_store(self, heads: AttentionHeads, at: AttentionOperands) -> torch.Tensor:
        """First part of `attend`: norm and rotate queries and keys, write keys and values. Returns the queries [T,
        heads, dim].
        """
        shape, turns = heads.shape, at.batch.rotary_rows
        if heads.bias is not None:
            at.qkv.add_(heads.bias)
        split = at.qkv.view(at.qkv.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = split.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        cos, sin = heads.rotary.cos[turns], heads.rotary.sin[turns]
        for part, norm in ((q, heads.q_norm), (k, heads.k_norm)):
            self.rotate(part if norm is None else self.rms_norm(part, norm, part), cos, sin)
        write_rows(k, v, at.keys, at.values, at.batch)
        return q

    def delta_step(self, heads: DeltaHeads, step: DeltaOperands) -> bool:
        """Run a decode step of a gated delta net between its projections. False if there is no faster way than the
        small operations.
        """
        return False

    def delta_chunk(self, heads: DeltaHeads, step: DeltaOperands) -> bool:
        """Like `delta_step` for the T rows of a chunk of one sequence. The state is read from one slot and written to
        another.
        """
        return False

    def read_connection(self, connection: HyperConnection, at: ConnectionOperands) -> bool:
        """Compute what a layer reads of the residual streams and the weights of its injection. False if there is no
        faster way than the small operations.
        """
        return False

    def inject(self, at: ConnectionOperands) -> None:
        """streams += weights * found, each stream with its own weight."""
        rows, count = at.weights.shape
        at.streams.view(rows, count, -1).addcmul_(at.weights[:, :, None], at.found[:, None])

    def inject_and_read(self, connection: HyperConnection, at: ConnectionOperands) -> bool:
        """`inject`, then `read_connection`. False if there is no faster way than one after the other."""
        return False

    def run_experts(self, experts: ExpertWeights, at: ExpertOperands) -> bool:
        """Pass rows through the experts selected for them. False if there is no faster way
        than the small operations.
        """
        return False

    def add_ngrams(self, weights: NgramWeights, at: NgramOperands) -> bool:
        """Run the n-gram block of a decode step or a VerifyPass, after the table lookup. False if there is no faster
        way than the small operations.
        """
        return False

    def run_captured(self, owner: object, index: int, work: Callable[[], None]) -> None:
        """Do `work`, a part of a decode step that makes the same calls at the same addresses for the same `owner` and
        `index`.

        `work` calls kernels, and does something itself only if one of them returned False. It may therefore be
        recorded, and replayed as one call.
        """
        work()

    def rms_norm(self, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> torch.Tensor:
        """out = x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and Sennrich 2019)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(norm.eps))
        return out.copy_(wide.mul(scale).mul_(norm.weight))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in place (Su et al. 2021, halves paired as in Qwen): x [T, heads, dim]; cos, sin [T, dim/2]
        fp32.
        """
        half = cos.shape[-1]
        low, high = x[..., :half], x[..., half : 2 * half]
        cos, sin = cos[:, None], sin[:, None]
        turned = (low * cos - high * sin, high * cos + low * sin)
        low.copy_(turned[0])
        high.copy_(turned[1])
        return x

    def contiguous(
        self, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the first `length` keys and values of the sequence with block ids `table`: [kv_heads, length,
        head_dim] each.
        """
        _, kv_heads, block, dim = keys.shape
        blocks = -(-length // block)
        # Rows of (block, head), for each head the blocks of the sequence in order. index_select would copy a source
        # that is not contiguous.
        heads = torch.arange(kv_heads, dtype=table.dtype, device=table.device)
        wanted = torch.add(heads[:, None], table[:blocks], alpha=kv_heads).view(-1)
        size = wanted.shape[0] * block * dim
        buffers = self._contiguous or [keys.new_empty(size) for _ in range(2)]
        gathered = []
        for paged, buffer in zip((keys, values), buffers, strict=True):
            held = buffer[:size].view(-1, block * dim)
            torch.index_select(paged.view(-1, block * dim), 0, wanted, out=held)
            gathered.append(held.view(kv_heads, blocks * block, dim)[:, :length])
        return gathered[0], gathered[1]

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Causal grouped-query attention, scale dim^-0.5.

        q [T, heads, dim] at positions start..; k, v [kv_heads, start + T, dim]; out [T, heads, dim].
        """
        tokens, heads, dim = q.shape
        kv_heads, length, _ = k.shape
        group = heads // kv_heads
        grouped = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, dim)
        scores = torch.bmm(grouped.float(), k.float().transpose(1, 2)).mul_(dim**-0.5)
        if tokens > 1:
            visible = causal_mask(tokens, length, q.device).repeat(group, 1)
            scores.masked_fill_(~visible, float("-inf"))
        mixed = torch.bmm(scores.softmax(-1), v.float())
        return out.copy_(mixed.view(kv_heads, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [T, width] = silu(gate) * up with gate_up [T, 2 * width] (Shazeer 2020, SwiGLU)."""
        gate, up = gate_up.chunk(2, -1)
        return torch.mul(F.silu(gate), up, out=out)


def write_rows(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
    """Store k, v [T, kv_heads, head_dim] at the positions of `batch` in the paged keys, values [blocks, kv_heads,
    BLOCK, head_dim].
    """
    block, slot = batch.positions.long() // BLOCK, batch.positions.long() % BLOCK
    held = batch.tables[0, block] if batch.one_sequence else batch.tables.gather(1, block[:, None])[:, 0]
    keys[held, :, slot] = k.to(keys.dtype)
    values[held, :, slot] = v.to(values.dtype)


def causal_mask(tokens: int, length: int, device: torch.device) -> torch.Tensor:
    """Bool [tokens, length]: each of the last `tokens` of `length` positions sees itself and everything before it."""
    return torch.ones(tokens, length, dtype=torch.bool, device=device).tril_(length - tokens)
