"""The composition of a network from its config.json alone: every tensor by kind and shape, as its family declares them
in model/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

from ..model import tower
from ..model.decoder import drafting
from ..model.draft import COUNTS
from ..model.families import describe, family_of, text_config
from ..model.shape import DecoderConfig
from ..model.spec import ConfigReader, Destination
from ..model.vision_config import read_tower_shape, sees

Kind = Literal[
    "embedding",
    "head",
    "norms",
    "attention",
    "indexer",
    "linear",
    "dense",
    "experts",
    "shared",
    "router",
    "residual",
    "ngram",
    "table",
]
Part = Literal["text", "mtp", "vision"]

# The kind of a tensor by the last part of its key. Keys of hyper-connections and n-gram blocks are recognized by their
# prefix, see _kind.
KINDS: Mapping[str, Kind] = {
    "embedding": "embedding",
    "head": "head",
    **dict.fromkeys(("norm", "attention_norm", "forward_norm", "delta_norm", "draft_norm"), "norms"),
    **dict.fromkeys(("draft_embedding_norm", "draft_hidden_norm"), "norms"),
    **dict.fromkeys(("qkv", "qkv_bias", "q_norm", "k_norm", "output"), "attention"),
    **dict.fromkeys(("indexer", "indexer_q_norm", "indexer_k_norm"), "indexer"),
    **dict.fromkeys(("projection", "rates", "taps", "decay", "delta_bias", "out_norm", "delta_output"), "linear"),
    **dict.fromkeys(("gate_up", "down", "draft_fc", "draft_fc_embedding", "draft_fc_hidden"), "dense"),
    **dict.fromkeys(("experts_gate_up", "experts_down"), "experts"),
    **dict.fromkeys(("shared_gate_up", "shared_down"), "shared"),
    **dict.fromkeys(("router", "shared_gate"), "router"),
    "ngram_table": "table",
}
_BEGINNINGS: tuple[tuple[str, Kind], ...] = (
    ("ngram_", "ngram"),
    *((name, "residual") for name in ("attn_", "mlp_", "mixer_", "draft_mixer_")),
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """`count` tensors of one shape. A token uses `used` of them: the chosen experts; 0 for lookup tables, of which it
    reads single rows.
    """

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
class Composition:
    """The tensors of a config, its family's module, and the family's description of the config (without the draft
    layer).
    """

    family: str
    module: ModuleType
    config: DecoderConfig
    tensors: tuple[Tensors, ...]

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Parameters by kind; those of the draft layer are `mtp`, of the picture tower `vision`."""
        found: dict[str, int] = {}
        for tensors in self.tensors:
            name = tensors.kind if tensors.part == "text" else tensors.part
            found[name] = found.get(name, 0) + tensors.elements
        return found

    @property
    def has_draft(self) -> bool:
        """Whether the config declares a layer for multi-token prediction."""
        return "mtp" in self.kinds

    @property
    def parameters(self) -> int:
        """Of the whole checkpoint, including n-gram table, draft layer and vision tower."""
        return sum(tensors.elements for tensors in self.tensors)

    @property
    def active(self) -> int:
        """Parameters of the text network that one token is multiplied with: the chosen experts, no lookup tables."""
        return sum(tensors.active for tensors in self.tensors if tensors.part == "text")


def compose(config: Mapping[str, Any]) -> Composition:
    """Read a config.json, with or without a nested text part. Raises ModelError naming the wrong key."""
    module, described, text = family_of(config), describe(config), text_config(config)
    tensors = [*_tensors(module.destinations(described), "text", described)]
    if any(ConfigReader(text).has(key) and ConfigReader(text).integer(key) for key in COUNTS):
        tensors += _tensors(drafting(described), "mtp", described)
    family = module.__name__.rpartition(".")[2]
    tensors += _vision(config, family)
    return Composition(family, module, described, _merged(tensors))


def _tensors(destinations: Iterator[Destination], part: Part, config: DecoderConfig) -> Iterator[Tensors]:
    for destination in destinations:
        kind = _kind(destination.key)
        sources = (destination.joined,) if kind == "table" and destination.joined else destination.sources
        share = destination.used if kind != "embedding" or config.tied else 0.0
        for shape in dict.fromkeys(source.shape for source in sources):
            count = sum(source.shape == shape for source in sources)
            yield Tensors(kind, shape, count, round(count * share), part)


def _kind(key: str) -> Kind:
    last = key.rpartition(".")[2]
    if last in KINDS:
        return KINDS[last]
    return next(kind for beginning, kind in _BEGINNINGS if last.startswith(beginning))


def _vision(config: Mapping[str, Any], family: str) -> Iterator[Tensors]:
    """The vision tower; biases and norms are vectors."""
    if not sees(config, family):
        return
    for wanted in tower.destinations(read_tower_shape(config, family)):
        for source in wanted.sources:
            yield Tensors("dense" if len(source.shape) > 1 else "norms", source.in_file, 1, 1, "vision")


def _merged(tensors: list[Tensors]) -> tuple[Tensors, ...]:
    """Tensors of one kind and shape together."""
    found: dict[tuple[Part, Kind, tuple[int, ...]], tuple[int, int]] = {}
    for one in tensors:
        count, used = found.get((one.part, one.kind, one.shape), (0, 0))
        found[one.part, one.kind, one.shape] = count + one.count, used + one.used
    return tuple(Tensors(kind, shape, *counts, part) for (part, kind, shape), counts in found.items())
