"""Table rows, found by hashes of the last few tokens, that are added to the residual streams (Qwen3.8's per-layer
embedding).

Source of the hashes and of the block: transformers' Qwen4Exp modeling file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ..cache.recurrent import RecurrentStates
from ..errors import ModelError
from ..kernels.delta_rule import convolve_chunk, convolve_step
from ..kernels.forward_batch import NormWeight, PrefillChunk, Slots, VerifyPass
from ..kernels.operands import LayerPart, NgramOperands, NgramWeights
from ..loader.checkpoint import Checkpoint
from ..loader.rows import read_rows
from ..loader.table import FileTable
from .layers import Pass
from .named import NamedWeights
from .shape import DecoderConfig, NgramShape
from .spec import FLOATING, Destination, Source

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_PRIME = 10007
# From this many tokens on, rows are computed together: one by one, Python takes 9 us per token of Qwen3.8.
MANY = 32
# Below it the root of a score has no slope.
SMALLEST = 1e-6


def wanted(config: DecoderConfig, layer: int) -> Iterator[Destination]:
    """The table stays in the file, in parts or as a whole."""
    shape, (wide, hidden), key, part = _shape(config), _widths(config), f"{layer}.", layer + 1
    name = f"model.layers.{layer}.ple."
    for which in ("key", "query", "conv"):
        yield Destination(
            f"{key}ngram_norm_{which}",
            (Source(f"{name}norm_{which}.weight", (wide,)),),
            part,
            wide=True,
            turn="plus_one",
        )
    yield Destination(key + "ngram_key", (Source(name + "key_proj.weight", (wide, shape.width)),), part)
    yield Destination(key + "ngram_value", (Source(name + "value_proj.weight", (hidden, shape.width)),), part)
    taps = Source(name + "conv1d.weight", (wide, 1, shape.taps))
    yield Destination(key + "ngram_taps", (taps,), part, wide=True, turn="taps_first")
    rows, width = table_rows(shape, shape.layers.index(layer)), shape.width // _rows_a_token(shape)
    each, table = -(-rows // shape.parts), name + "ple_embedding.ngram_embedding."
    starts = range(0, rows, each)
    parts = tuple(
        Source(f"{table}shard_{i}.weight", (min(each, rows - start), width)) for i, start in enumerate(starts)
    )
    whole = Source(table + "weight", (rows, width))
    yield Destination(key + "ngram_table", parts, part, bits=FLOATING, joined=whole, used=0.0, in_file=True)


def check_stored(config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Compare the checkpoint's stored hash constants with those computed here. ModelError where they differ: other rows
    would be read.
    """
    shape = _shape(config)
    for table_index, layer in enumerate(shape.layers):
        sizes = head_sizes(shape, table_index)
        computed = {
            "layer_multipliers": multipliers(shape, config.widths.vocab, table_index),
            "ngram_heads_vocab_sizes": sizes,
            "ngram_heads_offsets": [0, *accumulate(sizes)][:-1],
        }
        for name, numbers in computed.items():
            info = checkpoint.tensors.get(f"model.layers.{layer}.ple.ple_embedding.{name}")
            if info is None:
                continue
            stored = (
                read_rows(info, range(info.shape[0])).tolist()
                if len(info.shape) == 1 and info.shape[0] == len(numbers)
                else None
            )
            if stored != numbers:
                shown = f"{info.dtype} {list(info.shape)}" if stored is None else f"{stored[:3]} and so on"
                raise ModelError(
                    f"tensor {info.name} has {shown}, and the hashes that config.json describes have {numbers[:3]} and"
                    " so on: other rows of the table would be read; the config and the weights belong to different"
                    " models"
                )


