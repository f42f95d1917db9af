"""Attention on CUDA over paged keys and values, over the whole past or over key blocks that an indexer selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..forward_batch import BLOCK, FEW_ROWS, ForwardBatch, HeadShape, PrefillChunk, VerifyPass
from ..operands import AttentionHeads, AttentionOperands, Indexer, IndexerOperands
from .cuda_plan import on_grid
from .cuda_products import FusedProducts, power
from .triton_attend import attend_chunk, attend_rows, attend_step, join_splits
from .triton_positions import (
    apply_gates,
    attend_positions,
    choose_key_blocks,
    pool_keys,
    score_key_blocks,
    split_gates,
    store_rotated,
)
from .triton_rows import store_heads

# Programs that share the positions of a sequence, by batch size: enough to use all processors of a large GPU.
SPLITS = {1: 16, 2: 16, 4: 8, 8: 8}
# Results of splits that the workspace holds per key/value head.
UNITS = max(batch * splits for batch, splits in SPLITS.items())
# Queries stacked in a tile, and the largest group that shares a key/value head.
GROUP = 16
# Most joined numbers per program, and columns of a head per program if there are more.
JOINED, JOINED_COLUMNS = 16384, 64
# Scores of key blocks held at once while a chunk selects: 64 MiB.
SCORES = 1 << 24
KEY_BLOCKS = 64


class AttentionKernels(FusedProducts):
    """Attention kernels. In decode steps and verify passes the programs split the positions of each row. In a chunk
    they split its rows.
    """

    def attend(self, heads: AttentionHeads, at: AttentionOperands) -> torch.Tensor:
        shape, batch, count = heads.shape, at.batch, at.qkv.shape[0]
        if not (heads.normed and self.fuses_attention(shape)):
            return super().attend(heads, at)
        forms = _forms(shape)
        few = batch.one_sequence and _in_graph(batch)
        if few or 2 * heads.rotary.cos.shape[1] != shape.head_dim:
            self._store(heads, at)
            if few:
                return self._attend_rows(at, forms)
            if not isinstance(batch, PrefillChunk):
                return self._attend_positions(at, forms, batch.positions, batch.positions, 0, 1)
            return self._attend_chunk(at, forms)
        parts = _store_arguments(heads, at)
        if not isinstance(batch, PrefillChunk):
            splits, workspace = SPLITS[power(count)], self.workspace
            on_grid(attend_step, (count, shape.kv_heads, splits))(
                *parts, batch.tables.stride(0), workspace.heads, *workspace.heads_scores, at.out, SPLITS=splits,
                PDL=self.device.early, num_warps=4, **forms, **self.launch,
            )  # fmt: skip
            return self._join(batch.positions, at.out, forms, splits, 0)
        padded = power(shape.heads + 2 * shape.kv_heads)
        on_grid(store_heads, (count,))(
            *parts, HEADS=shape.heads, KV=shape.kv_heads, D=shape.head_dim, PADDED=padded, num_warps=8
        )
        return self._attend_chunk(at, forms)

    def attend_indexed(
        self, heads: AttentionHeads, at: AttentionOperands, indexer: Indexer, keyed: IndexerOperands
    ) -> bool:
        qkv, batch, rotary = at.qkv, at.batch, heads.rotary
        if not self.fuses_attention(heads.shape) or batch.slots is None:
            return False
        count, held, forms = qkv.shape[0], _in_graph(batch), _forms(heads.shape)
        self._store(heads, at)
        queries = self._buffer("indexer queries", torch.float32, qkv, held, count * (indexer.heads + 1) * indexer.dim)
        early = {"PDL": self.device.early, **self.launch}
        sizes = {"HEADS": indexer.heads, "DIM": indexer.dim, "DP": power(indexer.dim), "RATIO": indexer.ratio}
        ahead = _ahead(batch)
        on_grid(pool_keys, (count, indexer.heads + 1))(
            keyed.indexed, keyed.tails, keyed.pooled, queries, indexer.q_norm.weight, indexer.k_norm.weight,
            indexer.q_norm.eps, indexer.k_norm.eps, rotary.cos, rotary.sin, batch.positions, batch.rotary_rows,
            batch.rotary_rows if batch.first_turns is None else batch.first_turns, batch.tables, ahead,
            batch.slots.source, batch.slots.target, count, HALF=rotary.cos.shape[1], CHUNK=batch.one_sequence,
            VERIFY=isinstance(batch, VerifyPass), FIRSTS=batch.first_turns is not None, num_warps=1, **sizes, **early,
        )  # fmt: skip
        seen = indexer.budget + indexer.ratio - 1
        if not held and isinstance(batch, PrefillChunk) and batch.start + count <= seen:
            self._attend_chunk(at, forms)
            return True
        # A graph must fit every length up to that of the whole table. Programs after a row's last key block end at
        # once.
        longest = batch.tables.shape[1] * BLOCK if held or not isinstance(batch, PrefillChunk) else batch.start + count
        width, most = longest // indexer.ratio, indexer.budget // indexer.ratio
        step = count if held else max(1, min(count, SCORES // max(1, width)))
        scores = self._buffer("indexer scores", torch.float32, qkv, held, step * width)
        chosen = self._buffer("indexer chosen", torch.int32, qkv, held, step * most)
        lengths = self._buffer("indexer lengths", torch.int32, qkv, held, step)
        for first in range(0, count, step):
            piece = slice(first, min(first + step, count))
            some = piece.stop - first
            positions = batch.positions[piece]
            asked = queries[first * indexer.heads * indexer.dim :]
            on_grid(score_key_blocks, (some, -(-width // KEY_BLOCKS)))(
                asked,
                keyed.pooled,
                positions,
                batch.tables,
                ahead,
                scores,
                width,
                BLOCK=KEY_BLOCKS,
                num_warps=4,
                **sizes,
                **early,
            )
            on_grid(choose_key_blocks, (some,))(
                scores,
                positions,
                chosen,
                lengths,
                width,
                MOST=most,
                RATIO=indexer.ratio,
                BLOCK=min(4096, power(width)),
                num_warps=8,
                **early,
            )
            part = replace(batch, positions=positions)
            few = AttentionOperands(qkv[piece], at.keys, at.values, part, at.out[piece])
            self._attend_positions(few, forms, chosen, lengths, indexer.ratio, most)
        return True

    def split_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        sizes = {
            "HEADS": heads.heads,
            "KV": heads.kv_heads,
            "D": heads.head_dim,
            "BLOCK": 1024,
            "PDL": self.device.early,
        }
        on_grid(split_gates, (qkv.shape[0], -(-heads.qkv // 1024)))(projected, qkv, num_warps=4, **sizes, **self.launch)

    def apply_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        sizes = {
            "HEADS": heads.heads,
            "KV": heads.kv_heads,
            "D": heads.head_dim,
            "BLOCK": 1024,
            "PDL": self.device.early,
        }
        on_grid(apply_gates, (qkv.shape[0], -(-heads.queries // 1024)))(
            projected, mixed, num_warps=4, **sizes, **self.launch
        )

    def fuses_attention(self, heads: HeadShape) -> bool:
        """Whether fused kernels support it. What they do not support is logged once."""
        group = heads.heads // heads.kv_heads
        if heads.head_dim in (64, 128, 256) and group <= GROUP:
            return True
        self.tell(f"attention with {group} queries of {heads.head_dim} to a key")
        return False

    def _buffer(self, name: str, dtype: torch.dtype, like: torch.Tensor, held: bool, size: int) -> torch.Tensor:
        """A buffer between two kernels. In a pass that a graph may hold (`held`) it has the same address every time."""
        return (
            self.static_buffer(name, dtype, like, size) if held else torch.empty(size, dtype=dtype, device=like.device)
        )

    def _store(self, heads: AttentionHeads, at: AttentionOperands) -> None:
        shape = heads.shape
        on_grid(store_rotated, (at.qkv.shape[0], shape.heads + 2 * shape.kv_heads))(
            *_store_arguments(heads, at), _ahead(at.batch), HEADS=shape.heads, KV=shape.kv_heads, D=shape.head_dim,
            HALF=heads.rotary.cos.shape[1], PDL=self.device.early, num_warps=1, **self.launch,
        )  # fmt: skip

    def _attend_positions(
        self,
        at: AttentionOperands,
        forms: dict[str, Any],
        chosen: torch.Tensor,
        lengths: torch.Tensor,
        ratio: int,
        most: int,
    ) -> torch.Tensor:
        """Attention of rows whose queries are rotated, over a cache that has their keys."""
        count, batch, workspace = at.qkv.shape[0], at.batch, self.workspace
        splits = SPLITS[power(count)] if count <= FEW_ROWS else 1
        on_grid(attend_positions, (count, forms["KV"], splits))(
            at.qkv, at.keys, at.values, batch.positions, batch.tables, _ahead(batch), chosen, lengths, workspace.heads,
            *workspace.heads_scores, at.out, SPLITS=splits, RATIO=ratio, MOST=most, PDL=self.device.early, num_warps=4,
            **forms, **self.launch,
        )  # fmt: skip
        return at.out if splits == 1 else self._join(lengths, at.out, forms, splits, 0 if ratio else 1)

    def _attend_rows(self, at: AttentionOperands, forms: dict[str, Any]) -> torch.Tensor:
        """Like `_attend_positions` for a few rows of one sequence, over everything that each sees."""
        count, batch, workspace = at.qkv.shape[0], at.batch, self.workspace
        tiles = -(-count // (GROUP // forms["GP"]))
        splits = min(SPLITS[power(tiles)], UNITS // power(count))
        on_grid(attend_rows, (tiles, forms["KV"], splits))(
            at.qkv, at.keys, at.values, batch.positions, batch.tables, workspace.heads, *workspace.heads_scores, at.out,
            count, SPLITS=splits, PDL=self.device.early, num_warps=4, **forms, **self.launch,
        )  # fmt: skip
        return self._join(batch.positions[count - 1 :], at.out, forms, splits, 1, together=True)

    def _join(
        self,
        lengths: torch.Tensor,
        out: torch.Tensor,
        forms: dict[str, Any],
        splits: int,
        more: int,
        *,
        together: bool = False,
    ) -> torch.Tensor:
        wide = splits * forms["GP"] * forms["D"] > JOINED
        columns = JOINED_COLUMNS if wide else forms["D"]
        on_grid(join_splits, (out.shape[0], forms["KV"], forms["D"] // columns))(
            lengths, self.workspace.heads, *self.workspace.heads_scores, out, SPLITS=splits, MORE=more, COLUMNS=columns,
            TOGETHER=together, PDL=self.device.early, num_warps=4, **forms, **self.launch,
        )  # fmt: skip
        return out

    @staticmethod
    def _attend_chunk(at: AttentionOperands, forms: dict[str, Any]) -> torch.Tensor:
        count, narrow = at.qkv.shape[0], forms["D"] <= 128
        tile = 128 if count * forms["GP"] > 64 and narrow else 64
        on_grid(attend_chunk, (-(-count * forms["GP"] // tile), forms["KV"]))(
            at.qkv,
            at.keys,
            at.values,
            at.batch.tables,
            at.out,
            at.batch.positions,
            count,
            BM=tile,
            BN=64 if narrow else 32,
            STAGES=2,
            num_warps=tile // 16,
            **forms,
        )
        return at.out


def _in_graph(batch: ForwardBatch) -> bool:
    """Whether a graph may hold the pass. It is replayed at other positions, so no host-side position may decide
    anything.
    """
    return batch.positions.shape[0] <= FEW_ROWS


def _ahead(batch: ForwardBatch) -> int:
    """Distance between the block tables of two rows."""
    return 0 if batch.one_sequence else batch.tables.stride(0)


def _store_arguments(heads: AttentionHeads, at: AttentionOperands) -> tuple[Any, ...]:
    """The first arguments of the kernels that norm, rotate and store heads."""
    q_norm, k_norm, rotary, batch = heads.q_norm, heads.k_norm, heads.rotary, at.batch
    if q_norm is None or k_norm is None:
        raise ValueError("fused attention norms queries and keys")
    norms = q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps
    return (
        at.qkv, *norms, rotary.cos, rotary.sin, at.keys, at.values, batch.positions, batch.rotary_rows, batch.tables
    )  # fmt: skip


def _forms(heads: HeadShape) -> dict[str, Any]:
    return {"HEADS": heads.heads, "KV": heads.kv_heads, "D": heads.head_dim, "GP": power(heads.heads // heads.kv_heads)}
