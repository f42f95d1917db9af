"""The structures of what the C takes in one call: filled in from a layer's parts; None where it has nothing for them."""

from __future__ import annotations

import ctypes

import torch

from ..delta import DeltaHeads, DeltaStep
from ..forward_batch import HeadShape, NormWeight
from ..operands import (
    AttentionHeads,
    AttentionRows,
    ExpertRows,
    ExpertWeights,
    IndexedRows,
    Indexer,
    JointRows,
    NgramRows,
    NgramWeights,
    StreamJoint,
)
from .captured_calls import Call, Calls, plain_rows
from .cpu_limits import HEAD_STEP, MOST_ACTIVE, STREAM_STEP, fits, fits_delta
from .native import (
    ADD,
    GATE,
    STORE,
    Attention,
    Delta,
    Gates,
    Indexed,
    Injection,
    Joint,
    Ngram,
    Norm,
    SparseExperts,
    StoredWeight,
)

# A score of a stretch and its number, see calls.h.
SCORED_BYTES = 8


def attention(calls: Calls, heads: AttentionHeads, at: AttentionRows) -> Attention | None:
    """Of attend_rows and attend_chunk; holds addresses, not tensors."""
    shape, rotary, keys, values, rows = heads.shape, heads.rotary, at.keys, at.values, at.rows
    ready = plain_rows(at.qkv) and plain_rows(at.out) and keys.dtype == values.dtype == torch.float32
    if not ready or not fits(shape, calls.native.attention_width):
        return None
    a = Attention(half=rotary.cos.shape[1], block_ahead=keys.stride(0), threads=calls.threads)
    a.keys, a.values = keys.data_ptr(), values.data_ptr()
    if heads.q_norm is not None and heads.k_norm is not None:
        a.q_norm, a.q_eps = heads.q_norm.weight.data_ptr(), heads.q_norm.eps
        a.k_norm, a.k_eps = heads.k_norm.weight.data_ptr(), heads.k_norm.eps
    if heads.bias is not None:
        a.bias = heads.bias.data_ptr()
    a.cos, a.sin, a.qkv, a.out = rotary.cos.data_ptr(), rotary.sin.data_ptr(), at.qkv.data_ptr(), at.out.data_ptr()
    a.heads, a.kv_heads, a.dim, a.tokens = shape.heads, shape.kv_heads, shape.head_dim, at.qkv.shape[0]
    a.turns = rows.rotary_rows.data_ptr()
    if rows.first_turns is not None:
        a.first_turns = rows.first_turns.data_ptr()
    a.positions, a.tables, a.table_ahead = rows.positions.data_ptr(), rows.tables.data_ptr(), rows.tables.stride(0)
    a.chunk = rows.start is not None
    a.scratch, a.stride = calls.scratch(0, calls.native.attention_scratch(shape.heads, shape.kv_heads, shape.head_dim))
    return a


def indexed(calls: Calls, heads: AttentionHeads, at: AttentionRows, indexer: Indexer, keyed: IndexedRows) -> Call | None:
    """Attention to chosen stretches."""
    attends, slots = attention(calls, heads, at), at.rows.slots
    weights = indexer.q_norm.weight, indexer.k_norm.weight
    held = (keyed.indexed, *weights, keyed.tails, keyed.pooled)
    if attends is None or slots is None or indexer.dim % HEAD_STEP or not all(map(plain_rows, held)):
        return None
    most = indexer.budget // indexer.ratio
    chosen = torch.empty((keyed.indexed.shape[0], most), dtype=torch.int64)
    queue = heads.rotary.cos.shape[0] // indexer.ratio + 1
    queues = torch.empty((calls.threads, queue * SCORED_BYTES), dtype=torch.uint8)
    x = Indexed(a=attends, heads=indexer.heads, dim=indexer.dim, queue=queue, q_eps=indexer.q_norm.eps, k_eps=indexer.k_norm.eps)
    x.trail = at.rows.trail
    x.a.chosen, x.a.most, x.a.ratio = chosen.data_ptr(), most, indexer.ratio
    x.indexed, x.q_norm, x.k_norm, x.tails, x.pooled = (tensor.data_ptr() for tensor in held)
    x.sources, x.targets, x.queues = slots.source.data_ptr(), slots.target.data_ptr(), queues.data_ptr()
    return Call.of(calls.native.attend_indexed, x, *held, chosen, queues, heads, at, indexer)


def delta(calls: Calls, heads: DeltaHeads, step: DeltaStep) -> Call | None:
    held = (step.projected, step.rates, step.windows, step.states, heads.taps, heads.decay, heads.bias, heads.norm.weight, step.out)
    if not fits_delta(heads) or not all(map(plain_rows, held)):
        return None
    d = Delta(rows=step.out.shape[0], taps_count=heads.taps.shape[0], eps=heads.norm.eps, threads=calls.threads)
    d.key_heads, d.group, d.key_dim, d.value_dim = heads.key_heads, heads.group, heads.key_dim, heads.value_dim
    d.fused, d.sigmoid, d.trail = heads.fused, heads.gate == "sigmoid", step.trail
    d.projected, d.rates, d.windows, d.states, d.taps, d.decay, d.bias, d.norm, d.out = (tensor.data_ptr() for tensor in held)
    d.sources, d.targets = step.slots.source.data_ptr(), step.slots.target.data_ptr()
    return Call.of(calls.native.delta_rows, d, *held, heads, step.slots)


