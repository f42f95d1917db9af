"""Rows of a table, found by hashes of the last few tokens, that are let into the residual streams (Qwen3.8's per-layer embedding).

Source of the hashes and of the block: transformers' Qwen4Exp modeling file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..cache.recurrent import RecurrentStates
from ..errors import ModelError
from ..kernels.delta import convolve_chunk, convolve_step
from ..kernels.rows import NormWeight, Slots
from ..loader.checkpoint import Checkpoint
from ..loader.rows import read_rows
from ..loader.table import FileTable
from ..quant.weight import Weight
from .layers import Pass
from .named import Named
from .shape import DecoderConfig, NgramShape
from .spec import FLOATING, Destination, Source

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_PRIME = 10007
# Below it a score's root has no slope.
SMALLEST = 1e-6


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The table stays in the file, in parts or as a whole."""
    shape, (wide, hidden), key, part = _shape(config), _widths(config), f"{layer}.", layer + 1
    name = f"model.layers.{layer}.ple."
    for which in ("key", "query", "conv"):
        yield Destination(f"{key}ngram_norm_{which}", (Source(f"{name}norm_{which}.weight", (wide,)),), part, wide=True, turn="plus_one")
    yield Destination(key + "ngram_key", (Source(name + "key_proj.weight", (wide, shape.width)),), part)
    yield Destination(key + "ngram_value", (Source(name + "value_proj.weight", (hidden, shape.width)),), part)
    taps = Source(name + "conv1d.weight", (wide, 1, shape.taps))
    yield Destination(key + "ngram_taps", (taps,), part, wide=True, turn="taps_first")
    rows, width = table_rows(shape, shape.layers.index(layer)), shape.width // _rows_a_token(shape)
    each, table = -(-rows // shape.parts), name + "ple_embedding.ngram_embedding."
    starts = range(0, rows, each)
    parts = tuple(Source(f"{table}shard_{i}.weight", (min(each, rows - start), width)) for i, start in enumerate(starts))
    whole = Source(table + "weight", (rows, width))
    yield Destination(key + "ngram_table", parts, part, bits=FLOATING, joined=whole, used=0.0, in_file=True)


def check_stored(config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Compare what a checkpoint has stored of its hashes with what is computed here. ModelError where they differ: rows would be others."""
    shape = _shape(config)
    for place, layer in enumerate(shape.layers):
        sizes = head_sizes(shape, place)
        computed = {
            "layer_multipliers": multipliers(shape, config.widths.vocab, place),
            "ngram_heads_vocab_sizes": sizes,
            "ngram_heads_offsets": [0, *accumulate(sizes)][:-1],
        }
        for name, numbers in computed.items():
            info = checkpoint.tensors.get(f"model.layers.{layer}.ple.ple_embedding.{name}")
            if info is None:
                continue
            stored = read_rows(info, range(info.shape[0])).tolist() if len(info.shape) == 1 and info.shape[0] == len(numbers) else None
            if stored != numbers:
                told = f"{info.dtype} {list(info.shape)}" if stored is None else f"{stored[:3]} and so on"
                raise ModelError(
                    f"tensor {info.name} has {told}, and the hashes that config.json describes have {numbers[:3]} and so on: other rows of "
                    "the table would be read; the config and the weights belong to different models"
                )


def build(config: DecoderConfig, weights: Named, layer: int, index: int) -> NgramBlock:
    """The block before `layer`; `index` is its place among the layers that leave states."""
    at, shape, streams = weights.of(layer), _shape(config), config.streams.count if config.streams else 1
    place = shape.layers.index(layer)

    def norm(which: str) -> NormWeight:
        return NormWeight(at.plain(f"ngram_norm_{which}").view(streams, config.widths.hidden), config.eps)

    sizes = head_sizes(shape, place)
    return NgramBlock(
        shape=shape,
        index=index,
        factors=multipliers(shape, config.widths.vocab, place),
        sizes=torch.tensor(sizes),
        offsets=torch.tensor([0, *accumulate(sizes)][:-1]),
        table=at.table("ngram_table"),
        key=at["ngram_key"],
        value=at["ngram_value"],
        key_norm=norm("key"),
        query_norm=norm("query"),
        conv_norm=norm("conv"),
        taps=at.plain("ngram_taps").view(shape.taps, -1),
    )


def _shape(config: DecoderConfig) -> NgramShape:
    if config.ngrams is None:
        raise ValueError("the family has no n-gram blocks")
    return config.ngrams


def _widths(config: DecoderConfig) -> tuple[int, int]:
    hidden = config.widths.hidden
    return hidden * (config.streams.count if config.streams else 1), hidden


def _rows_a_token(shape: NgramShape) -> int:
    return (shape.size - 1) * shape.heads


def head_sizes(shape: NgramShape, place: int) -> list[int]:
    """Rows of each head's part of table `place`: primes from `base` on, going on from table to table."""
    count, prime, found = _rows_a_token(shape), shape.base - 1, []
    for number in range((place + 1) * count):
        prime = _next_prime(prime)
        if number >= place * count:
            found.append(prime)
    return found


def table_rows(shape: NgramShape, place: int) -> int:
    """Rows of table `place`, those included that only fill it up."""
    return -(-sum(head_sizes(shape, place)) // shape.multiple) * shape.multiple


def _next_prime(after: int) -> int:
    found = after + 1
    while found < 2 or any(found % divisor == 0 for divisor in range(2, math.isqrt(found) + 1)):
        found += 1
    return found


def multipliers(shape: NgramShape, vocab: int, place: int) -> list[int]:
    """Odd factors of the last ids, from splitmix64 (Steele et al. 2014); no product leaves 63 bits."""
    half, found = max(1, ((1 << 63) - 1) // vocab // 2), []
    for number in range(shape.size):
        value = (shape.seed + _LAYER_PRIME * place + _GAMMA * (number + 1) + _GAMMA) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(2 * ((value ^ (value >> 31)) % half) + 1)
    return found


@dataclass(slots=True)
class NgramBlock:
    """Adds to each stream the value of the tokens' rows, as far as their key and the stream agree, and a convolution of that over time.

    key [streams * hidden, width], value [hidden, width]; norms [streams, hidden]; taps fp32 [K, streams * hidden], `size` tokens apart.
    """

    shape: NgramShape
    index: int
    factors: list[int]
    sizes: torch.Tensor
    offsets: torch.Tensor
    table: FileTable
    key: Weight
    value: Weight
    key_norm: NormWeight
    query_norm: NormWeight
    conv_norm: NormWeight
    taps: torch.Tensor
    captured: bool = False
    # The rows of the pass under way [T, rows a token], and what is kept of its ids.
    coming: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.key, self.value

    def begin(self, at: Pass, /) -> None:
        """Its rows follow from the ids alone: the files are asked for them before the first layer computes."""
        slots, states = self._states(at)
        _, pasts = states.read(self.index, slots.source)
        self.coming = self._rows(at.ids.cpu(), pasts.cpu(), chunk=at.rows.start is not None)
        self.table.announce(self.coming[0])

    def run(self, at: Pass, /) -> None:
        kernels, views = at.kernels, at.views
        if self.coming is None:
            raise ValueError("the pass was not begun")
        (rows, pasts), self.coming = self.coming, None
        slots, states = self._states(at)
        windows, _ = states.read(self.index, slots.source)
        embedded = views["ngram"].copy_(self.table.read(rows.view(-1)).view(views["ngram"].shape))
        added = self._gated(at, embedded)
        normed = kernels.rms_norm(added, self.conv_norm, torch.empty_like(added)).flatten(1).float()
        if at.rows.start is None:
            convolved, windows = convolve_step(normed, windows, self.taps, self.shape.size)
        else:
            convolved, window = convolve_chunk(normed, windows[0], self.taps, self.shape.size)
            windows = window[None]
        states.write(self.index, slots.target, (windows, pasts.to(windows.device)))
        views["streams"].add_(added.flatten(1)).add_(convolved)

    @staticmethod
    def _states(at: Pass) -> tuple[Slots, RecurrentStates]:
        if at.cache.states is None or at.rows.slots is None:
            raise ValueError("the session's cache has no recurrent states")
        return at.rows.slots, at.cache.states

    def _gated(self, at: Pass, embedded: torch.Tensor) -> torch.Tensor:
        """The value of the rows for each stream, [T, streams, hidden]."""
        kernels, views = at.kernels, at.views
        heads = (embedded.shape[0], *self.key_norm.weight.shape)
        keys = kernels.linear(embedded, self.key, views["ngram_keys"]).view(heads)
        values = kernels.linear(embedded, self.value, views["ngram_values"])
        queries = kernels.rms_norm(views["streams"].view(heads), self.query_norm, views["streams_normed"].view(heads))
        scores = (kernels.rms_norm(keys, self.key_norm, keys) * queries).float().sum(-1) * heads[-1] ** -0.5
        roots = scores.abs().clamp_min(SMALLEST).sqrt() * scores.sign()
        return roots.sigmoid()[..., None].to(values.dtype) * values[:, None]

    def _rows(self, ids: torch.Tensor, pasts: torch.Tensor, *, chunk: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The table's rows for each token [T, rows a token], and what is kept of the ids for the next pass [S, size - 1].

        An end, or the beginning, is not reached over: what lies before it counts as ends.
        """
        end, size = self.shape.end, self.shape.size
        before = pasts.long() + end
        seen = torch.cat((before[0], ids)).unfold(0, size, 1) if chunk else torch.cat((before, ids[:, None]), dim=1)
        mixed, cut, found = seen[:, -1] * self.factors[0], torch.zeros(len(seen), dtype=torch.bool), []
        for back in range(1, size):
            token = torch.where(cut, end, seen[:, -1 - back])
            cut = cut | (token == end)
            mixed = mixed ^ (token * self.factors[back])
            heads = slice((back - 1) * self.shape.heads, back * self.shape.heads)
            found.append(mixed[:, None] % self.sizes[heads] + self.offsets[heads])
        kept = seen[-1:, 1:] if chunk else seen[:, 1:]
        return torch.cat(found, dim=1), (kept - end).float()
