"""The parts of a decoder: widths, the rows of a pass, and blocks of layers; none depends on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import torch

from ..cache.paged import PagedKV
from ..kernels.forward_batch import FEW_ROWS, ForwardBatch, HeadShape, NormWeight
from ..kernels.operands import ConnectionOperands, LayerPart
from ..kernels.reference import ReferenceKernels
from ..loader.table import FileTable
from ..memory.lease import Lease, carved_bytes
from ..quant.weight import Weight


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A pass buffer in addition to those of a dense decoder. `read`: a product reads it; `halves`: only for 16-bit
    activations.
    """

    name: str
    width: int
    read: bool = False
    halves: bool = False


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a decoder's intermediate rows, which size its scratch; `intermediate` 0: no dense feed-forward."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    more: tuple[BufferSpec, ...] = ()

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim)

    @property
    def columns(self) -> int:
        """The widest row that a product reads."""
        return max(
            self.hidden, self.shape.queries, self.intermediate, *(buffer.width for buffer in self.more if buffer.read)
        )

    def rows(self, dtype: torch.dtype) -> dict[str, int]:
        """The buffers of a pass with such activations: name and width."""
        shape = self.shape
        found = {"x": self.hidden, "normed": self.hidden, "qkv": shape.qkv, "mixed": shape.queries}
        if self.intermediate:
            found |= {"both": 2 * self.intermediate, "gated": self.intermediate}
        return found | {buffer.name: buffer.width for buffer in self.more if dtype.itemsize == 2 or not buffer.halves}


# Views of the scratch for a pass of a given row count, by the names of Widths.rows.
PassRows: TypeAlias = Mapping[str, torch.Tensor]


