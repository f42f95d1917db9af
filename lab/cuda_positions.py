"""The fused CUDA kernels of attention against plain fp32 arithmetic: cases for cuda_timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..service.kernels.cuda.sdpa_kernels import CudaKernels
from ..service.kernels.forward_batch import (
    BLOCK,
    FEW_ROWS,
    DecodeBatch,
    ForwardBatch,
    HeadShape,
    PrefillChunk,
    RotaryTable,
    Slots,
    VerifyPass,
)
from ..service.kernels.operands import AttentionHeads, AttentionOperands, Indexer, IndexerOperands
from ..service.kernels.reference import ReferenceKernels
from .cuda_cases import BOUNDS, Finding, Maker, apart

CONTEXT = 1024
# Lengths before a decode step, one per sequence; and start and length of a chunk.
STEPS: Sequence[Sequence[int]] = (
    [0],
    [1],
    [255],
    [1023],
    [5, 700],
    [31, 32, 33, 64],
    [0, 9, 99, 999, 1, 500, 1023, 640],
)
# Rows beyond those of a chunk, as a graph has them.
PADDING = 3
CHUNKS: Sequence[tuple[int, int]] = ((0, 7), (0, 300), (37, 5), (500, 129))
# Start and length of a few rows of one sequence: at the start, across boundaries of KV and key blocks, beyond the
# budget.
FEW: Sequence[tuple[int, int]] = ((0, 2), (1, 3), (29, 8), (254, 5), (511, 2), (777, 8), (1016, 8))
# Each with a state after every row; with one state in another slot than it came from; with one state in the same slot.
KINDS = ("verify", "few", "same")
# The start that a graph captured at another position would state.
ELSEWHERE = 1_000_000
# For a network that selects key blocks; heads, width, budget and ratio of its indexer.
INDEXED_STEPS: Sequence[Sequence[int]] = ([0], [3, 66], [255, 258, 259, 1000], [1023])
INDEXED_CHUNKS: Sequence[tuple[int, int]] = ((0, 250), (253, 9), (301, 500))
INDEXER = (4, 128, 256, 4)


def rotary_table(make: Maker, rotated: int) -> RotaryTable:
    """Angles of CONTEXT positions for heads of which `rotated` numbers are rotated."""
    angles = torch.arange(CONTEXT, device=make.device)[:, None] / 1e6 ** (
        torch.arange(0, rotated, 2, device=make.device) / rotated
    )
    return RotaryTable(angles.cos(), angles.sin())


def _batch(make: Maker, lengths: Sequence[int], kind: str = "") -> ForwardBatch:
    """A step after sequences of these lengths, or for a tuple a chunk, in scattered blocks and slots.

    `kind`: "verify" for a few rows, otherwise whether a chunk leaves its state in the slot that it came from ("same").
    """
    chunk, table = isinstance(lengths, tuple), CONTEXT // BLOCK
    sequences = 1 if chunk else len(lengths)
    blocks = torch.randperm(sequences * table, device=make.device).view(sequences, table).int()
    positions = torch.arange(lengths[0], sum(lengths)) if chunk else torch.tensor(lengths)
    slots = torch.randperm(FEW_ROWS + 1, device=make.device)
    if kind == "verify":
        slot_pair = Slots(slots[: lengths[1]], slots[1 : lengths[1] + 1])
    elif chunk:
        slot_pair = Slots(slots[:1], slots[:1] if kind == "same" else slots[1:2])
    else:
        slot_pair = Slots(slots[:sequences], slots[:sequences])
    where = positions.int().to(make.device), blocks, CONTEXT, slot_pair
    if not chunk:
        return DecodeBatch(*where)
    return (VerifyPass if kind == "verify" else PrefillChunk)(*where, start=lengths[0])


def _elsewhere(batch: ForwardBatch) -> ForwardBatch:
    """The batch as a graph captured at another position has it: for a few rows the host's numbers are wrong."""
    few = isinstance(batch, PrefillChunk) and len(batch.positions) <= FEW_ROWS
    return replace(batch, start=ELSEWHERE, longest=0) if few else batch


