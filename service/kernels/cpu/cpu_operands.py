"""Fills the C structures from a layer's parts. None if the C code does not support them."""

from __future__ import annotations

import ctypes

import torch

from ..delta_rule import DeltaHeads, DeltaOperands
from ..forward_batch import HeadShape, NormWeight, VerifyPass
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
from .captured_calls import CallCache, NativeCall, plain_rows
from .cpu_limits import HEAD_STEP, MOST_ACTIVE, STREAM_STEP, fits, fits_delta
from .native import (
    ADD,
    GATE,
    STORE,
    AttentionStruct,
    ConnectionStruct,
    DeltaStruct,
    ExpertsStruct,
    GatesStruct,
    IndexerStruct,
    InjectionStruct,
    NgramStruct,
    NormStruct,
    WeightStruct,
)

# Bytes of a score and its index, see calls.h.
SCORED_BYTES = 8


def attention(calls: CallCache, heads: AttentionHeads, at: AttentionOperands) -> AttentionStruct | None:
    """For attend_rows and attend_chunk. It holds addresses, not tensors."""
    shape, rotary, keys, values, batch = heads.shape, heads.rotary, at.keys, at.values, at.batch
    ready = plain_rows(at.qkv) and plain_rows(at.out) and keys.dtype == values.dtype == torch.float32
    if not ready or not fits(shape, calls.native.attention_width):
        return None
    a = AttentionStruct(half=rotary.cos.shape[1], block_stride=keys.stride(0), threads=calls.threads)
    a.keys, a.values, a.turns = keys.data_ptr(), values.data_ptr(), batch.rotary_rows.data_ptr()
    if heads.q_norm is not None and heads.k_norm is not None:
        a.q_norm, a.q_eps = heads.q_norm.weight.data_ptr(), heads.q_norm.eps
        a.k_norm, a.k_eps = heads.k_norm.weight.data_ptr(), heads.k_norm.eps
    if heads.bias is not None:
        a.bias = heads.bias.data_ptr()
    if batch.first_turns is not None:
        a.first_turns = batch.first_turns.data_ptr()
    a.cos, a.sin, a.qkv, a.out = rotary.cos.data_ptr(), rotary.sin.data_ptr(), at.qkv.data_ptr(), at.out.data_ptr()
    a.heads, a.kv_heads, a.dim, a.tokens = shape.heads, shape.kv_heads, shape.head_dim, at.qkv.shape[0]
    a.positions, a.tables, a.table_stride = batch.positions.data_ptr(), batch.tables.data_ptr(), batch.tables.stride(0)
    a.chunk = batch.one_sequence
    a.scratch, a.stride = calls.scratch(0, calls.native.attention_scratch(shape.heads, shape.kv_heads, shape.head_dim))
    return a


def indexed(
    calls: CallCache, heads: AttentionHeads, at: AttentionOperands, indexer: Indexer, keyed: IndexerOperands
) -> NativeCall | None:
    """Attention to selected key blocks."""
    attends, slots = attention(calls, heads, at), at.batch.slots
    weights = indexer.q_norm.weight, indexer.k_norm.weight
    held = (keyed.indexed, *weights, keyed.tails, keyed.pooled)
    if attends is None or slots is None or indexer.dim % HEAD_STEP or not all(map(plain_rows, held)):
        return None
    most = indexer.budget // indexer.ratio
    chosen = torch.empty((keyed.indexed.shape[0], most), dtype=torch.int64)
    queue = heads.rotary.cos.shape[0] // indexer.ratio + 1
    queues = torch.empty((calls.threads, queue * SCORED_BYTES), dtype=torch.uint8)
    x = IndexerStruct(
        a=attends, heads=indexer.heads, dim=indexer.dim, queue=queue, q_eps=indexer.q_norm.eps, k_eps=indexer.k_norm.eps
    )
    x.verify = isinstance(at.batch, VerifyPass)
    x.a.chosen, x.a.most, x.a.ratio = chosen.data_ptr(), most, indexer.ratio
    x.indexed, x.q_norm, x.k_norm, x.tails, x.pooled = (tensor.data_ptr() for tensor in held)
    x.sources, x.targets, x.queues = slots.source.data_ptr(), slots.target.data_ptr(), queues.data_ptr()
    return NativeCall.of(calls.native.attend_indexed, x, *held, chosen, queues, heads, at, indexer)


def delta(calls: CallCache, heads: DeltaHeads, step: DeltaOperands) -> NativeCall | None:
    held = (
        step.projected,
        step.rates,
        step.windows,
        step.states,
        heads.taps,
        heads.decay,
        heads.bias,
        heads.norm.weight,
        step.out,
    )
    if not fits_delta(heads) or not all(map(plain_rows, held)):
        return None
    d = DeltaStruct(rows=step.out.shape[0], taps_count=heads.taps.shape[0], eps=heads.norm.eps, threads=calls.threads)
    d.key_heads, d.group, d.key_dim, d.value_dim = heads.key_heads, heads.group, heads.key_dim, heads.value_dim
    d.fused, d.sigmoid, d.verify = heads.fused, heads.gate == "sigmoid", step.verify
    d.projected, d.rates, d.windows, d.states, d.taps, d.decay, d.bias, d.norm, d.out = (
        tensor.data_ptr() for tensor in held
    )
    d.sources, d.targets = step.slots.source.data_ptr(), step.slots.target.data_ptr()
    return NativeCall.of(calls.native.delta_rows, d, *held, heads, step.slots)


