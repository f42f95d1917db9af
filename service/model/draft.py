"""Multi-token prediction: a layer after the last one that proposes a draft token from a hidden state and the next
token.

At position i it takes the head's input at i and the embedding of token i + 1, and norms both. It projects them to one
residual, and applies one attention layer with feed-forward, its own norm (or stream mixer) and the network's head:
scores for token i + 2. To draft further tokens, its own head's input replaces the hidden state of position i + 1. With
several residual streams it reads and returns all of them, before they are mixed. Source of the maths: DeepSeek-V3
(2024) and the published checkpoints' tensors `mtp.*`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cache.paged import PagedKV
from ..errors import ModelError
from ..kernels.forward_batch import ForwardBatch, NormWeight
from ..quant.weight import Weight
from . import streams
from .layers import BufferSpec, Decoder, Pass, PassRows, Scratch
from .shape import DecoderConfig
from .spec import ConfigReader, Destination, Source

log = logging.getLogger(__name__)

PREFIX = "mtp."
# The config keys that give the number of draft layers.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def with_draft(config: DecoderConfig) -> DecoderConfig:
    """The decoder with its draft layer."""
    hidden = config.widths.hidden
    buffers = (
        BufferSpec("draft_hidden", carried_width(config)),
        *(() if config.streams else (BufferSpec("draft_both", 2 * hidden, read=True),)),
    )
    return replace(config, draft=True, widths=replace(config.widths, more=(*config.widths.more, *buffers)))


def without_draft(config: DecoderConfig) -> DecoderConfig:
    """The decoder without its draft layer."""
    buffers = tuple(buffer for buffer in config.widths.more if not buffer.name.startswith("draft_"))
    return replace(config, draft=False, widths=replace(config.widths, more=buffers))


def carried_width(config: DecoderConfig) -> int:
    """Width of a row that the draft layer continues from."""
    return config.widths.hidden * (config.streams.count if config.streams else 1)


def draft_part(config: DecoderConfig) -> int:
    """The draft layer's position in the reading order, see Destination.part: after the head."""
    return config.layers + 2


def layer_config(config: DecoderConfig) -> DecoderConfig:
    """A decoder config whose layer number `config.layers` is the draft layer."""
    whole = replace(config, layers=config.layers + 1, kinds=(), interval=1, dense=frozenset(), sparse_step=1)
    return replace(whole, ngrams=None, draft=False)


def wanted(config: DecoderConfig, block: Iterable[Destination]) -> Iterator[Destination]:
    """Every required tensor of the draft layer; `block`: those of attention and feed-forward, named as layer
    `config.layers`.
    """
    part, hidden = draft_part(config), config.widths.hidden
    norms = (
        ("draft_embedding_norm", "pre_fc_norm_embedding", hidden),
        ("draft_hidden_norm", "pre_fc_norm_hidden", carried_width(config)),
    )
    for key, name, width in norms:
        yield Destination(key, (Source(f"{PREFIX}{name}.weight", (width,)),), part, wide=True, turn=config.norm_turn)
    projections = (("fc_embedding", hidden), ("fc_hidden", hidden)) if config.streams else (("fc", 2 * hidden),)
    for name, width in projections:
        yield Destination(f"draft_{name}", (Source(f"{PREFIX}{name}.weight", (hidden, width)),), part)
    for destination in block:
        sources = tuple(_renamed(source, config.layers) for source in destination.sources)
        joined = None if destination.joined is None else _renamed(destination.joined, config.layers)
        yield replace(destination, sources=sources, joined=joined, part=part)
    if config.streams is not None:
        yield from streams.wanted(config, "draft_mixer", f"{PREFIX}hyper_connection_mixer", part, inject=False)
    else:
        yield Destination(
            "draft_norm", (Source(f"{PREFIX}norm.weight", (hidden,)),), part, wide=True, turn=config.norm_turn
        )


def _renamed(source: Source, layer: int) -> Source:
    return replace(source, name=source.name.replace(f"model.layers.{layer}.", f"{PREFIX}layers.0.", 1))


