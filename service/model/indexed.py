"""Sparse gated attention (QSA): an indexer scores blocks of tokens by their mean key, and only the best are attended
to.

A row attends to its best blocks and to the tokens after the last full block. A row that sees no more tokens than the
budget attends to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels.forward_batch import BLOCK, RotaryTable, VerifyPass
from ..kernels.operands import Indexer, IndexerOperands, LayerPart
from ..quant.weight import Weight
from .attention import GatedAttention, heads
from .layers import Pass
from .named import NamedWeights
from .shape import DecoderConfig, IndexerShape
from .spec import Destination, Source


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The indexer's tensors, in addition to attention's; its queries and its one key are one matrix."""
    shape, key, part, name = _shape(config), f"{layer}.", layer + 1, f"model.layers.{layer}.self_attn.indexer."
    matrix = Source(name + "index_qk_proj.weight", ((shape.heads + 1) * shape.dim, config.widths.hidden))
    yield Destination(key + "indexer", (matrix,), part, bits=8)
    for which in ("q", "k"):
        norm = Source(f"{name}{which}_layernorm.weight", (shape.dim,))
        yield Destination(f"{key}indexer_{which}_norm", (norm,), part, wide=True, turn="plus_one")


def build(
    config: DecoderConfig, weights: NamedWeights, layer: int, indices: tuple[int, int], rotary: RotaryTable
) -> IndexedAttention:
    """The layer over its weights. `indices`: its number among the layers with keys and values and among those that
    store states.
    """
    at, shape = weights.of(layer), _shape(config)
    norms = (at.norm(f"indexer_{which}_norm", config.eps) for which in ("q", "k"))
    return IndexedAttention(
        heads=heads(config, at, rotary),
        index=indices[0],
        norm=None if config.streams else at.norm("attention_norm", config.eps),
        qkv=at["qkv"],
        output=at["output"],
        indexer=Indexer(shape.heads, shape.dim, shape.budget, shape.ratio, *norms),
        state=indices[1],
        index_qk=at["indexer"],
    )


def _shape(config: DecoderConfig) -> IndexerShape:
    if config.indexer is None:
        raise ValueError("the family has no indexer")
    return config.indexer


