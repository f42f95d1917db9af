"""Attention on CUDA over paged keys and values: whole heads turned in one kernel a step, others placed first; chosen stretches only."""

from __future__ import annotations

from typing import Any

import torch

from ..forward_batch import BLOCK, FEW_ROWS, HeadShape, Rows
from ..operands import AttentionHeads, AttentionRows, IndexedRows, Indexer
from .cuda_plan import on_grid
from .cuda_products import FusedProducts, power
from .triton_attend import attend_chunk, attend_rows, attend_step, join_splits
from .triton_positions import (
    attend_places,
    choose_stretches,
    close_gates,
    part_gates,
    place_turned,
    pool_keys,
    score_stretches,
)
from .triton_rows import place_heads

# Programs that share the positions of a sequence, by the batch: so many that all processors of a large GPU have some.
SPLITS = {1: 16, 2: 16, 4: 8, 8: 8}
# Results of splits that there is room for, of each key/value head.
UNITS = max(batch * splits for batch, splits in SPLITS.items())
# Queries below each other in a tile, and the largest group that shares a key/value head.
GROUP = 16
# Numbers of joined results that a program holds, and columns of a head that it takes where they are more.
JOINED, JOINED_COLUMNS = 16384, 64
# Scores of stretches that are held at once when a chunk chooses: 64 MiB.
SCORES = 1 << 24
STRETCHES = 64


