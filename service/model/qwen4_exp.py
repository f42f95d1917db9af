"""qwen4_exp (Qwen3.8-Flash-Next): four gated residual streams, gated delta nets, every fourth layer sparse attention to
chosen blocks, experts, and rows of an n-gram table that stays in its file.

Source: transformers' Qwen4Exp configuration and the published checkpoint's tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..core import Sampling, Thinking
from ..errors import ModelError, brief
from ..kernels.forward_batch import BLOCK
from .decoder import build, destinations
from .hybrid import read_hybrid_decoder
from .qwen3_5 import BESIDE
from .shape import (
    ATTENTION,
    DecoderConfig,
    IndexerShape,
    NgramShape,
    StreamShape,
    read_experts,
)
from .spec import ConfigReader

TABLE_PARTS = 4096  # published: 128
TABLE_HEADS = 256  # of all tables; published: 16
__all__ = ["BESIDE", "build", "default_sampling", "destinations", "read_config"]


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read and check a qwen4_exp config.json (its text part); raises ModelError for what would change the
    arithmetic.
    """
    read = ConfigReader(config)
    kinds = config.get("layer_types")
    named = {**config, "output_gate_type": None}
    if isinstance(kinds, list):
        named["layer_types"] = [ATTENTION if kind == "indexed_attention" else kind for kind in kinds]
    read.require("norm_topk_prob", True, "the weights of the chosen experts sum up to 1")
    plain = read_hybrid_decoder(named, fused=False, experts=read_experts(read, shared=True, normalized=True))
    if plain.delta is None:
        raise ValueError("a hybrid decoder has delta nets")
    gate = _output_gate(config)
    streams, indexer = StreamShape(read.integer("hc_count", 4), read.integer("hc_lowrank", 320)), _indexer(read, plain)
    ngrams = _ngrams(config, read, plain)
    hidden = plain.widths.hidden
    buffers = (
        *plain.widths.more,
        *streams.buffers(hidden),
        *indexer.buffers(),
        *(ngrams.buffers(hidden, streams.count) if ngrams else ()),
    )
    widths = replace(plain.widths, more=buffers)
    return replace(
        plain, widths=widths, delta=replace(plain.delta, gate=gate), streams=streams, ngrams=ngrams, indexer=indexer
    )


def _output_gate(config: Mapping[str, Any]) -> Literal["silu", "sigmoid"]:
    gate = config.get("output_gate_type") or "silu"
    if gate not in ("silu", "sigmoid"):
        raise ModelError(
            f"config.json has output_gate_type = {brief(gate)}; supported are 'silu' and 'sigmoid' (the gate of a delta"
            " net)"
        )
    return "sigmoid" if gate == "sigmoid" else "silu"


def _indexer(read: ConfigReader, plain: DecoderConfig) -> IndexerShape:
    read.require("indexer_kv_heads", 1, "one key a block")
    shape = IndexerShape(
        *(read.integer(f"indexer_{key}") for key in ("n_heads", "head_dim", "budget", "compress_ratio"))
    )
    if shape.budget % shape.ratio or BLOCK % shape.ratio or shape.ratio < 2 or plain.rotary_dim > shape.dim:
        raise ModelError(
            f"config.json has indexer_budget = {shape.budget}, indexer_compress_ratio = {shape.ratio}, indexer_head_dim"
            f" = {shape.dim}: the ratio must divide the budget and {BLOCK}, and {plain.rotary_dim} rotary dimensions"
            " must fit the head"
        )
    return shape


def _ngrams(config: Mapping[str, Any], read: ConfigReader, plain: DecoderConfig) -> NgramShape | None:
    numbers = sorted(set(read.numbers("ple_layer_ids")))
    if not numbers:
        return None
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    shape = NgramShape(
        layers=tuple(number - 1 for number in numbers),
        width=read.integer("ple_embed_dim", plain.widths.hidden),
        taps=read.integer("ple_conv_kernel_size", 4),
        size=read.integer("ngram_size", 3),
        heads=read.integer("heads_per_ngram", 8),
        base=read.integer("ngram_vocab_size_base", 20_000_000),
        multiple=read.integer("make_ngram_vocab_size_divisible_by", 128),
        seed=read.integer("seed", 1234),
        end=end if type(end) is int else -1,
        parts=read.integer("split_ngram_parts", 512, most=TABLE_PARTS),
    )
    if not 0 <= shape.end < plain.widths.vocab:
        raise ModelError(
            f"config.json has eos_token_id = {brief(end)}; n-grams need the token that they do not reach over"
        )
    rows = (shape.size - 1) * shape.heads
    every = rows * len(numbers)
    if (
        not rows
        or shape.width % rows
        or not 1 <= numbers[0] <= numbers[-1] <= plain.layers
        or shape.size > 8
        or every > TABLE_HEADS
    ):
        raise ModelError(
            f"config.json has ple_layer_ids {brief(numbers)} of {plain.layers} layers and ple_embed_dim = {shape.width}"
            f" for {rows} rows a token (ngram_size {shape.size}, heads_per_ngram {shape.heads}); the rows must divide"
            f" the width, at most {TABLE_HEADS} in all layers, of 8 tokens"
        )
    return shape


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3.8 (model cards, 2026) for checkpoints without a generation_config.json."""
    if thinking == "off":
        return Sampling(0.7, 20, 0.8, 0.0, 1.5, 0.0, 1.0)
    return Sampling(1.0, 20, 0.95, 0.0, 0.0, 0.0, 1.0)
