"""Attention's fused CUDA kernels against plain arithmetic in fp32: cases for cuda_timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..service.kernels.cuda.sdpa_kernels import CudaKernels
from ..service.kernels.forward_batch import (
    BLOCK,
    FEW_ROWS,
    HeadShape,
    RotaryTable,
    Rows,
    Slots,
)
from ..service.kernels.operands import AttentionHeads, AttentionRows, IndexedRows, Indexer
from ..service.kernels.reference import ReferenceKernels
from .cuda_cases import BOUNDS, Finding, Maker, apart

CONTEXT = 1024
# Lengths before a decode step, one a sequence; and where a chunk begins and how long it is.
STEPS: Sequence[Sequence[int]] = ([0], [1], [255], [1023], [5, 700], [31, 32, 33, 64], [0, 9, 99, 999, 1, 500, 1023, 640])
CHUNKS: Sequence[tuple[int, int]] = ((0, 7), (0, 300), (37, 5), (500, 129))
# Where a few rows of one sequence begin, and how many: at the beginning, over the borders of blocks and stretches, beyond the budget.
FEW: Sequence[tuple[int, int]] = ((0, 2), (1, 3), (29, 8), (254, 5), (511, 2), (777, 8), (1016, 8))
# Of each: a state behind every row; one state, in another slot than it was found in; one, in the same slot.
KINDS = ("trail", "few", "same")
# What a graph that was captured elsewhere says of where rows begin.
ELSEWHERE = 1_000_000
# Those of a network that looks at chosen stretches only; its indexer's heads, width, budget and ratio.
INDEXED_STEPS: Sequence[Sequence[int]] = ([0], [3, 66], [255, 258, 259, 1000], [1023])
INDEXED_CHUNKS: Sequence[tuple[int, int]] = ((0, 250), (253, 9), (301, 500))
INDEXER = (4, 128, 256, 4)


def rotary_table(make: Maker, turned: int) -> RotaryTable:
    """Angles of CONTEXT places for heads of which `turned` numbers are turned."""
    angles = torch.arange(CONTEXT, device=make.device)[:, None] / 1e6 ** (torch.arange(0, turned, 2, device=make.device) / turned)
    return RotaryTable(angles.cos(), angles.sin())


def _rows(make: Maker, lengths: Sequence[int], kind: str = "") -> Rows:
    """A step behind sequences of these lengths, or where they are a tuple a chunk, in scattered blocks and slots.

    `kind`: of a few rows "trail", else whether the slot that a chunk is found in is the one that it leaves its state in ("same").
    """
    chunk, table = isinstance(lengths, tuple), CONTEXT // BLOCK
    sequences = 1 if chunk else len(lengths)
    blocks = torch.randperm(sequences * table, device=make.device).view(sequences, table).int()
    positions = torch.arange(lengths[0], sum(lengths)) if chunk else torch.tensor(lengths)
    slots = torch.randperm(FEW_ROWS + 1, device=make.device)
    if kind == "trail":
        places = Slots(slots[: lengths[1]], slots[1 : lengths[1] + 1])
    elif chunk:
        places = Slots(slots[:1], slots[:1] if kind == "same" else slots[1:2])
    else:
        places = Slots(slots[:sequences], slots[:sequences])
    return Rows(positions.int().to(make.device), blocks, lengths[0] if chunk else None, CONTEXT, places, trail=kind == "trail")


def _elsewhere(rows: Rows) -> Rows:
    """As a graph of the pass has it, which was captured at another place: of a few rows the host's numbers are wrong."""
    few = rows.start is not None and len(rows.positions) <= FEW_ROWS
    return replace(rows, start=ELSEWHERE, longest=0) if few else rows


def _layer(make: Maker, heads: HeadShape, turned: int) -> AttentionHeads:
    return AttentionHeads(heads, make.norm(heads.head_dim), make.norm(heads.head_dim), rotary_table(make, turned))