class Scratch:
    """Buffers of a pass, taken once from a lease and reused by every layer and step.

    The views for up to FEW_ROWS rows are made once: a decode step makes no tensors.
    """

    def __init__(self, lease: Lease, widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.logit_rows = logit_rows
        self._rows = {name: lease.carve((tokens, width), dtype) for name, width in widths.rows(dtype).items()}
        self._logits = lease.carve((logit_rows, widths.vocab), dtype)
        self._few = [self._view(count) for count in range(min(FEW_ROWS, tokens) + 1)]
        self._few_logits = [self._logits[:count] for count in range(min(FEW_ROWS, logit_rows) + 1)]

    @staticmethod
    def nbytes(widths: Widths, tokens: int, logit_rows: int, dtype: torch.dtype) -> int:
        """Bytes for passes of `tokens` rows and for the scores of `logit_rows` of them, alignment included."""
        sizes = [(tokens, width) for width in widths.rows(dtype).values()] + [(logit_rows, widths.vocab)]
        return sum(carved_bytes(size, dtype) for size in sizes)

    def rows(self, count: int) -> PassRows:
        """The buffers of a pass of `count` rows. ValueError for more than `tokens`."""
        return self._few[count] if count < len(self._few) else self._view(count)

    def logits(self, count: int) -> torch.Tensor:
        """[count, vocab]. ValueError for more than `logit_rows`."""
        if count < len(self._few_logits):
            return self._few_logits[count]
        if count > self.logit_rows:
            raise ValueError(f"{count} rows of scores are more than the {self.logit_rows} that are reserved")
        return self._logits[:count]

    def _view(self, count: int) -> PassRows:
        if count > self.tokens:
            raise ValueError(f"a pass of {count} rows is longer than the {self.tokens} that are reserved")
        return {name: rows[:count] for name, rows in self._rows.items()}


@dataclass(slots=True)
class Pass:
    """The state that all layers of a pass share: ids [T], positions of the rows, the session's cache, the buffers
    (`views`: of all rows).

    A layer reads `source` [T, hidden], normed by its own norm if it has one, and adds its output to `target` [T,
    hidden]. In an ordinary decoder both are the residual rows.
    """

    ids: torch.Tensor
    batch: ForwardBatch
    cache: PagedKV
    scratch: Scratch
    views: PassRows
    kernels: ReferenceKernels
    source: torch.Tensor
    target: torch.Tensor
    waiting: ConnectionOperands | None = None

    def let_in(self) -> None:
        """Add the last layer's output to the residual streams, unless the next layer has already done so (see
        Streamed).
        """
        if self.waiting is not None:
            self.kernels.inject(self.waiting)
            self.waiting = None

    def project(self, norm: NormWeight | None, weight: Weight, out: torch.Tensor) -> None:
        """out [T, rows] = the source (normed where there is a norm) times a weight."""
        if norm is None:
            self.kernels.linear(self.source, weight, out)
        else:
            self.kernels.norm_linear(self.source, norm, weight, out, self.views["normed"])

    def normed(self, norm: NormWeight | None) -> torch.Tensor:
        """The source (normed where there is a norm), for several products."""
        return self.source if norm is None else self.kernels.rms_norm(self.source, norm, self.views["normed"])


class Layer(Protocol):
    """Half of a block: it reads the source of a pass and adds its output to the target.

    `parts` are its operands for kernels. Kernels state whether they accept all of them without reading values on the
    host (ReferenceKernels.captures); then a graph can capture a decode step. The step must consist of kernel calls
    alone, none of which returns False (see ReferenceKernels.run_captured).
    """

    @property
    def parts(self) -> tuple[LayerPart, ...]: ...

    def run(self, at: Pass, /) -> None: ...


class EarlyLayer(Layer, Protocol):
    """A layer that sees a pass before the first layer computes, and starts to fetch its file rows then."""

    @property
    def table(self) -> FileTable: ...

    def begin(self, at: Pass, /) -> None: ...

    def fetch(self, at: Pass, /) -> None: ...


class Mixer(Protocol):
    """Reads the residual streams [T, streams * hidden] of a decoder that has several."""

    @property
    def parts(self) -> tuple[LayerPart, ...]: ...

    def mix(self, streams: torch.Tensor, views: PassRows, kernels: ReferenceKernels, /) -> torch.Tensor: ...


@dataclass(slots=True)
class Block:
    """Tokens are mixed, then a feed-forward is applied per token; `before` may change the residual first."""

    mixer: Layer
    forward: Layer
    before: EarlyLayer | None = None


BetweenLayers = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class Decoder:
    """Embedding, blocks, final norm (or mixer of residual streams) and head, over the caches of a session's
    sequences.
    """

    shape: HeadShape
    embedding: Weight
    blocks: list[Block]
    norm: NormWeight | Mixer
    head: Weight
    kernels: ReferenceKernels
    early: tuple[EarlyLayer, ...] = field(init=False)
    # Ranges first..last-1 of blocks that compute without waiting for file rows in between.
    segments: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.early = tuple(block.before for block in self.blocks if block.before is not None)
        begins = [0, *(index for index, block in enumerate(self.blocks) if block.before is not None and index)]
        self.segments = tuple(zip(begins, [*begins[1:], len(self.blocks)], strict=True))

    def prepare(self, ids: torch.Tensor, batch: ForwardBatch, kv: PagedKV, scratch: Scratch) -> None:
        """Do the host's part of a decode step, such as reading file rows, before a `forward` that is `prepared`."""
        if self.early:
            views = scratch.rows(ids.shape[0])
            at = Pass(ids, batch, kv, scratch, views, self.kernels, views["x"], views["x"])
            for early in self.early:
                early.begin(at)
            for early in self.early:
                early.fetch(at)

    def forward(
        self,
        ids: torch.Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        scratch: Scratch,
        between: BetweenLayers | None = None,
        *,
        prepared: bool = False,
    ) -> torch.Tensor:
        """Read ids [T] int64 at the positions of `batch`; returns the residual [T, hidden], or [T, streams * hidden],
        valid until the next call.

        The cache blocks that `batch` names must already belong to their sequences; the caller advances the lengths.
        `between(k, state)` is called with the state after k blocks (k = 0: the embeddings) and may raise to stop.
        """
        views = scratch.rows(ids.shape[0])
        x = views["x"]
        at = Pass(ids, batch, kv, scratch, views, self.kernels, x, x)
        self.kernels.embed(ids, self.embedding, x)
        for rows, found in batch.pictures:
            x[rows].copy_(found[0])
        if not isinstance(self.norm, NormWeight):
            streams = views["streams"]
            streams.view(x.shape[0], -1, x.shape[1]).copy_(x[:, None])
            x = streams
        for early in () if prepared else self.early:
            early.begin(at)
        if between is None and batch.state_per_row and not batch.pictures:
            for first, last in self.segments:
                if not prepared:
                    self._fetch(at, first)
                self.kernels.run_captured(batch, first, partial(self._run, at, first, last))
            return x
        for index in range(len(self.blocks)):
            if between is not None:
                between(index, x)
            self._fetch(at, index)
            self._run(at, index, index + 1)
            for rows, found in batch.pictures:
                if index + 1 < len(found):
                    x[rows].add_(found[index + 1])
        if between is not None:
            between(len(self.blocks), x)
        return x

    def _fetch(self, at: Pass, index: int) -> None:
        before = self.blocks[index].before
        if before is not None:
            before.fetch(at)

    def _run(self, at: Pass, first: int, last: int) -> None:
        for block in self.blocks[first:last]:
            if block.before is not None:
                at.let_in()
                block.before.run(at)
            block.mixer.run(at)
            block.forward.run(at)
        at.let_in()

    def logits(self, state: torch.Tensor, scratch: Scratch, batch: ForwardBatch | None = None) -> torch.Tensor:
        """Scores [rows, vocab] for what `forward` returned, rows <= scratch.logit_rows; valid until the next call.

        `batch`: the decode step, if it was one.
        """
        scores = scratch.logits(state.shape[0])
        work = partial(self._score, state, scratch, scores)
        if batch is None:
            work()
        else:
            self.kernels.run_captured(batch, len(self.blocks), work)
        return scores

    def _score(self, state: torch.Tensor, scratch: Scratch, scores: torch.Tensor) -> None:
        if isinstance(self.norm, NormWeight):
            self.kernels.norm_linear(state, self.norm, self.head, scores, scratch.rows(state.shape[0])["normed"])
        else:
            self.kernels.linear(self.final(state, scratch), self.head, scores)

    def final(self, state: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """The head's input for what `forward` returned: [rows, hidden], valid until the next call."""
        views = scratch.rows(state.shape[0])
        if isinstance(self.norm, NormWeight):
            return self.kernels.rms_norm(state, self.norm, views["normed"])
        return self.norm.mix(state, views, self.kernels)

    def table_cost(self) -> tuple[float, int]:
        """Seconds that passes waited for table rows from files, and the bytes of those rows, since the network was
        made.
        """
        return sum(layer.table.seconds for layer in self.early), sum(layer.table.bytes for layer in self.early)

    @property
    def captured(self) -> bool:
        """Whether a decode step can be a CUDA graph after `prepare`: no kernel reads a value on the host."""
        layers = [
            layer for block in self.blocks for layer in (block.mixer, block.forward, block.before) if layer is not None
        ]
        mixer = () if isinstance(self.norm, NormWeight) else self.norm.parts
        return self.kernels.captures(
            self.shape, [*(part for layer in layers for part in layer.parts), *mixer, self.head]
        )
