"""What a config.json alone says of a network's size: every tensor by kind, with its shape, and what a token leaves behind.

Families: those of model/families.py. Sources: transformers' modeling files and the tensor lists of the
published checkpoints; tests hold the counts against both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..errors import ModelError
from ..kernels.operands import pick_numbers
from ..model.families import ALIASES, FAMILIES, text_config
from ..model.spec import ConfigReader
from ..model.tower import destinations
from ..model.vision_config import read_tower_shape, sees

Kind = Literal[
    "embedding", "head", "norms", "attention", "indexer", "linear", "dense", "experts", "shared", "router", "residual", "ngram", "table"
]
Part = Literal["text", "mtp", "vision"]

KINDS_OF_TYPE = tuple(FAMILIES)
BIASED = ("qwen2", "qwen2_5_vl")  # biases on queries, keys and values, no norm per head
ATTENTION_ONLY = (*BIASED, "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe")
FULL = ("full_attention", "indexed_attention")
LINEAR = "linear_attention"
CONV_LAG = 9  # tokens that the n-gram block's convolution looks back: 3 taps, dilation 3


@dataclass(frozen=True, slots=True)
class Tensors:
    """`count` tensors of one shape. `used` of them meet a token: experts are chosen, of lookup tables single rows are read (0)."""

    kind: Kind
    shape: tuple[int, ...]
    count: int
    used: int
    part: Part = "text"

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def active(self) -> int:
        return self.used * math.prod(self.shape)


@dataclass(frozen=True)
class Census:
    """The tensors of a config, and what sequences leave behind.

    `full`: those of the `layers` that have keys and values. `indexer_token`: numbers that a token adds to the pooled indexer keys (fp32),
    `state`: bytes of a sequence's recurrent states, whatever its length. `row`: numbers that a token takes on its way through a layer,
    `picks`: those that kernels on a GPU work in beside, where there are experts.
    """

    family: str
    tensors: tuple[Tensors, ...]
    max_position: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    full: int
    indexer_token: int
    state: int
    row: int
    picks: int

    @property
    def kv_token(self) -> int:
        """Numbers that a token leaves in keys and values of all layers."""
        return 2 * self.full * self.kv_heads * self.head_dim

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Parameters by kind; those of the draft layer are `mtp`, of the picture tower `vision`."""
        found: dict[str, int] = {}
        for tensors in self.tensors:
            name = tensors.kind if tensors.part == "text" else tensors.part
            found[name] = found.get(name, 0) + tensors.elements
        return found

    @property
    def parameters(self) -> int:
        """Of everything in the checkpoint: the table, the draft layer and the picture tower too."""
        return sum(tensors.elements for tensors in self.tensors)

    @property
    def active(self) -> int:
        """Parameters of the text network that one token is multiplied with: of experts the chosen ones, of lookup tables none."""
        return sum(tensors.active for tensors in self.tensors if tensors.part == "text")


def family_name(config: Mapping[str, Any]) -> str:
    """The text model_type without _text, alias resolved. Raises ModelError for one that cannot be counted."""
    kind = str(text_config(config).get("model_type")).removesuffix("_text")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS_OF_TYPE:
        raise ModelError(f"model_type {kind!r} is not known; known are {', '.join(KINDS_OF_TYPE)}")
    return kind


def take_census(config: Mapping[str, Any]) -> Census:
    """Count the network of a config.json, its text part nested under text_config or not. Raises ModelError naming the wrong key."""
    family, text = family_name(config), text_config(config)
    read = ConfigReader(text)
    tied = read.flag("tie_word_embeddings", False)
    network = _Network(family, text, _layer_kinds(text, read, family))
    tensors = (*network.text(tied), *network.mtp(), *_vision(config, family))
    return network.census(_merged(tensors))


def _layer_kinds(text: Mapping[str, Any], read: ConfigReader, family: str) -> list[bool]:
    """For each layer whether its attention is linear."""
    layers = read.integer("num_hidden_layers")
    if layers > 1000:
        raise ModelError(f"config.json has num_hidden_layers = {layers}; no known family has more than 1000")
    if family in ATTENTION_ONLY:
        return [False] * layers
    named = text.get("layer_types")
    if named is None:
        every = read.integer("full_attention_interval", 4)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(named, list) or len(named) != layers or any(kind not in (*FULL, LINEAR) for kind in named):
        raise ModelError(f"config.json has layer_types that are not {layers} of {', '.join((*FULL, LINEAR))}")
    return [kind == LINEAR for kind in named]