def attention_findings(kernels: CudaKernels, make: Maker, heads: HeadShape, turned: int) -> Iterator[Finding]:
    """Decode steps of several batches and lengths, and chunks and a few rows at several places."""
    layer = _layer(make, heads, turned)
    for lengths in [*STEPS, *CHUNKS, *FEW]:
        rows = _rows(make, lengths)
        count = len(rows.positions)
        keys, values = (make.rows(rows.tables.numel(), heads.kv_heads, BLOCK, heads.head_dim) for _ in range(2))
        qkv, wide_keys, wide_values = make.rows(count, heads.qkv), keys.float(), values.float()
        wide = AttentionRows(qkv.float(), wide_keys, wide_values, rows, torch.empty(count, heads.queries, device=make.device))
        truth = ReferenceKernels().attend(layer, wide)
        found = kernels.attend(layer, AttentionRows(qkv, keys, values, _elsewhere(rows), make.empty(count, heads.queries)))
        form = f"{heads.heads}/{heads.kv_heads} of {turned}/{heads.head_dim}, {'step' if rows.start is None else 'chunk'} {lengths}"
        bound = 2 * BOUNDS[make.activation]
        yield Finding("attend", form, apart(found, truth), bound)
        yield Finding("attend, cache", form, max(apart(keys, wide_keys), apart(values, wide_values)), bound)


def gate_findings(kernels: CudaKernels, make: Maker, heads: HeadShape) -> Iterator[Finding]:
    """Gates beside queries, parted from them and closed."""
    for count in (1, 3, 70):
        projected, mixed = make.rows(count, heads.queries + heads.qkv), make.rows(count, heads.queries)
        ours, truth = make.empty(count, heads.qkv), torch.empty(count, heads.qkv, device=make.device)
        kernels.part_gates(projected, heads, ours, mixed)
        ReferenceKernels().part_gates(projected.float(), heads, truth, mixed)
        yield Finding("part_gates", f"rows {count}", apart(ours, truth), 0.0)
        wide = mixed.float()
        kernels.close_gates(projected, heads, ours, mixed)
        ReferenceKernels().close_gates(projected.float(), heads, truth, wide)
        yield Finding("close_gates", f"rows {count}", apart(mixed, wide), BOUNDS[make.activation])