def build(config: DecoderConfig, weights: NamedWeights, layer: int, index: int) -> NgramBlock:
    """The block before `layer`; `index` counts only the layers that store states."""
    at, shape, streams = weights.of(layer), _shape(config), config.streams.count if config.streams else 1
    table_index = shape.layers.index(layer)

    def norm(which: str) -> NormWeight:
        return NormWeight(at.plain(f"ngram_norm_{which}").view(streams, config.widths.hidden), config.eps)

    sizes, taps = head_sizes(shape, table_index), at.plain("ngram_taps").view(shape.taps, -1)
    return NgramBlock(
        shape=shape,
        index=index,
        factors=multipliers(shape, config.widths.vocab, table_index),
        heads=list(zip(sizes, [0, *accumulate(sizes)], strict=False)),
        table=at.table("ngram_table"),
        weights=NgramWeights(
            at["ngram_key"], at["ngram_value"], norm("key"), norm("query"), norm("conv"), taps, shape.size
        ),
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


def head_sizes(shape: NgramShape, table_index: int) -> list[int]:
    """Row counts per head of table `table_index`: consecutive primes from `base` on, across all tables."""
    count, prime, found = _rows_a_token(shape), shape.base - 1, []
    for number in range((table_index + 1) * count):
        prime = _next_prime(prime)
        if number >= table_index * count:
            found.append(prime)
    return found


def table_rows(shape: NgramShape, table_index: int) -> int:
    """Rows of table `table_index`, padding rows included."""
    return -(-sum(head_sizes(shape, table_index)) // shape.multiple) * shape.multiple


def _next_prime(after: int) -> int:
    found = after + 1
    while not is_prime(found):
        found += 1
    return found


def is_prime(number: int) -> bool:
    """For numbers below 2^40: Miller and Rabin's test, whose witnesses 2 to 13 are enough below 3,474,749,660,383
    (Jaeschke 1993).
    """
    if number < 2:
        return False
    witnesses = (2, 3, 5, 7, 11, 13)
    if any(number % small == 0 for small in witnesses):
        return number in witnesses
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    return all(_is_witness_passed(number, witness, odd, twos) for witness in witnesses)


def _is_witness_passed(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def multipliers(shape: NgramShape, vocab: int, table_index: int) -> list[int]:
    """Odd factors of the last ids, from splitmix64 (Steele et al. 2014); no product leaves 63 bits."""
    half, found = max(1, ((1 << 63) - 1) // vocab // 2), []
    for number in range(shape.size):
        value = (shape.seed + _LAYER_PRIME * table_index + _GAMMA * (number + 1) + _GAMMA) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(2 * ((value ^ (value >> 31)) % half) + 1)
    return found


@dataclass(slots=True)
class NgramBlock:
    """Adds the value of each token's table rows to each stream, scaled by the match of key and stream, plus a
    convolution of it over time.

    `heads`: per row of a token the size of its part of the table, and that part's first row.
    """

    shape: NgramShape
    index: int
    factors: list[int]
    heads: list[tuple[int, int]]
    table: FileTable
    weights: NgramWeights
    # Rows of the current pass, grouped by token.
    coming: list[int] | None = None

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self.weights.key, self.weights.value

    def begin(self, at: Pass, /) -> None:
        """The rows follow from the ids alone: the file reads start before the first layer computes."""
        slots, states = self._states(at)
        held = states.of_layer(self.index)[1]
        pasts = held.numpy() if held.is_cpu else held  # on the host without tensors, which take ten times as long
        ids, back = at.batch.ids or at.ids.tolist(), self.shape.size - 1
        batch = at.batch
        if isinstance(batch, PrefillChunk) and len(batch.before) >= back:
            before = [batch.before[-back:]]
        else:
            sources = slots.source[: 1 if batch.one_sequence else None]
            found = (
                pasts[sources.numpy()] if held.is_cpu else held.index_select(0, sources)
            )  # one wait for a device, not one per row
            before = [[int(token) + self.shape.end for token in past] for past in found.tolist()]
        pieces = (
            [[*before[0], *ids]]
            if batch.one_sequence
            else [[*past, token] for past, token in zip(before, ids, strict=True)]
        )
        self.coming = [row for seen in pieces for row in self._rows(seen)]
        ends = [pieces[0][: back + row] for row in range(1, len(ids) + 1)] if isinstance(batch, VerifyPass) else pieces
        kept = [[float(token - self.shape.end) for token in seen[-back:]] for seen in ends]
        if held.is_cpu:
            held.numpy()[slots.target.numpy()] = kept
        else:
            held.index_copy_(0, slots.target, torch.tensor(kept).to(held.device, non_blocking=True))
        self.table.announce(self.coming)

    def fetch(self, at: Pass, /) -> None:
        """Wait for the rows."""
        if self.coming is None:
            raise ValueError("the pass was not begun")
        rows, self.coming = self.coming, None
        self.table.read(rows, at.views["ngram"].view(len(rows), -1))

    def run(self, at: Pass, /) -> None:
        kernels, views, weights = at.kernels, at.views, self.weights
        slots, states = self._states(at)
        held = states.of_layer(self.index)[0]
        verify = isinstance(at.batch, VerifyPass)
        if at.batch.state_per_row:
            rows = NgramOperands(
                views["ngram"], views["streams"], views["ngram_keys"], views["ngram_values"], held, slots, verify
            )
            if kernels.add_ngrams(weights, rows):
                return
        added = self._gated(at)
        normed = kernels.rms_norm(added, weights.conv_norm, torch.empty_like(added)).flatten(1).float()
        if verify:
            row_slices = [slice(row, row + 1) for row in range(len(normed))]
            convolved = torch.cat(
                [self._convolved(states, slots.part(one), normed[one], step=True) for one in row_slices]
            )
        else:
            convolved = self._convolved(states, slots, normed, step=at.batch.state_per_row)
        views["streams"].add_(added.flatten(1)).add_(convolved)

    def _convolved(self, states: RecurrentStates, slots: Slots, normed: torch.Tensor, *, step: bool) -> torch.Tensor:
        """The convolution over time of each sequence's next rows, or of one chunk; updates the windows."""
        windows, weights = states.read(self.index, slots.source)[0], self.weights
        if step:
            convolved, windows = convolve_step(normed, windows, weights.taps, weights.apart)
        else:
            convolved, window = convolve_chunk(normed, windows[0], weights.taps, weights.apart)
            windows = window[None]
        states.of_layer(self.index)[0].index_copy_(0, slots.target, windows)
        return convolved

    @staticmethod
    def _states(at: Pass) -> tuple[Slots, RecurrentStates]:
        if at.cache.states is None or at.batch.slots is None:
            raise ValueError("the session's cache has no recurrent states")
        return at.batch.slots, at.cache.states

    def _gated(self, at: Pass) -> torch.Tensor:
        """The value of the rows for each stream, [T, streams, hidden]."""
        kernels, views, weights = at.kernels, at.views, self.weights
        embedded, streams = views["ngram"], views["streams"]
        heads = (embedded.shape[0], *weights.key_norm.weight.shape)
        keys = kernels.linear(embedded, weights.key, views["ngram_keys"]).view(heads)
        values = kernels.linear(embedded, weights.value, views["ngram_values"])
        queries = kernels.rms_norm(streams.view(heads), weights.query_norm, views["streams_normed"].view(heads))
        scores = (kernels.rms_norm(keys, weights.key_norm, keys) * queries).float().sum(-1) * heads[-1] ** -0.5
        roots = scores.abs().clamp_min(SMALLEST).sqrt() * scores.sign()
        return roots.sigmoid()[..., None].to(values.dtype) * values[:, None]

    def _rows(self, seen: list[int]) -> list[int]:
        """The table's rows for each token of `seen` except the first size - 1, which are only context.

        An n-gram does not cross an end token or the start of the sequence: earlier tokens count as ends.
        """
        if len(seen) > MANY:
            return self._many_rows(np.array(seen, dtype=np.int64)).ravel().tolist()
        end, size, heads, found = self.shape.end, self.shape.size, self.shape.heads, []
        for index in range(size - 1, len(seen)):
            mixed, cut = seen[index] * self.factors[0], False
            for back in range(1, size):
                token = end if cut else seen[index - back]
                cut = token == end
                mixed ^= token * self.factors[back]
                found += [mixed % count + first for count, first in self.heads[(back - 1) * heads : back * heads]]
        return found

    def _many_rows(self, seen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As `_rows`, [tokens, rows]."""
        size, heads, count = self.shape.size, self.shape.heads, len(seen) - self.shape.size + 1
        mixed, cut, found = seen[size - 1 :] * self.factors[0], np.zeros(count, dtype=bool), []
        for back in range(1, size):
            token = np.where(cut, self.shape.end, seen[size - 1 - back : len(seen) - back])
            cut = token == self.shape.end
            mixed = mixed ^ token * self.factors[back]
            own = np.array(self.heads[(back - 1) * heads : back * heads], dtype=np.int64)
            found.append(mixed[:, None] % own[:, 0] + own[:, 1])
        return np.concatenate(found, axis=1)