class _Network:
    """The widths of one config, and the tensors that they make."""

    def __init__(self, family: str, text: Mapping[str, Any], linear: list[bool]) -> None:
        self.family, self.text_config, self.linear = family, text, linear
        self.read = read = ConfigReader(text)
        self.hidden = read.integer("hidden_size")
        self.vocab = read.integer("vocab_size")
        self.heads = read.integer("num_attention_heads")
        self.kv_heads = read.integer("num_key_value_heads", self.heads)
        self.head_dim = read.integer("head_dim", 256 if any(linear) else max(1, self.hidden // self.heads))
        self.streams = read.integer("hc_count") if family == "qwen4_exp" else 0
        self.gated = family not in ATTENTION_ONLY

    def text(self, tied: bool) -> Iterator[Tensors]:
        """The network itself, embedding first."""
        yield Tensors("embedding", (self.vocab, self.hidden), 1, 1 if tied else 0)
        if not tied:
            yield _one("head", self.vocab, self.hidden)
        for i, linear in enumerate(self.linear):
            yield from self._linear() if linear else self._attention()
            yield from self._forward(i)
            yield from self._joints()
        if self.streams:
            yield from self._mixer(inject=False)
            yield from self._ngram()
        else:
            yield _one("norms", self.hidden)

    def mtp(self) -> Iterator[Tensors]:
        """The draft layers of multi-token prediction: what joins state and embedding, attention with feed-forward, the last norm."""
        layers = self.read.integer("mtp_num_hidden_layers") if self.read.has("mtp_num_hidden_layers") else 0
        if not layers:
            return
        found = [_one("norms", self.hidden), _one("norms", self.hidden * max(1, self.streams))]
        if self.streams:
            found += [Tensors("dense", (self.hidden, self.hidden), 2, 2), *self._mixer(inject=False)]
        else:
            found += [_one("dense", self.hidden, 2 * self.hidden), _one("norms", self.hidden)]
        for _ in range(layers):
            found += [*self._attention(), *self._forward(len(self.linear)), *self._joints()]
        yield from (Tensors(one.kind, one.shape, one.count, one.used, "mtp") for one in found)

    def _attention(self) -> Iterator[Tensors]:
        queries, keys, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        yield _one("attention", queries * (2 if self.gated else 1), hidden)
        yield Tensors("attention", (keys, hidden), 2, 2)
        yield _one("attention", hidden, queries)
        if self.family in BIASED:
            yield _one("attention", queries)
            yield Tensors("attention", (keys,), 2, 2)
        else:
            yield Tensors("attention", (self.head_dim,), 2, 2)
        if self.family == "qwen4_exp":
            width = self.read.integer("indexer_head_dim")
            heads = self.read.integer("indexer_n_heads") + self.read.integer("indexer_kv_heads", 1)
            yield _one("indexer", heads * width, hidden)
            yield Tensors("indexer", (width,), 2, 2)

    def _linear(self) -> Iterator[Tensors]:
        keys, values, heads = self._key_width, self._value_width, self._value_heads
        if self.family == "qwen3_next":
            yield _one("linear", 2 * (keys + values), self.hidden)
            yield _one("linear", 2 * heads, self.hidden)
        else:
            yield _one("linear", 2 * keys + values, self.hidden)
            yield _one("linear", values, self.hidden)
            yield Tensors("linear", (heads, self.hidden), 2, 2)
        yield _one("linear", 2 * keys + values, 1, self._taps)
        yield Tensors("linear", (heads,), 2, 2)
        yield _one("linear", self.read.integer("linear_value_head_dim"))
        yield _one("linear", self.hidden, values)

    def _forward(self, layer: int) -> Iterator[Tensors]:
        """Experts with their router, or a dense feed-forward."""
        if not self._is_sparse(layer):
            yield from self._gated("dense", self.read.integer("intermediate_size"))
            return
        count, chosen = self.experts, self.read.integer("num_experts_per_tok")
        width = self.read.integer("moe_intermediate_size")
        yield _one("router", count, self.hidden)
        yield Tensors("experts", (width, self.hidden), 2 * count, 2 * chosen)
        yield Tensors("experts", (self.hidden, width), count, chosen)
        if self.family not in ("qwen3_moe", "qwen3_vl_moe"):
            yield from self._gated("shared", self.read.integer("shared_expert_intermediate_size"))
            yield _one("router", 1, self.hidden)

    def _is_sparse(self, layer: int) -> bool:
        if self.family in (*BIASED, "qwen3", "qwen3_vl", "qwen3_5"):
            return False
        dense = _numbers(self.text_config, "mlp_only_layers")
        return layer not in dense and (layer + 1) % self.read.integer("decoder_sparse_step", 1) == 0

    def _gated(self, kind: Kind, width: int) -> Iterator[Tensors]:
        yield Tensors(kind, (width, self.hidden), 2, 2)
        yield _one(kind, self.hidden, width)

    def _joints(self) -> Iterator[Tensors]:
        """What joins a layer's two halves to the residual."""
        if self.streams:
            yield from self._mixer(inject=True)
            yield from self._mixer(inject=True)
        else:
            yield Tensors("norms", (self.hidden,), 2, 2)

    def _mixer(self, *, inject: bool) -> Iterator[Tensors]:
        wide, rank = self.streams * self.hidden, self.read.integer("hc_lowrank")
        yield _one("residual", wide)
        yield _one("residual", rank, wide)
        yield _one("residual", wide, rank)
        if inject:
            yield _one("residual", self.streams, wide)

    def _ngram(self) -> Iterator[Tensors]:
        wide, width = self.streams * self.hidden, self.read.integer("ple_embed_dim")
        layers = _numbers(self.text_config, "ple_layer_ids")
        parts = (self.read.integer("ngram_size") - 1) * self.read.integer("heads_per_ngram")
        base, multiple = self.read.integer("ngram_vocab_size_base"), self.read.integer("make_ngram_vocab_size_divisible_by", 128)
        for index in range(len(layers)):
            yield Tensors("table", (ngram_rows(parts, base, multiple, index), width // parts), 1, 0)
            yield _one("ngram", wide, width)
            yield _one("ngram", self.hidden, width)
            yield Tensors("ngram", (wide,), 3, 3)
            yield _one("ngram", wide, 1, self.read.integer("ple_conv_kernel_size"))

    @property
    def experts(self) -> int:
        return self.read.experts()

    @property
    def _value_heads(self) -> int:
        return self.read.integer("linear_num_value_heads")

    @property
    def _key_width(self) -> int:
        return self.read.integer("linear_num_key_heads") * self.read.integer("linear_key_head_dim")

    @property
    def _value_width(self) -> int:
        return self._value_heads * self.read.integer("linear_value_head_dim")

    @property
    def _taps(self) -> int:
        return self.read.integer("linear_conv_kernel_dim", 4)

    def census(self, tensors: tuple[Tensors, ...]) -> Census:
        """Everything about the config, with its tensors."""
        full, linear = self.linear.count(False), self.linear.count(True)
        indexer = state = 0
        if linear:
            head = self._value_width * self.read.integer("linear_key_head_dim")
            state = linear * 4 * (head + (2 * self._key_width + self._value_width) * (self._taps - 1))
        if self.family == "qwen4_exp":
            pooled = self.read.integer("indexer_kv_heads", 1) * self.read.integer("indexer_head_dim")
            indexer = full * pooled // self.read.integer("indexer_compress_ratio")
            state += len(_numbers(self.text_config, "ple_layer_ids")) * 4 * CONV_LAG * self.streams * self.hidden
        position = self.read.integer("max_position_embeddings", 32768)
        widths = self.heads, self.kv_heads, self.head_dim
        return Census(self.family, tensors, position, self.vocab, *widths, full + linear, full, indexer, state, self._row(), self._picks())

    def _picks(self) -> int:
        if not any(self._is_sparse(layer) for layer in range(len(self.linear))):
            return 0
        active, width = self.read.integer("num_experts_per_tok"), self.read.integer("moe_intermediate_size")
        return pick_numbers(self.experts, active, self.hidden, width)

    def _row(self) -> int:
        """Numbers that a token takes while it passes a layer: its states, what attention makes of it, and the feed-forward."""
        queries = self.heads * self.head_dim
        attention = queries * (3 if self.gated else 2) + 2 * self.kv_heads * self.head_dim
        if any(self.linear):
            attention = max(attention, 2 * self._key_width + 3 * self._value_width)
        forward = 3 * self.read.integer("intermediate_size") if not self._is_sparse(len(self.linear) - 1) else 0
        if not forward:
            forward = 3 * self.read.integer("moe_intermediate_size") * self.read.integer("num_experts_per_tok") + self.experts
        return self.hidden * (2 + 3 * self.streams) + attention + forward


def _numbers(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The whole numbers from 0 that `key` lists, at most 1000; none where it is absent."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 1000 or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ModelError(f"config.json has {key} = {value!r}; a list of whole numbers from 0 is needed")
    return tuple(value)


def ngram_rows(parts: int, base: int, multiple: int, index: int = 0) -> int:
    """Rows of the table `index`: its `parts` primes added up, to a multiple of `multiple`. Primes go on from table to table from `base`."""
    wanted = parts * (index + 1)
    if wanted > 256 or base > 1 << 31:
        raise ModelError(f"config.json asks for {wanted} n-gram tables of {base} rows; at most 256 of 2^31 are counted")
    found, number = [], max(2, base)
    while len(found) < wanted:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return -(-sum(found[parts * index :]) // multiple) * multiple


def _vision(config: Mapping[str, Any], family: str) -> Iterator[Tensors]:
    """The vision tower; biases and norms are vectors."""
    if not sees(config, family):
        return
    for wanted in destinations(read_tower_shape(config, family)):
        for source in wanted.sources:
            yield Tensors("dense" if len(source.shape) > 1 else "norms", source.in_file, 1, 1, "vision")


def _one(kind: Kind, *shape: int) -> Tensors:
    return Tensors(kind, shape, 1, 1)


def _merged(tensors: tuple[Tensors, ...]) -> tuple[Tensors, ...]:
    """Tensors of one kind and shape together."""
    found: dict[tuple[Part, Kind, tuple[int, ...]], tuple[int, int]] = {}
    for one in tensors:
        count, used = found.get((one.part, one.kind, one.shape), (0, 0))
        found[one.part, one.kind, one.shape] = count + one.count, used + one.used
    return tuple(Tensors(kind, shape, *counts, part) for (part, kind, shape), counts in found.items())
