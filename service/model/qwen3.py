"""qwen3: dense decoder with grouped-query attention, a norm a head on queries and keys, full rotary embedding, SwiGLU.

Source: transformers' Qwen3 configuration and the published checkpoints' tensor names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import Sampling, Thinking
from ..errors import ModelError
from ..kernels.reference import ReferenceKernels
from ..kernels.rows import NormWeight, RotaryTable
from ..quant.weight import QuantizedWeight, Weight
from .layers import Block, Decoder, Widths
from .spec import ConfigReader, Destination, Source


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """What the network needs of config.json."""

    widths: Widths
    layers: int
    max_position: int
    eps: float
    rope_theta: float
    tied: bool


def read_config(config: Mapping[str, Any]) -> Qwen3Config:
    """Read and check a qwen3 config.json; raises ModelError for what would change the arithmetic."""
    read = ConfigReader(config)
    read.require("hidden_act", "silu", "the gate of the feed-forward")
    read.require("attention_bias", False, "biases in attention")
    read.require("use_sliding_window", False, "a sliding attention window")
    layers = read.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or any(kind != "full_attention" for kind in kinds)):
        raise ModelError(f"config.json has layer_types other than {layers} times 'full_attention'; model_type qwen3 has no other layers")
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json has {heads} attention heads and {kv_heads} key/value heads; the first must be a multiple of the second"
        )
    head_dim = read.integer("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise ModelError(f"config.json has head_dim = {head_dim}; the rotary embedding needs an even number")
    widths = Widths(hidden, heads, kv_heads, head_dim, read.integer("intermediate_size"), read.integer("vocab_size"))
    return Qwen3Config(
        widths,
        layers,
        read.integer("max_position_embeddings", 32768),
        read.number("rms_norm_eps", 1e-6),
        read.rope_theta(10000.0),
        read.flag("tie_word_embeddings", False),
    )


def destinations(config: Qwen3Config) -> Iterator[Destination]:
    """Every tensor of the network, in the order in which the layers use them; q, k, v and gate, up are stored together."""
    w = config.widths
    q, kv = w.heads * w.head_dim, w.kv_heads * w.head_dim
    yield Destination("embedding", (Source("model.embed_tokens.weight", (w.vocab, w.hidden)),), 0, bits=8)
    for i in range(config.layers):
        name, key, part = f"model.layers.{i}.", f"{i}.", i + 1
        heads = (("q", q), ("k", kv), ("v", kv))
        gate_up = tuple(Source(f"{name}mlp.{p}_proj.weight", (w.intermediate, w.hidden)) for p in ("gate", "up"))
        yield _norm(key + "attention_norm", part, name + "input_layernorm.weight", w.hidden)
        yield Destination(key + "qkv", tuple(Source(f"{name}self_attn.{p}_proj.weight", (rows, w.hidden)) for p, rows in heads), part)
        yield _norm(key + "q_norm", part, name + "self_attn.q_norm.weight", w.head_dim)
        yield _norm(key + "k_norm", part, name + "self_attn.k_norm.weight", w.head_dim)
        yield _one(key + "output", part, name + "self_attn.o_proj.weight", w.hidden, q)
        yield _norm(key + "forward_norm", part, name + "post_attention_layernorm.weight", w.hidden)
        yield Destination(key + "gate_up", gate_up, part)
        yield _one(key + "down", part, name + "mlp.down_proj.weight", w.hidden, w.intermediate)
    yield _norm("norm", config.layers + 1, "model.norm.weight", w.hidden)
    if not config.tied:
        yield Destination("head", (Source("lm_head.weight", (w.vocab, w.hidden)),), config.layers + 1, bits=8)


def build(config: Qwen3Config, weights: Mapping[str, Weight], kernels: ReferenceKernels, rotary: RotaryTable) -> Decoder:
    """The network over `weights` (keys of `destinations`); sequences may be as long as the rotary table."""

    def norm(key: str) -> NormWeight:
        weight = weights[key]
        if isinstance(weight, QuantizedWeight):
            raise TypeError(f"{key} is quantized; norms are held in fp32")
        return NormWeight(weight, config.eps)

    blocks = [
        Block(
            norm(f"{i}.attention_norm"),
            weights[f"{i}.qkv"],
            norm(f"{i}.q_norm"),
            norm(f"{i}.k_norm"),
            weights[f"{i}.output"],
            norm(f"{i}.forward_norm"),
            weights[f"{i}.gate_up"],
            weights[f"{i}.down"],
        )
        for i in range(config.layers)
    ]
    embedding = weights["embedding"]
    return Decoder(config.widths.shape, embedding, blocks, norm("norm"), weights.get("head", embedding), rotary, kernels)


def _one(key: str, part: int, name: str, *shape: int) -> Destination:
    return Destination(key, (Source(name, shape),), part)


def _norm(key: str, part: int, name: str, width: int) -> Destination:
    return Destination(key, (Source(name, (width,)),), part, wide=True)


def default_sampling(thinking: Thinking) -> Sampling:
    """Qwen's advice for Qwen3 (model cards, 2025) where the checkpoint brings no generation_config.json."""
    if thinking == "off":
        return Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0)
    return Sampling(0.6, 20, 0.95, 0.0, 0.0, 0.0, 1.0)