def is_there(described: Mapping[str, Any], names: Iterable[str], needed: Iterable[Destination], model: str) -> bool:
    """Whether a checkpoint with tensors `names` has the complete draft layer (`needed`) and its config agrees.

    Raises ModelError where the config declares the layer and the checkpoint has only some of its tensors. A checkpoint
    with none of them was published without the layer.
    """
    own = {name for name in names if name.startswith(PREFIX)}
    read = ConfigReader(described)
    said = [described[key] for key in COUNTS if read.has(key)]
    if not own or 0 in said:
        return False
    count = max((read.integer(key) for key in COUNTS if read.has(key)), default=None)
    if (count or 1) > 1 or read.flag("mtp_use_dedicated_embeddings", False):
        log.warning(
            "%s: its %s layers for multi-token prediction are not used; one, with the model's embedding, is known",
            model,
            count,
        )
        return False
    modules = own | {name.rpartition(".")[0] for name in own}
    missing, every = [], 0
    for destination in needed:
        joined = destination.joined is not None and destination.joined.name in own
        every += len(destination.sources)
        missing += (
            [] if joined else [s.name for s in destination.sources if s.name.removesuffix(".weight") not in modules]
        )
    if missing and count is not None:
        raise ModelError(
            f"{model} has {every - len(missing)} of the {every} tensors of its layer for multi-token prediction, the"
            f" first that is missing is {missing[0]}; get the model again, or open it without that layer ([models]"
            " draft = false in onedesk.toml)"
        )
    return not missing


def carried(network: Decoder, state: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The rows that the draft layer continues from, for `state` [T, ...] of Decoder.forward: the head's input, or all
    streams [T, wide].

    Valid until the next pass.
    """
    return network.final(state, scratch) if isinstance(network.norm, NormWeight) else state


@dataclass(slots=True)
class Draft:
    """The draft layer over its weights: a network of one block that shares embedding and head with its decoder.

    projections: [hidden, 2 * hidden], or one [hidden, hidden] each for embedding and streams.
    """

    network: Decoder
    embedding_norm: NormWeight
    hidden_norm: NormWeight
    projections: tuple[Weight, ...]

    @property
    def captured(self) -> bool:
        """Whether a pass of a few rows can be a CUDA graph."""
        return self.network.captured and self.network.kernels.captures(self.network.shape, self.projections)

    def forward(self, ids: torch.Tensor, batch: ForwardBatch, kv: PagedKV, scratch: Scratch) -> torch.Tensor:
        """Read ids [T] int64 after the rows in the buffer "draft_hidden" [T, wide]; returns the residual, valid until
        the next pass.

        `kv` holds the keys and values of this layer alone. A position in it is that of the state it continues from.
        """
        network, views = self.network, scratch.rows(ids.shape[0])
        x = network.kernels.embed(ids, network.embedding, views["x"])
        at = Pass(ids, batch, kv, scratch, views, network.kernels, x, x)
        if len(self.projections) > 1:
            x = self._join_streams(at)
        else:
            self._join(at)
        for block in network.blocks:
            block.mixer.run(at)
            block.forward.run(at)
        at.let_in()
        return x

    def _join(self, at: Pass) -> None:
        kernels, views, hidden = at.kernels, at.views, at.target.shape[1]
        both = views["draft_both"]
        both[:, :hidden].copy_(kernels.rms_norm(at.target, self.embedding_norm, views["normed"]))
        both[:, hidden:].copy_(kernels.rms_norm(views["draft_hidden"], self.hidden_norm, views["normed"]))
        kernels.linear(both, self.projections[0], at.target)

    def _join_streams(self, at: Pass) -> torch.Tensor:
        """The norm spans all streams; the product is applied to one stream at a time."""
        kernels, views, (count, hidden) = at.kernels, at.views, at.target.shape
        of_embedding, of_stream = self.projections
        normed, found = views["normed"], views["found"]
        token = kernels.linear(kernels.rms_norm(at.target, self.embedding_norm, normed), of_embedding, at.target)
        wide = kernels.rms_norm(views["draft_hidden"], self.hidden_norm, views["streams_normed"]).view(
            count, -1, hidden
        )
        streams = views["streams"]
        for stream, out in zip(wide.unbind(1), streams.view(count, -1, hidden).unbind(1), strict=True):
            normed.copy_(stream)
            torch.add(kernels.linear(normed, of_stream, found), token, out=out)
        return streams

    def last(self, state: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [1, vocab] of the last row that `forward` returned, and that row as input of the next draft step [1,
        wide].
        """
        row = residual(self.network, scratch.rows(1))
        if state.shape[0] > 1:
            row.copy_(state[-1:])
        return self.network.logits(row, scratch), carried(self.network, row, scratch)


def residual(network: Decoder, views: PassRows) -> torch.Tensor:
    """The rows that Decoder.forward returns, in the buffers of a pass."""
    return views["x" if isinstance(network.norm, NormWeight) else "streams"]
