"""What the Qwen decoders need of config.json: one description, of which each family fills its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..cache.recurrent import Pieces
from ..errors import ModelError
from ..kernels.operands import pick_numbers
from ..kernels.rotary import Yarn
from .layers import BufferSpec, Widths
from .spec import ConfigReader, Destination, Source, Turn

ATTENTION, DELTA = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a gated delta net: `value_heads` states of [key_dim, value_dim], groups of which share a key head.

    `taps`: of the convolution before it. `fused`: projections are stored per key head (Qwen3-Next). `gate`: the
    activation of the gates after it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values, and of their gates."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of the convolution's input: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> Pieces:
        """The state per sequence and layer, of constant size: the last inputs of the convolution, and the heads'
        states.
        """
        return (self.taps - 1, self.channels), (self.key_heads, self.group, self.key_dim, self.value_dim)

    def buffers(self) -> tuple[BufferSpec, ...]:
        return (
            BufferSpec("delta_projected", self.channels + self.values),
            BufferSpec("delta_rates", 2 * self.value_heads),
            BufferSpec("delta_mixed", self.values, read=True),
        )


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """`count` experts of `width`, of which a token uses `active`; `shared`: width of the expert that every token uses
    (0: none).

    `normalized`: the weights of the chosen experts are scaled to a sum of 1. `by_columns`: where all are one tensor, it
    stores the columns of each expert in turn.
    """

    count: int
    active: int
    width: int
    shared: int
    normalized: bool
    by_columns: bool = False

    def buffers(self, hidden: int) -> tuple[BufferSpec, ...]:
        buffers = (
            BufferSpec("router", self.count),
            BufferSpec("routed", hidden, read=True),
            BufferSpec("expert_both", 2 * self.width),
            BufferSpec("expert_gated", self.width, read=True),
            BufferSpec("picks", pick_numbers(self.count, self.active, hidden, self.width), halves=True),
        )
        shared = (
            BufferSpec("shared_gate", 1),
            BufferSpec("shared_both", 2 * self.shared),
            BufferSpec("shared_gated", self.shared, read=True),
        )
        return (*buffers, *shared) if self.shared else buffers


@dataclass(frozen=True, slots=True)
class StreamShape:
    """`count` residual streams, which a layer's input mixes by weights of low `rank`."""

    count: int
    rank: int

    def buffers(self, hidden: int) -> tuple[BufferSpec, ...]:
        wide = self.count * hidden
        return (
            BufferSpec("streams", wide, read=True),
            BufferSpec("streams_normed", wide, read=True),
            BufferSpec("streams_low", self.rank, read=True),
            BufferSpec("streams_mix", wide),
            BufferSpec("inject", self.count),
            BufferSpec("read", hidden, read=True),
            BufferSpec("found", hidden),
        )