class AttentionKernels(FusedProducts):
    """A decode step, and a few rows of one sequence, share the places of each row out among programs; a chunk shares out its rows."""

    def attend(self, heads: AttentionHeads, at: AttentionRows) -> torch.Tensor:
        shape, rows, count = heads.shape, at.rows, at.qkv.shape[0]
        if not (heads.normed and self.fuses_attention(shape)):
            return super().attend(heads, at)
        forms = _forms(shape)
        few = rows.start is not None and _held(rows)
        if few or 2 * heads.rotary.cos.shape[1] != shape.head_dim:
            self._place(heads, at)
            if few:
                return self._attend_rows(at, forms)
            if rows.start is None:
                return self._attend_places(at, forms, rows.positions, rows.positions, 0, 1)
            return self._attend_chunk(at, forms)
        parts = _placing(heads, at)
        if rows.start is None:
            splits, room = SPLITS[power(count)], self.room
            on_grid(attend_step, (count, shape.kv_heads, splits))(
                *parts, rows.tables.stride(0), room.heads, *room.heads_scores, at.out, SPLITS=splits, PDL=self.device.early, num_warps=4,
                **forms, **self.launch,
            )  # fmt: skip
            return self._join(rows.positions, at.out, forms, splits, 0)
        room = power(shape.heads + 2 * shape.kv_heads)
        on_grid(place_heads, (count,))(*parts, HEADS=shape.heads, KV=shape.kv_heads, D=shape.head_dim, ROOM=room, num_warps=8)
        return self._attend_chunk(at, forms)

    def attend_indexed(self, heads: AttentionHeads, at: AttentionRows, indexer: Indexer, keyed: IndexedRows) -> bool:
        qkv, rows, rotary = at.qkv, at.rows, heads.rotary
        if not self.fuses_attention(heads.shape) or rows.slots is None:
            return False
        count, held, forms = qkv.shape[0], _held(rows), _forms(heads.shape)
        self._place(heads, at)
        queries = self._room_for("indexer queries", torch.float32, qkv, held, count * (indexer.heads + 1) * indexer.dim)
        early = {"PDL": self.device.early, **self.launch}
        sizes = {"HEADS": indexer.heads, "DIM": indexer.dim, "DP": power(indexer.dim), "RATIO": indexer.ratio}
        ahead = _ahead(rows)
        on_grid(pool_keys, (count, indexer.heads + 1))(
            keyed.indexed, keyed.tails, keyed.pooled, queries, indexer.q_norm.weight, indexer.k_norm.weight, indexer.q_norm.eps,
            indexer.k_norm.eps, rotary.cos, rotary.sin, rows.positions, rows.rotary_rows,
            rows.rotary_rows if rows.first_turns is None else rows.first_turns, rows.tables, ahead, rows.slots.source, rows.slots.target,
            count, HALF=rotary.cos.shape[1], CHUNK=rows.start is not None, TRAIL=rows.trail, FIRSTS=rows.first_turns is not None,
            num_warps=1, **sizes, **early,
        )  # fmt: skip
        seen = indexer.budget + indexer.ratio - 1
        if not held and rows.start is not None and rows.start + count <= seen:
            self._attend_chunk(at, forms)
            return True
        # A graph must fit every length up to the whole table's; programs behind a row's last stretch end at once.
        longest = rows.tables.shape[1] * BLOCK if held or rows.start is None else rows.start + count
        width, most = longest // indexer.ratio, indexer.budget // indexer.ratio
        step = count if held else max(1, min(count, SCORES // max(1, width)))
        scores = self._room_for("indexer scores", torch.float32, qkv, held, step * width)
        chosen = self._room_for("indexer chosen", torch.int32, qkv, held, step * most)
        lengths = self._room_for("indexer lengths", torch.int32, qkv, held, step)
        for first in range(0, count, step):
            piece = slice(first, min(first + step, count))
            some = piece.stop - first
            positions = rows.positions[piece]
            asked = queries[first * indexer.heads * indexer.dim :]
            on_grid(score_stretches, (some, -(-width // STRETCHES)))(
                asked, keyed.pooled, positions, rows.tables, ahead, scores, width, BLOCK=STRETCHES, num_warps=4, **sizes, **early
            )
            on_grid(choose_stretches, (some,))(
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
            part = Rows(positions, rows.tables, rows.start, rows.longest)
            few = AttentionRows(qkv[piece], at.keys, at.values, part, at.out[piece])
            self._attend_places(few, forms, chosen, lengths, indexer.ratio, most)
        return True

    def part_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        sizes = {"HEADS": heads.heads, "KV": heads.kv_heads, "D": heads.head_dim, "BLOCK": 1024, "PDL": self.device.early}
        on_grid(part_gates, (qkv.shape[0], -(-heads.qkv // 1024)))(projected, qkv, num_warps=4, **sizes, **self.launch)

    def close_gates(self, projected: torch.Tensor, heads: HeadShape, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        sizes = {"HEADS": heads.heads, "KV": heads.kv_heads, "D": heads.head_dim, "BLOCK": 1024, "PDL": self.device.early}
        on_grid(close_gates, (qkv.shape[0], -(-heads.queries // 1024)))(projected, mixed, num_warps=4, **sizes, **self.launch)

    def fuses_attention(self, heads: HeadShape) -> bool:
        """Whether it runs in fused kernels; what does not is told of once."""
        group = heads.heads // heads.kv_heads
        if heads.head_dim in (64, 128, 256) and group <= GROUP:
            return True
        self.tell(f"attention with {group} queries of {heads.head_dim} to a key")
        return False

    def _room_for(self, name: str, dtype: torch.dtype, like: torch.Tensor, held: bool, size: int) -> torch.Tensor:
        """Numbers between two kernels: of what a graph may hold at the same address every time."""
        return self.kept(name, dtype, like, size) if held else torch.empty(size, dtype=dtype, device=like.device)

    def _place(self, heads: AttentionHeads, at: AttentionRows) -> None:
        shape = heads.shape
        on_grid(place_turned, (at.qkv.shape[0], shape.heads + 2 * shape.kv_heads))(
            *_placing(heads, at), _ahead(at.rows), HEADS=shape.heads, KV=shape.kv_heads, D=shape.head_dim,
            HALF=heads.rotary.cos.shape[1], PDL=self.device.early, num_warps=1, **self.launch,
        )  # fmt: skip

    def _attend_places(
        self, at: AttentionRows, forms: dict[str, Any], chosen: torch.Tensor, lengths: torch.Tensor, ratio: int, most: int
    ) -> torch.Tensor:
        """Rows of queries that are turned, over the cache that has their keys."""
        count, rows, room = at.qkv.shape[0], at.rows, self.room
        splits = SPLITS[power(count)] if count <= FEW_ROWS else 1
        on_grid(attend_places, (count, forms["KV"], splits))(
            at.qkv, at.keys, at.values, rows.positions, rows.tables, _ahead(rows), chosen, lengths, room.heads,
            *room.heads_scores, at.out, SPLITS=splits, RATIO=ratio, MOST=most, PDL=self.device.early, num_warps=4, **forms, **self.launch,
        )  # fmt: skip
        return at.out if splits == 1 else self._join(lengths, at.out, forms, splits, 0 if ratio else 1)

    def _attend_rows(self, at: AttentionRows, forms: dict[str, Any]) -> torch.Tensor:
        """As `_attend_places` a few rows of one sequence, over all that each sees."""
        count, rows, room = at.qkv.shape[0], at.rows, self.room
        tiles = -(-count // (GROUP // forms["GP"]))
        splits = min(SPLITS[power(tiles)], UNITS // power(count))
        on_grid(attend_rows, (tiles, forms["KV"], splits))(
            at.qkv, at.keys, at.values, rows.positions, rows.tables, room.heads, *room.heads_scores, at.out, count,
            SPLITS=splits, PDL=self.device.early, num_warps=4, **forms, **self.launch,
        )  # fmt: skip
        return self._join(rows.positions[count - 1 :], at.out, forms, splits, 1, together=True)

    def _join(
        self, lengths: torch.Tensor, out: torch.Tensor, forms: dict[str, Any], splits: int, more: int, *, together: bool = False
    ) -> torch.Tensor:
        wide = splits * forms["GP"] * forms["D"] > JOINED
        columns = JOINED_COLUMNS if wide else forms["D"]
        on_grid(join_splits, (out.shape[0], forms["KV"], forms["D"] // columns))(
            lengths, self.room.heads, *self.room.heads_scores, out, SPLITS=splits, MORE=more, COLUMNS=columns, TOGETHER=together,
            PDL=self.device.early, num_warps=4, **forms, **self.launch,
        )  # fmt: skip
        return out

    @staticmethod
    def _attend_chunk(at: AttentionRows, forms: dict[str, Any]) -> torch.Tensor:
        count, narrow = at.qkv.shape[0], forms["D"] <= 128
        tile = 128 if count * forms["GP"] > 64 and narrow else 64
        on_grid(attend_chunk, (-(-count * forms["GP"] // tile), forms["KV"]))(
            at.qkv,
            at.keys,
            at.values,
            at.rows.tables,
            at.out,
            at.rows.start,
            count,
            BM=tile,
            BN=64 if narrow else 32,
            STAGES=2,
            num_warps=tile // 16,
            **forms,
        )
        return at.out


def _held(rows: Rows) -> bool:
    """Whether a graph may hold the pass: then nothing that the host knows of its places may decide anything, for they are others later."""
    return rows.positions.shape[0] <= FEW_ROWS


def _ahead(rows: Rows) -> int:
    """How far apart the tables of two rows lie."""
    return rows.tables.stride(0) if rows.start is None else 0


def _placing(heads: AttentionHeads, at: AttentionRows) -> tuple[Any, ...]:
    """What kernels that norm, turn and write rows begin with."""
    q_norm, k_norm, rotary, rows = heads.q_norm, heads.k_norm, heads.rotary, at.rows
    if q_norm is None or k_norm is None:
        raise ValueError("fused attention norms queries and keys")
    norms = q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps
    return at.qkv, *norms, rotary.cos, rotary.sin, at.keys, at.values, rows.positions, rows.rotary_rows, rows.tables


def _forms(heads: HeadShape) -> dict[str, Any]:
    return {"HEADS": heads.heads, "KV": heads.kv_heads, "D": heads.head_dim, "GP": power(heads.heads // heads.kv_heads)}