def _ends_repeated(rows: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat([rows, rows[-1:].expand(more, -1)])


def _padded(batch: PrefillChunk, rows: int) -> ForwardBatch:
    """The chunk as a graph of so many rows has it: the last one repeated, and the host's numbers wrong."""
    positions = batch.positions[torch.arange(rows, device=batch.positions.device).clamp(max=len(batch.positions) - 1)]
    return replace(batch, positions=positions, start=ELSEWHERE, longest=0)


def _layer(make: Maker, heads: HeadShape, rotated: int) -> AttentionHeads:
    return AttentionHeads(heads, make.norm(heads.head_dim), make.norm(heads.head_dim), rotary_table(make, rotated))


def _form(heads: HeadShape, rotated: int, mode: str, lengths: Sequence[int]) -> str:
    return f"{heads.heads}/{heads.kv_heads} of {rotated}/{heads.head_dim}, {mode} {lengths}"


def attention_findings(kernels: CudaKernels, make: Maker, heads: HeadShape, rotated: int) -> Iterator[Finding]:
    """Decode steps of several batches and lengths, and chunks and a few rows at several positions."""
    from ..service.kernels.cuda.cuda_attention import AttentionKernels

    layer = _layer(make, heads, rotated)
    fused = isinstance(kernels, AttentionKernels) and kernels.fuses_attention(heads)
    for lengths in [*STEPS, *CHUNKS, *FEW]:
        batch = _batch(make, lengths)
        count = len(batch.positions)
        keys, values = (make.rows(batch.tables.numel(), heads.kv_heads, BLOCK, heads.head_dim) for _ in range(2))
        qkv, wide_keys, wide_values = make.rows(count, heads.qkv), keys.float(), values.float()
        wide = AttentionOperands(
            qkv.float(), wide_keys, wide_values, batch, torch.empty(count, heads.queries, device=make.device)
        )
        truth = ReferenceKernels().attend(layer, wide)
        given = qkv.clone()
        found = kernels.attend(
            layer, AttentionOperands(qkv, keys, values, _elsewhere(batch), make.empty(count, heads.queries))
        )
        form = _form(heads, rotated, "chunk" if batch.one_sequence else "step", lengths)
        bound = 2 * BOUNDS[make.activation]
        yield Finding("attend", form, apart(found, truth), bound)
        yield Finding("attend, cache", form, max(apart(keys, wide_keys), apart(values, wide_values)), bound)
        if isinstance(batch, PrefillChunk) and count > FEW_ROWS and fused:
            padded, wanted = _padded(batch, count + PADDING), _ends_repeated(truth, PADDING)
            qkv, out = _ends_repeated(given, PADDING), make.empty(count + PADDING, heads.queries)
            found = kernels.attend(layer, AttentionOperands(qkv, keys, values, padded, out))
            yield Finding("attend, padded", form, apart(found, wanted), bound)


def gate_findings(kernels: CudaKernels, make: Maker, heads: HeadShape) -> Iterator[Finding]:
    """Gates next to queries, split off and applied."""
    for count in (1, 3, 70):
        projected, mixed = make.rows(count, heads.queries + heads.qkv), make.rows(count, heads.queries)
        ours, truth = make.empty(count, heads.qkv), torch.empty(count, heads.qkv, device=make.device)
        kernels.split_gates(projected, heads, ours, mixed)
        ReferenceKernels().split_gates(projected.float(), heads, truth, mixed)
        yield Finding("split_gates", f"rows {count}", apart(ours, truth), 0.0)
        wide = mixed.float()
        kernels.apply_gates(projected, heads, ours, mixed)
        ReferenceKernels().apply_gates(projected.float(), heads, truth, wide)
        yield Finding("apply_gates", f"rows {count}", apart(mixed, wide), BOUNDS[make.activation])


def indexed_findings(kernels: CudaKernels, make: Maker, heads: HeadShape, rotated: int) -> Iterator[Finding]:
    """Steps, chunks and a few rows, with and without a selection. In every second case all key blocks have the same
    score.
    """
    indexer = Indexer(*INDEXER, make.norm(INDEXER[1]), make.norm(INDEXER[1]))
    layer = _layer(make, heads, rotated)
    rotary = layer.rotary
    cases = [
        *((lengths, "") for lengths in [*INDEXED_STEPS, *INDEXED_CHUNKS]),
        *((few, kind) for few in FEW for kind in KINDS),
    ]
    for turn, (lengths, kind) in enumerate(cases):
        batch = _batch(make, lengths, kind)
        count, sequences, table = len(batch.positions), *batch.tables.shape
        raw = make.rows(sequences, CONTEXT, indexer.dim)
        pooled = _pooled(raw, indexer, rotary)
        firsts = batch.positions.tolist()[: 1 if batch.one_sequence else None]
        per = BLOCK // indexer.ratio
        held = torch.full((sequences * table, per, indexer.dim), float("nan"), device=make.device)
        tails = torch.full((FEW_ROWS + 1, indexer.ratio - 1, indexer.dim), float("nan"), device=make.device)
        slots = batch.slots or Slots(batch.positions, batch.positions)
        for sequence, first in enumerate(firsts):
            full, block = first // indexer.ratio, batch.tables[sequence].long()
            for key_block in range(full):
                held[block[key_block // per], key_block % per] = pooled[sequence, key_block]
            tails[slots.source[sequence], : first % indexer.ratio] = raw[sequence, full * indexer.ratio : first].float()
        queries = make.rows(count, indexer.heads * indexer.dim) * float(turn % 2 == 0)
        sequence_of = torch.arange(count, device=make.device) * (not batch.one_sequence)
        indexed = torch.cat((queries, raw[sequence_of, batch.positions.long()]), dim=1)
        keys, values = (make.rows(batch.tables.numel(), heads.kv_heads, BLOCK, heads.head_dim) for _ in range(2))
        qkv, out, wide_keys, wide_values = (
            make.rows(count, heads.qkv),
            make.empty(count, heads.queries),
            keys.float(),
            values.float(),
        )
        turned_queries = ReferenceKernels().rotate_and_store(
            layer, AttentionOperands(qkv.float(), wide_keys, wide_values, batch, out)
        )
        asked = queries.float().view(count, indexer.heads, indexer.dim)
        ReferenceKernels().rms_norm(asked, indexer.q_norm, asked)
        ReferenceKernels().rotate(asked, rotary.cos[batch.positions], rotary.sin[batch.positions])
        truth = torch.empty(count, heads.heads, heads.head_dim, device=make.device)
        for row, position in enumerate(batch.positions.tolist()):
            sequence = int(sequence_of[row])
            tokens = _chosen(asked[row], pooled[sequence], position + 1, indexer)
            blocks, at = batch.tables[sequence][tokens // BLOCK].long(), tokens % BLOCK
            k, v = (part[blocks, :, at].transpose(0, 1) for part in (wide_keys, wide_values))
            ReferenceKernels().attention(turned_queries[row][None], k, v, len(tokens) - 1, truth[row][None])
        own = AttentionOperands(qkv, keys, values, _elsewhere(batch), out)
        done = kernels.attend_indexed(layer, own, indexer, IndexerOperands(indexed, tails, held))
        form = _form(heads, rotated, (kind or "chunk") if batch.one_sequence else "step", lengths)
        bound = 2 * BOUNDS[make.activation]
        yield Finding("attend_indexed", form, apart(out, truth.flatten(1)) if done else float("inf"), bound)
        ends = [position + 1 for position in batch.positions.tolist()]
        if not batch.state_per_row:
            ends = ends[-1:]
        for row, end in enumerate(ends):
            sequence = 0 if batch.one_sequence else row
            full, block = end // indexer.ratio, batch.tables[sequence].long()
            full_blocks = torch.arange(full, device=make.device)
            found = held[block[full_blocks // per], full_blocks % per]
            tail = tails[slots.target[row], : end % indexer.ratio]
            errors = (apart(found, pooled[sequence, :full]), apart(tail, raw[sequence, full * indexer.ratio : end]))
            yield Finding("attend_indexed, kept", form, max(errors), 1e-5)


def _pooled(raw: torch.Tensor, indexer: Indexer, rotary: RotaryTable) -> torch.Tensor:
    """Mean keys of all key blocks [S, key blocks, dim], normed and rotated to the position of their first token."""
    means = raw.float().view(raw.shape[0], -1, indexer.ratio, indexer.dim).mean(2)
    kernels, firsts = ReferenceKernels(), slice(0, None, indexer.ratio)
    for sequence in means:
        kernels.rms_norm(sequence, indexer.k_norm, sequence)
        kernels.rotate(sequence[:, None], rotary.cos[firsts], rotary.sin[firsts])
    return means


def _chosen(asked: torch.Tensor, pooled: torch.Tensor, length: int, indexer: Indexer) -> torch.Tensor:
    """The positions that a row attends to; the first of equal key blocks are selected."""
    full = length // indexer.ratio
    scores = (asked @ pooled[:full].t()).relu().sum(0)
    best = scores.sort(descending=True, stable=True).indices[: indexer.budget // indexer.ratio].sort().values
    inside = (best[:, None] * indexer.ratio + torch.arange(indexer.ratio, device=best.device)).view(-1)
    return torch.cat((inside, torch.arange(full * indexer.ratio, length, device=best.device)))