@dataclass(frozen=True, slots=True)
class NgramShape:
    """Table rows, chosen by the last `size` tokens, that are added to the streams before the layers `layers`.

    `heads` rows per length from 2 to `size`, together `width` numbers. `base`, `multiple` and `seed` determine the
    hashes. `end` is the token that no n-gram crosses, `taps` those of the convolution after it, `parts` how the table
    is stored.
    """

    layers: tuple[int, ...]
    width: int
    taps: int
    size: int
    heads: int
    base: int
    multiple: int
    seed: int
    end: int
    parts: int

    def state(self, hidden: int, streams: int) -> Pieces:
        """The last inputs of the convolution, and the last ids minus `end`."""
        return ((self.taps - 1) * self.size, streams * hidden), (self.size - 1,)

    def buffers(self, hidden: int, streams: int) -> tuple[BufferSpec, ...]:
        return (
            BufferSpec("ngram", self.width, read=True),
            BufferSpec("ngram_keys", streams * hidden),
            BufferSpec("ngram_values", hidden),
        )


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """Attention to at most `budget` tokens, chosen in blocks of `ratio` by `heads` queries over one mean key per block,
    `dim` wide.
    """

    heads: int
    dim: int
    budget: int
    ratio: int

    @property
    def state(self) -> Pieces:
        """The raw keys of a block that is not full."""
        return ((self.ratio - 1, self.dim),)

    def buffers(self) -> tuple[BufferSpec, ...]:
        return (BufferSpec("indexed", (self.heads + 1) * self.dim),)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: the kind of each mixing layer, and which layers have experts.

    `kinds` lists them one by one (attention?), else every `interval`-th is attention. `gated`: attention has an output
    gate next to its queries, and norms are stored around zero. `dense`: layers without experts; else every
    `sparse_step`-th has them. `draft`: there is a layer for multi-token prediction, see draft.py. `headless`: there is
    no output matrix, so the network returns states and no scores. `bias`: queries, keys and values have one.
    `head_norms`: queries and keys are normed per head. `axes`: the axis of a picture's positions that rotates each pair
    of a head (0 time, 1 row, 2 column); none where all are text.
    """

    widths: Widths
    layers: int
    max_position: int
    eps: float
    rope_theta: float
    rotary_dim: int
    tied: bool
    yarn: Yarn | None = None
    kinds: tuple[bool, ...] = ()
    interval: int = 1
    gated: bool = False
    delta: DeltaShape | None = None
    experts: ExpertShape | None = None
    dense: frozenset[int] = frozenset()
    sparse_step: int = 1
    streams: StreamShape | None = None
    ngrams: NgramShape | None = None
    indexer: IndexerShape | None = None
    draft: bool = False
    headless: bool = False
    bias: bool = False
    head_norms: bool = True
    axes: tuple[int, ...] = ()

    @property
    def norm_turn(self) -> Turn:
        return "plus_one" if self.gated else ""

    def is_attention(self, layer: int) -> bool:
        return self.kinds[layer] if self.kinds else (layer + 1) % self.interval == 0

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.dense and (layer + 1) % self.sparse_step == 0

    @property
    def attention_layers(self) -> int:
        return sum(self.kinds) if self.kinds else self.layers // self.interval

    @property
    def states(self) -> tuple[Pieces, ...]:
        """The shapes of the constant-size states, for each layer that has one, in layer order."""
        found: list[Pieces] = []
        for layer in range(self.layers if self.delta else 0):
            if self.ngrams is not None and layer in self.ngrams.layers:
                found.append(self.ngrams.state(self.widths.hidden, self.streams.count if self.streams else 1))
            if not self.is_attention(layer):
                found.append(self.delta.state if self.delta else ())
            elif self.indexer is not None:
                found.append(self.indexer.state)
        return tuple(found)


def layer_norm(config: DecoderConfig, layer: int, key: str, name: str) -> Iterator[Destination]:
    """The norm at the start of a layer; with residual streams the connection applies it instead."""
    if config.streams is None:
        source = Source(f"model.layers.{layer}.{name}.weight", (config.widths.hidden,))
        yield Destination(f"{layer}.{key}", (source,), layer + 1, wide=True, turn=config.norm_turn)


def read_widths(read: ConfigReader, head_dim: int | None, intermediate: int, *buffers: BufferSpec) -> Widths:
    """The widths of attention and feed-forward. `head_dim`: where the config has none (None: hidden / heads)."""
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json has {heads} attention heads and {kv_heads} key/value heads; the first must be a multiple of"
            " the second"
        )
    width = read.integer("head_dim", head_dim or max(1, hidden // heads))
    if width % 2:
        raise ModelError(f"config.json has head_dim = {width}; the rotary embedding needs an even number")
    return Widths(hidden, heads, kv_heads, width, intermediate, read.integer("vocab_size"), buffers)


def read_attention_only(config: Mapping[str, Any], layers: int, model_type: str) -> None:
    """Refuse layer_types with any kind but full attention."""
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or any(kind != ATTENTION for kind in kinds)
    ):
        raise ModelError(
            f"config.json has layer_types other than {layers} times {ATTENTION!r}; model_type {model_type} has no other"
            " layers"
        )


def read_hybrid(config: Mapping[str, Any], read: ConfigReader, layers: int) -> tuple[tuple[bool, ...], int]:
    """Which layers are attention: `kinds` and `interval` of DecoderConfig."""
    kinds = config.get("layer_types")
    if kinds is None:
        return (), read.integer("full_attention_interval", 4)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (ATTENTION, DELTA) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types that are not {layers} of {ATTENTION!r} and {DELTA!r}; no other layers are"
            " supported"
        )
    return tuple(kind == ATTENTION for kind in kinds), 1


def read_delta(read: ConfigReader, *, fused: bool) -> DeltaShape:
    """The gated delta net of a config."""
    shape = DeltaShape(
        read.integer("linear_num_key_heads", 16),
        read.integer("linear_num_value_heads", 32),
        read.integer("linear_key_head_dim", 128),
        read.integer("linear_value_head_dim", 128),
        read.integer("linear_conv_kernel_dim", 4),
        fused,
    )
    if shape.value_heads % shape.key_heads:
        raise ModelError(
            f"config.json has linear_num_value_heads = {shape.value_heads} and linear_num_key_heads ="
            f" {shape.key_heads}; the first must be a multiple of the second"
        )
    if shape.taps < 2:
        raise ModelError(f"config.json has linear_conv_kernel_dim = {shape.taps}; at least 2 is needed")
    return shape


def read_experts(read: ConfigReader, *, shared: bool, normalized: bool | None = None) -> ExpertShape:
    """The experts of a config; `normalized` where the family fixes it, else norm_topk_prob must say it."""
    count = read.experts()
    active = read.integer("num_experts_per_tok")
    if active > count:
        raise ModelError(f"config.json has num_experts_per_tok = {active} of num_experts = {count}")
    if normalized is None:
        normalized = read.flag("norm_topk_prob", False)
    width = read.integer("shared_expert_intermediate_size") if shared else 0
    return ExpertShape(count, active, read.integer("moe_intermediate_size"), width, normalized)