def joint(calls: Calls, joint: StreamJoint, at: JointRows) -> Call | None:
    stored = calls.all_stored(joint.down, joint.up, *([joint.inject] if joint.inject is not None else []))
    held = (at.streams, joint.norm.weight, at.normed, at.low, at.mixed, at.read, at.weights, at.found)
    rows, hidden = at.read.shape
    if stored is None or hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    scratch = calls.scratch_of(stored)
    j = Joint(rows=rows, count=joint.count, hidden=hidden, rank=joint.down.shape[0], threads=calls.threads, eps=joint.norm.eps)
    j.streams, j.norm, j.normed, j.low, j.mixed, j.read, j.weights, j.found = (tensor.data_ptr() for tensor in held)
    j.down = calls.product(STORE, at.normed, stored[0], at.low, scratch)
    j.up = calls.product(STORE, at.low, stored[1], at.mixed, scratch)
    if joint.inject is None:
        j.found = None
    else:
        j.inject = calls.product(STORE, at.normed, stored[2], at.weights, scratch)
    return Call.of(calls.native.joint_rows, j, *held, joint)


def injection(calls: Calls, at: JointRows) -> Call | None:
    held, hidden = (at.streams, at.weights, at.found), at.found.shape[1]
    if hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    j = Injection(*(tensor.data_ptr() for tensor in held), *at.weights.shape, hidden)
    return Call.of(calls.native.inject_rows, j, *held)


def ngram(calls: Calls, weights: NgramWeights, at: NgramRows) -> Call | None:
    stored = calls.all_stored(weights.key, weights.value)
    norms = (weights.key_norm.weight, weights.query_norm.weight, weights.conv_norm.weight)
    held = (*norms, at.streams, at.windows, weights.taps, at.embedded, at.keys, at.values)
    count, hidden = norms[0].shape
    if stored is None or hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    scratch = calls.scratch_of(stored)
    n = Ngram(rows=at.streams.shape[0], count=count, hidden=hidden, taps_count=weights.taps.shape[0], apart=weights.apart)
    n.key_eps, n.query_eps, n.conv_eps = weights.key_norm.eps, weights.query_norm.eps, weights.conv_norm.eps
    n.key_norm, n.query_norm, n.conv_norm, n.streams, n.windows, n.taps = (tensor.data_ptr() for tensor in held[:6])
    n.sources, n.targets = at.slots.source.data_ptr(), at.slots.target.data_ptr()
    n.key = calls.product(STORE, at.embedded, stored[0], at.keys, scratch)
    n.value = calls.product(STORE, at.embedded, stored[1], at.values, scratch)
    return Call.of(calls.native.ngram_rows, n, *held, weights, at.slots)


def experts(calls: Calls, experts: ExpertWeights, at: ExpertRows) -> Call | None:
    shared, count = experts.shared, len(experts.gate_up)
    weights = (shared.gate, shared.gate_up, shared.down) if shared else ()
    stored = calls.all_stored(experts.router, *weights, *experts.gate_up, *experts.down)
    held = (at.x, at.out, at.scores, at.routed, at.gated, *((at.shared_gate, at.shared_gated) if shared else ()))
    if stored is None or experts.active > min(MOST_ACTIVE, count) or not all(map(plain_rows, held)):
        return None
    ups, downs = ((StoredWeight * count)(*part) for part in (stored[-2 * count : -count], stored[-count:]))
    scratch = calls.scratch_of([*stored[: -2 * count], ups[0], downs[0]])
    e = SparseExperts(count=count, active=experts.active, normalized=experts.normalized, shared=shared is not None)
    e.rows, e.hidden, e.width = *at.x.shape, at.gated.shape[1]
    e.gate_ups, e.downs = ctypes.addressof(ups), ctypes.addressof(downs)
    e.x, e.out, e.scores, e.routed, e.gated = (tensor.data_ptr() for tensor in held[:5])
    e.router = calls.product(STORE, at.x, stored[0], at.scores, scratch)
    e.gate_up = calls.product(GATE, at.x, ups[0], at.gated, scratch)
    e.down = calls.product(STORE, at.gated, downs[0], at.routed, scratch)
    if shared:
        e.shared_gate = calls.product(STORE, at.x, stored[1], at.shared_gate, scratch)
        e.shared_gate_up = calls.product(GATE, at.x, stored[2], at.shared_gated, scratch)
        e.shared_down = calls.product(ADD, at.shared_gated, stored[3], at.out, scratch)
    return Call.of(calls.native.expert_rows, e, *held, ups, downs, experts)


def norm(calls: Calls, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> Call | None:
    weight = norm.weight
    if not (plain_rows(x) and plain_rows(out) and plain_rows(weight)) or x.shape != out.shape or x.shape[-weight.dim() :] != weight.shape:
        return None
    cols = x.shape[-1]
    n = Norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // cols, cols, weight.numel() // cols, calls.threads, norm.eps)
    return Call.of(calls.native.norm_call, n, x, norm, out)


def gates(heads: HeadShape, projected: torch.Tensor, qkv: torch.Tensor, mixed: torch.Tensor) -> Gates | None:
    if heads.head_dim % HEAD_STEP or not (plain_rows(projected) and plain_rows(qkv) and plain_rows(mixed)):
        return None
    beside = 2 * heads.kv_heads * heads.head_dim
    return Gates(projected.data_ptr(), qkv.data_ptr(), mixed.data_ptr(), mixed.shape[0], heads.heads, heads.head_dim, beside)
