"""The tensors of a decoder in order of use, and the network over them; each family declares its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ..kernels.forward_batch import RotaryTable
from ..kernels.reference import ReferenceKernels
from ..loader.table import FileTable
from ..quant.weight import Weight
from . import (
    attention,
    delta,
    draft,
    feed_forward,
    indexed,
    ngram,
    streams,
)
from .layers import Block, Decoder, Layer
from .named import NamedWeights
from .shape import DecoderConfig
from .spec import Destination, Source


def destinations(config: DecoderConfig) -> Iterator[Destination]:
    """Every tensor of the network, in order of use."""
    w = config.widths
    yield Destination("embedding", (Source("model.embed_tokens.weight", (w.vocab, w.hidden)),), 0, bits=8)
    for layer in range(config.layers):
        yield from _wanted(config, layer)
    last = config.layers + 1
    if config.streams is not None:
        yield from streams.wanted(config, "mixer", "model.hyper_connection_mixer", last, inject=False)
    else:
        yield Destination("norm", (Source("model.norm.weight", (w.hidden,)),), last, wide=True, turn=config.norm_turn)
    if not config.tied and not config.headless:
        yield Destination("head", (Source("lm_head.weight", (w.vocab, w.hidden)),), last, bits=8)
    if config.draft:
        yield from drafting(config)


def drafting(config: DecoderConfig) -> Iterator[Destination]:
    """The tensors of the draft layer, whether or not it is opened."""
    yield from draft.wanted(config, _wanted(draft.layer_config(config), config.layers))


def _wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    connections = ("attn", "mlp") if config.streams is not None else ()
    if config.ngrams is not None and layer in config.ngrams.layers:
        yield from ngram.wanted(config, layer)
    for connection in connections:
        name = f"model.layers.{layer}.{connection}_hyper_connection"
        yield from streams.wanted(config, f"{layer}.{connection}", name, layer + 1, inject=True)
    yield from (attention if config.is_attention(layer) else delta).wanted(config, layer)
    if config.indexer is not None and config.is_attention(layer):
        yield from indexed.wanted(config, layer)
    yield from feed_forward.wanted(config, layer)


def build(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    kernels: ReferenceKernels,
    rotary: RotaryTable,
    tables: Mapping[str, FileTable] = MappingProxyType({}),
) -> Decoder:
    """The network over `weights` and `tables` (by destination key). The rotary table limits the sequence length."""
    named, blocks, paged, stateful = NamedWeights(weights, tables), [], 0, 0
    for layer in range(config.layers):
        before = None
        if config.ngrams is not None and layer in config.ngrams.layers:
            before = ngram.build(config, named, layer, stateful)
            stateful += 1
        if not config.is_attention(layer):
            mixer = delta.build(config, named, layer, stateful)
            stateful += 1
        else:
            mixer = _attention(config, named, layer, (paged, stateful), rotary)
            paged, stateful = paged + 1, stateful + (config.indexer is not None)
        mixer, forward = _joined(config, named.of(layer), mixer, feed_forward.build(config, named, layer))
        blocks.append(Block(mixer, forward, before))
    embedding = named["embedding"]
    head, shape = weights.get("head", embedding), config.widths.shape
    if config.streams is not None:
        return Decoder(shape, embedding, blocks, streams.build(config, named, "mixer", inject=False), head, kernels)
    return Decoder(shape, embedding, blocks, named.norm("norm", config.eps), head, kernels)


def build_draft(
    config: DecoderConfig, weights: Mapping[str, Weight], network: Decoder, rotary: RotaryTable
) -> draft.Draft:
    """The draft layer for `network`, over `weights` (by destination key); it has its own cache."""
    own, named = draft.layer_config(config), NamedWeights(weights, {})
    at = named.of(config.layers)
    mixer, forward = (
        _attention(own, named, config.layers, (0, 0), rotary),
        feed_forward.build(own, named, config.layers),
    )
    mixer, forward = _joined(own, at, mixer, forward)
    last = (
        streams.build(config, named, "draft_mixer", inject=False)
        if config.streams
        else named.norm("draft_norm", config.eps)
    )
    layer = Decoder(network.shape, network.embedding, [Block(mixer, forward)], last, network.head, network.kernels)
    projections = ("draft_fc_embedding", "draft_fc_hidden") if config.streams else ("draft_fc",)
    of_token, of_state = (named.norm(f"draft_{which}_norm", config.eps) for which in ("embedding", "hidden"))
    return draft.Draft(layer, of_token, of_state, tuple(named[key] for key in projections))


def _attention(
    config: DecoderConfig, named: NamedWeights, layer: int, indices: tuple[int, int], rotary: RotaryTable
) -> Layer:
    """Attention with or without an indexer. `indices`: its index among the layers that store keys and values, and among
    those that store states.
    """
    if config.indexer is None:
        return attention.build(config, named, layer, indices[0], rotary)
    return indexed.build(config, named, layer, indices, rotary)


def _joined(config: DecoderConfig, at: NamedWeights, mixer: Layer, forward: Layer) -> tuple[Layer, Layer]:
    """The two halves of a block, each wrapped in its hyper-connection where the residual has several streams."""
    if config.streams is None:
        return mixer, forward
    connections = [streams.build(config, at, connection, inject=True) for connection in ("attn", "mlp")]
    return streams.Streamed(connections[0], mixer), streams.Streamed(connections[1], forward)