def indexed_findings(kernels: CudaKernels, make: Maker, heads: HeadShape, turned: int) -> Iterator[Finding]:
    """Steps, chunks, a few rows: that choose, or see no more than they may; in every second one all stretches are worth the same."""
    indexer = Indexer(*INDEXER, make.norm(INDEXER[1]), make.norm(INDEXER[1]))
    layer = _layer(make, heads, turned)
    rotary = layer.rotary
    cases = [*((lengths, "") for lengths in [*INDEXED_STEPS, *INDEXED_CHUNKS]), *((few, kind) for few in FEW for kind in KINDS)]
    for turn, (lengths, kind) in enumerate(cases):
        rows = _rows(make, lengths, kind)
        count, sequences, table = len(rows.positions), *rows.tables.shape
        raw = make.rows(sequences, CONTEXT, indexer.dim)
        pooled = _pooled(raw, indexer, rotary)
        firsts = rows.positions.tolist() if rows.start is None else [rows.start]
        per = BLOCK // indexer.ratio
        held = torch.full((sequences * table, per, indexer.dim), float("nan"), device=make.device)
        tails = torch.full((FEW_ROWS + 1, indexer.ratio - 1, indexer.dim), float("nan"), device=make.device)
        slots = rows.slots or Slots(rows.positions, rows.positions)
        for sequence, first in enumerate(firsts):
            full, block = first // indexer.ratio, rows.tables[sequence].long()
            for stretch in range(full):
                held[block[stretch // per], stretch % per] = pooled[sequence, stretch]
            tails[slots.source[sequence], : first % indexer.ratio] = raw[sequence, full * indexer.ratio : first].float()
        queries = make.rows(count, indexer.heads * indexer.dim) * float(turn % 2 == 0)
        sequence_of = torch.arange(count, device=make.device) * (rows.start is None)
        indexed = torch.cat((queries, raw[sequence_of, rows.positions.long()]), dim=1)
        keys, values = (make.rows(rows.tables.numel(), heads.kv_heads, BLOCK, heads.head_dim) for _ in range(2))
        qkv, out, wide_keys, wide_values = make.rows(count, heads.qkv), make.empty(count, heads.queries), keys.float(), values.float()
        turned_queries = ReferenceKernels().place(layer, AttentionRows(qkv.float(), wide_keys, wide_values, rows, out))
        asked = queries.float().view(count, indexer.heads, indexer.dim)
        ReferenceKernels().rms_norm(asked, indexer.q_norm, asked)
        ReferenceKernels().rotate(asked, rotary.cos[rows.positions], rotary.sin[rows.positions])
        truth = torch.empty(count, heads.heads, heads.head_dim, device=make.device)
        for row, place in enumerate(rows.positions.tolist()):
            sequence = int(sequence_of[row])
            tokens = _chosen(asked[row], pooled[sequence], place + 1, indexer)
            blocks, at = rows.tables[sequence][tokens // BLOCK].long(), tokens % BLOCK
            k, v = (part[blocks, :, at].transpose(0, 1) for part in (wide_keys, wide_values))
            ReferenceKernels().attention(turned_queries[row][None], k, v, len(tokens) - 1, truth[row][None])
        own = AttentionRows(qkv, keys, values, _elsewhere(rows), out)
        done = kernels.attend_indexed(layer, own, indexer, IndexedRows(indexed, tails, held))
        form = f"{heads.heads}/{heads.kv_heads} of {turned}/{heads.head_dim}, {'step' if rows.start is None else kind or 'chunk'} {lengths}"
        bound = 2 * BOUNDS[make.activation]
        yield Finding("attend_indexed", form, apart(out, truth.flatten(1)) if done else float("inf"), bound)
        ends = [first + 1 for first in firsts] if rows.start is None else [rows.start + count]
        if rows.trail:
            ends = [place + 1 for place in rows.positions.tolist()]
        for row, end in enumerate(ends):
            sequence = 0 if rows.trail else row
            full, block = end // indexer.ratio, rows.tables[sequence].long()
            stretches = torch.arange(full, device=make.device)
            found = held[block[stretches // per], stretches % per]
            tail = tails[slots.target[row], : end % indexer.ratio]
            errors = (apart(found, pooled[sequence, :full]), apart(tail, raw[sequence, full * indexer.ratio : end]))
            yield Finding("attend_indexed, kept", form, max(errors), 1e-5)


def _pooled(raw: torch.Tensor, indexer: Indexer, rotary: RotaryTable) -> torch.Tensor:
    """Mean keys of all stretches [S, stretches, dim], normed and turned to the place of their first token."""
    means = raw.float().view(raw.shape[0], -1, indexer.ratio, indexer.dim).mean(2)
    kernels, firsts = ReferenceKernels(), slice(0, None, indexer.ratio)
    for sequence in means:
        kernels.rms_norm(sequence, indexer.k_norm, sequence)
        kernels.rotate(sequence[:, None], rotary.cos[firsts], rotary.sin[firsts])
    return means


def _chosen(asked: torch.Tensor, pooled: torch.Tensor, length: int, indexer: Indexer) -> torch.Tensor:
    """The places that a row attends to, of equal stretches the first taken."""
    full = length // indexer.ratio
    scores = (asked @ pooled[:full].t()).relu().sum(0)
    best = scores.sort(descending=True, stable=True).indices[: indexer.budget // indexer.ratio].sort().values
    inside = (best[:, None] * indexer.ratio + torch.arange(indexer.ratio, device=best.device)).view(-1)
    return torch.cat((inside, torch.arange(full * indexer.ratio, length, device=best.device)))
