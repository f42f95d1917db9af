"""The tensors of a decoder in the order in which its layers use them, and the network over them; the families say which layers it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..kernels.reference import ReferenceKernels
from ..kernels.rows import RotaryTable
from ..quant.weight import Weight
from . import attention, delta, feed_forward
from .layers import Block, Decoder
from .named import Named
from .shape import DecoderConfig
from .spec import Destination, Source


def destinations(config: DecoderConfig) -> Iterator[Destination]:
    """Every tensor of the network, in the order in which the layers use them."""
    w, turn = config.widths, "plus_one" if config.gated else ""
    yield Destination("embedding", (Source("model.embed_tokens.weight", (w.vocab, w.hidden)),), 0, bits=8)
    for layer in range(config.layers):
        yield from (attention if config.is_attention(layer) else delta).wanted(config, layer)
        yield from feed_forward.wanted(config, layer)
    yield Destination("norm", (Source("model.norm.weight", (w.hidden,)),), config.layers + 1, wide=True, turn=turn)
    if not config.tied:
        yield Destination("head", (Source("lm_head.weight", (w.vocab, w.hidden)),), config.layers + 1, bits=8)


def build(config: DecoderConfig, weights: Mapping[str, Weight], kernels: ReferenceKernels, rotary: RotaryTable) -> Decoder:
    """The network over `weights` (keys of `destinations`); sequences may be as long as the rotary table."""
    named, blocks, paged, recurrent = Named(weights), [], 0, 0
    for layer in range(config.layers):
        if config.is_attention(layer):
            mixer = attention.build(config, named, layer, paged, rotary)
            paged += 1
        else:
            mixer = delta.build(config, named, layer, recurrent)
            recurrent += 1
        blocks.append(Block(mixer, feed_forward.build(config, named, layer)))
    embedding = named["embedding"]
    return Decoder(config.widths.shape, embedding, blocks, named.norm("norm", config.eps), weights.get("head", embedding), kernels)