def connection(calls: CallCache, connection: HyperConnection, at: ConnectionOperands) -> NativeCall | None:
    stored = calls.all_stored(
        connection.down, connection.up, *([connection.inject] if connection.inject is not None else [])
    )
    held = (at.streams, connection.norm.weight, at.normed, at.low, at.mixed, at.read, at.weights, at.found)
    rows, hidden = at.read.shape
    if stored is None or hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    scratch = calls.scratch_of(stored)
    j = ConnectionStruct(
        rows=rows,
        count=connection.count,
        hidden=hidden,
        rank=connection.down.shape[0],
        threads=calls.threads,
        eps=connection.norm.eps,
    )
    j.streams, j.norm, j.normed, j.low, j.mixed, j.read, j.weights, j.found = (tensor.data_ptr() for tensor in held)
    j.down = calls.product(STORE, at.normed, stored[0], at.low, scratch)
    j.up = calls.product(STORE, at.low, stored[1], at.mixed, scratch)
    if connection.inject is None:
        j.found = None
    else:
        j.inject = calls.product(STORE, at.normed, stored[2], at.weights, scratch)
    return NativeCall.of(calls.native.connection_rows, j, *held, connection)


def injection(calls: CallCache, at: ConnectionOperands) -> NativeCall | None:
    held, hidden = (at.streams, at.weights, at.found), at.found.shape[1]
    if hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    j = InjectionStruct(*(tensor.data_ptr() for tensor in held), *at.weights.shape, hidden)
    return NativeCall.of(calls.native.inject_rows, j, *held)


def ngram(calls: CallCache, weights: NgramWeights, at: NgramOperands) -> NativeCall | None:
    stored = calls.all_stored(weights.key, weights.value)
    norms = (weights.key_norm.weight, weights.query_norm.weight, weights.conv_norm.weight)
    held = (*norms, at.streams, at.windows, weights.taps, at.embedded, at.keys, at.values)
    count, hidden = norms[0].shape
    if stored is None or hidden % STREAM_STEP or not all(map(plain_rows, held)):
        return None
    scratch = calls.scratch_of(stored)
    n = NgramStruct(
        rows=at.streams.shape[0], count=count, hidden=hidden, taps_count=weights.taps.shape[0], apart=weights.apart
    )
    n.key_eps, n.query_eps, n.conv_eps = weights.key_norm.eps, weights.query_norm.eps, weights.conv_norm.eps
    n.key_norm, n.query_norm, n.conv_norm, n.streams, n.windows, n.taps = (tensor.data_ptr() for tensor in held[:6])
    n.sources, n.targets = at.slots.source.data_ptr(), at.slots.target.data_ptr()
    n.key = calls.product(STORE, at.embedded, stored[0], at.keys, scratch)
    n.value = calls.product(STORE, at.embedded, stored[1], at.values, scratch)
    return NativeCall.of(calls.native.ngram_rows, n, *held, weights, at.slots)


def experts(calls: CallCache, experts: ExpertWeights, at: ExpertOperands) -> NativeCall | None:
    shared, count = experts.shared, len(experts.gate_up)
    weights = (shared.gate, shared.gate_up, shared.down) if shared else ()
    stored = calls.all_stored(experts.router, *weights, *experts.gate_up, *experts.down)
    held = (at.x, at.out, at.scores, at.routed, at.gated, *((at.shared_gate, at.shared_gated) if shared else ()))
    if stored is None or experts.active > min(MOST_ACTIVE, count) or not all(map(plain_rows, held)):
        return None
    ups, downs = ((WeightStruct * count)(*part) for part in (stored[-2 * count : -count], stored[-count:]))
    scratch = calls.scratch_of([*stored[: -2 * count], ups[0], downs[0]])
    e = ExpertsStruct(count=count, active=experts.active, normalized=experts.normalized, shared=shared is not None)
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
    return NativeCall.of(calls.native.expert_rows, e, *held, ups, downs, experts)


def norm(calls: CallCache, x: torch.Tensor, norm: NormWeight, out: torch.Tensor) -> NativeCall | None:
    weight = norm.weight
    if (
        not (plain_rows(x) and plain_rows(out) and plain_rows(weight))
        or x.shape != out.shape
        or x.shape[-weight.dim() :] != weight.shape
    ):
        return None
    cols = x.shape[-1]
    n = NormStruct(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // cols,
        cols,
        weight.numel() // cols,
        calls.threads,
        norm.eps,
    )
    return NativeCall.of(calls.native.norm_call, n, x, norm, out)


def gates(heads: HeadShape, projected: torch.Tensor, qkv: torch.Tensor, mixed: torch.Tensor) -> GatesStruct | None:
    if heads.head_dim % HEAD_STEP or not (plain_rows(projected) and plain_rows(qkv) and plain_rows(mixed)):
        return None
    kv_width = 2 * heads.kv_heads * heads.head_dim
    return GatesStruct(
        projected.data_ptr(), qkv.data_ptr(), mixed.data_ptr(), mixed.shape[0], heads.heads, heads.head_dim, kv_width
    )