@dataclass(slots=True, kw_only=True)
class IndexedAttention(GatedAttention):
    """index_qk [(heads + 1) * dim, hidden]: the indexer's queries, then its key. `state`: the state index of the raw
    keys of the block that is not full yet.
    """

    indexer: Indexer
    state: int
    index_qk: Weight

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.qkv, self.output, self.index_qk, self.heads

    def _attend(self, at: Pass, qkv: torch.Tensor, mixed: torch.Tensor) -> None:
        shape, states, slots, batch = self.indexer, at.cache.states, at.batch.slots, at.batch
        if states is None or slots is None:
            raise ValueError("the session's cache has no recurrent states")
        indexed = at.views["indexed"]
        at.project(self.norm, self.index_qk, indexed)
        own = self._rows(at, qkv, mixed)
        if at.kernels.attend_indexed(
            self.heads,
            own,
            shape,
            IndexerOperands(indexed, states.of_layer(self.state)[0], at.cache.pooled[self.index]),
        ):
            return
        keys = indexed[:, shape.heads * shape.dim :].float()
        positions = batch.positions.tolist()
        pieces = [(0, len(positions))] if batch.one_sequence else [(row, row + 1) for row in range(len(positions))]
        # In a VerifyPass each row continues from the tail that the row before it stored.
        verify = isinstance(batch, VerifyPass)
        for row, (first, last) in enumerate([(row, row + 1) for row in range(len(positions))] if verify else pieces):
            slot = slots.part(slice(row, row + 1))
            tails = states.read(self.state, slot.source)[0]
            self._pool(at, keys[first:last], tails[0], 0 if verify else row, (positions[first], first))
            states.write(self.state, slot.target, (tails,))
        if max(positions) < shape.budget + shape.ratio - 1:
            at.kernels.attend(self.heads, own)
            return
        chosen = self._chosen(at, indexed, pieces, positions)
        queries = at.kernels.rotate_and_store(self.heads, own)
        found = mixed.view(queries.shape)
        for sequence, (first, last) in enumerate(pieces):
            for row in range(first, last):
                self._attend_to(at, queries[row], self._tokens(chosen[row], positions[row] + 1), sequence, found[row])

    def _chosen(
        self, at: Pass, indexed: torch.Tensor, pieces: list[tuple[int, int]], positions: list[int]
    ) -> torch.Tensor:
        """Indices of the best blocks per row, ascending, padded with -1: int64 [T, most]."""
        shape, batch, rotary, count = self.indexer, at.batch, self.heads.rotary, len(positions)
        wanted = indexed[:, : shape.heads * shape.dim].float().view(count, shape.heads, shape.dim)
        at.kernels.rms_norm(wanted, shape.q_norm, wanted)
        at.kernels.rotate(wanted, rotary.cos[batch.rotary_rows], rotary.sin[batch.rotary_rows])
        chosen = torch.full((count, shape.budget // shape.ratio), -1, dtype=torch.int64, device=indexed.device)
        for sequence, (first, last) in enumerate(pieces):
            scored = at.cache.pooled[self.index][batch.tables[sequence].long()].flatten(0, 1)
            for row in range(first, last):
                full = (positions[row] + 1) // shape.ratio
                scores = (wanted[row] @ scored[:full].t()).relu_().sum(0)
                best = scores.topk(min(chosen.shape[1], full)).indices
                chosen[row, : len(best)] = best.sort().values
        return chosen

    def _pool(self, at: Pass, keys: torch.Tensor, tail: torch.Tensor, sequence: int, begin: tuple[int, int]) -> None:
        """Add raw keys [T, dim]. The mean of each full block is stored, normed and rotated to its first token's
        position.

        `begin`: the first key's index in the sequence and in the pass. tail [ratio - 1, dim] holds the raw keys of the
        block that is not full, and is changed.
        """
        start, row = begin
        shape, rotary, waiting = self.indexer, self.heads.rotary, start % self.indexer.ratio
        raw = torch.cat((tail[:waiting], keys))
        full = len(raw) // shape.ratio
        left = raw[full * shape.ratio :]
        tail[: len(left)] = left
        if not full:
            return
        pooled = raw[: full * shape.ratio].view(full, 1, shape.ratio, shape.dim).mean(2)
        firsts = torch.arange(full, device=keys.device) * shape.ratio + (start - waiting)
        at.kernels.rms_norm(pooled, shape.k_norm, pooled)
        lasts = row + shape.ratio - 1 - waiting + torch.arange(full, device=keys.device) * shape.ratio
        turns = (
            at.batch.rotary_rows[lasts] - (shape.ratio - 1)
            if at.batch.first_turns is None
            else at.batch.first_turns[lasts]
        )
        at.kernels.rotate(pooled, rotary.cos[turns], rotary.sin[turns])
        blocks = at.batch.tables[sequence][firsts // BLOCK].long()
        at.cache.pooled[self.index][blocks, firsts % BLOCK // shape.ratio] = pooled[:, 0]

    def _tokens(self, chosen: torch.Tensor, length: int) -> torch.Tensor:
        """The positions that a row attends to, of the `length` that it sees: its chosen blocks, and those after the
        last full block.
        """
        ratio, blocks = self.indexer.ratio, chosen[chosen >= 0]
        inside = (blocks[:, None] * ratio + torch.arange(ratio, device=blocks.device)).view(-1)
        return torch.cat((inside, torch.arange(length // ratio * ratio, length, device=blocks.device)))

    def _attend_to(self, at: Pass, query: torch.Tensor, tokens: torch.Tensor, sequence: int, out: torch.Tensor) -> None:
        """out [heads, head_dim]: one row's queries over the positions `tokens` of its sequence."""
        blocks, slots = at.batch.tables[sequence][tokens // BLOCK].long(), tokens % BLOCK
        keys, values = (part[self.index][blocks, :, slots].transpose(0, 1) for part in (at.cache.keys, at.cache.values))
        at.kernels.attention(query[None], keys, values, len(tokens) - 1, out[None])
