"""Runs sequences through the network: prefill in chunks, decode step by step, several sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ..cache.paged import PagedKV, SequenceKV
from ..core import CancelCheck, Logprobs
from ..kernels.forward_batch import BLOCK, FEW_ROWS, ForwardBatch, RotaryTable
from ..model.arrival import EMBEDDING, WeightArrival
from ..model.draft import carried, residual
from ..model.layers import BetweenLayers, Decoder, Scratch
from .buffers import ChunkBuffers, DecodeBuffers
from .drafting import HELD_ROWS, Drafting
from .picture_reader import PictureStopped, PictureTask
from .scoring import scored_rows
from .short_passes import ShortPasses

# Tokens per chunk: enough for matrix products at full rate, few enough to stop between two chunks.
CHUNK = 256
# On a GPU launching must take less time than computing; a chunk of this size takes about 20 ms.
CUDA_CHUNK = 1024
# A few hundred tokens select nearly all experts, so each pass reads all of them: a prompt should take few passes.
SPARSE_CUDA_CHUNK = 2048
# Rows of scores in memory at once when every position is scored: 16 rows of 152,000 are 10 MB.
SCORED_ROWS = 16


def chunk_rows(device: torch.device, *, sparse: bool) -> int:
    """Tokens per chunk on this device, for a network with experts (`sparse`) or without."""
    if device.type != "cuda":
        return CHUNK
    return SPARSE_CUDA_CHUNK if sparse else CUDA_CHUNK


def first_piece(tokens: int, rows: int, checkpoint: int = 0) -> int:
    """How many of `tokens` the next pass of at most `rows` takes.

    A pass of up to FEW_ROWS rows sums in another order than a larger one. No prompt ends in such a pass, so that its
    scores do not depend on how much of it came from the prefix cache. `checkpoint`: the pass ends after this many
    tokens, where a state is kept; 0 for none.
    """
    if checkpoint:
        return min(checkpoint, rows)
    left = tokens - rows
    return min(tokens, rows - FEW_ROWS if 0 < left <= FEW_ROWS < rows else rows)


def last_checkpoint(start: int, tokens: int) -> int:
    """How many of `tokens` at position `start` lie before the last block boundary that leaves more than FEW_ROWS; 0 for
    none."""
    return max(0, (start + tokens - FEW_ROWS - 1) // BLOCK * BLOCK - start)


class Stopped(Exception):  # noqa: N818 - a signal inside the engine, never seen outside
    """The caller cancelled in the middle of a chunk; the sequence is as it was before the chunk."""


class PassRestarted(Exception):  # noqa: N818 - a signal inside the engine, never seen outside
    """A prefill pass was given up because it is to be made again with one more prompt; its sequences are as they were
    before it."""


class Runner:
    """Runs sequences of `kv` through the network. Not thread-safe: its owner holds the lock.

    All scores that it returns are valid until the next pass.
    """

    def __init__(
        self,
        network: Decoder,
        kv: PagedKV,
        scratch: Scratch,
        buffers: tuple[ChunkBuffers, DecodeBuffers],
        gate: WeightArrival | None = None,
        drafting: Drafting | None = None,
        rotary: RotaryTable | None = None,
        short: ShortPasses | None = None,
    ) -> None:
        """`gate` waits for weights before they are used (see Destination.part); None when all are there. `rotary`: the
        network's, of a model that reads pictures. `short`: graphs of passes of a few dozen rows."""
        self.gate = gate
        self.short = short
        self.drafting = drafting
        self.rotary = rotary
        self.network = network
        self.kv = kv
        self.scratch = scratch
        self.chunk, self.buffers = buffers
        self._table_cost = (0.0, 0)

    @property
    def chunk_rows(self) -> int:
        """The most tokens of one pass."""
        return min(self.scratch.tokens, chunk_rows(self.kv.keys[0].device, sparse=True))

    def close(self) -> None:
        """Drop every tensor; the runner cannot be used afterwards."""
        if self.drafting is not None:
            self.drafting.close()
        if self.short is not None:
            self.short.close()
        del (
            self.short,
            self.drafting,
            self.rotary,
            self.network,
            self.kv,
            self.scratch,
            self.gate,
            self.chunk,
            self.buffers,
        )

    def prefill(
        self,
        sequence: SequenceKV,
        ids: Sequence[int],
        cancel: CancelCheck | None,
        report: Callable[[int], None],
        *,
        whole: bool = True,
        pictures: PictureTask | None = None,
        restart: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Prefill `ids` after the sequence, or one chunk of them where not `whole`; `report` gets how many are done.
        `pictures` are those of the whole sequence.

        Returns the scores [vocab] for the next token. `cancel` and `restart` are asked before each layer of each chunk,
        or once where the chunk is a graph.
        Raises Stopped when `cancel` is true, PassRestarted when `restart` is.
        """
        state, done = torch.empty(0), 0
        while done < len(ids):
            left = len(ids) - done
            checkpoint = 0 if sequence.cuts_anywhere else last_checkpoint(sequence.length, left)
            piece = ids[done : done + first_piece(left, self.chunk_rows, checkpoint)]
            state = self._forward(sequence, piece, cancel, restart=restart, before=ids[:done], pictures=pictures)
            self._keep_for_draft(sequence, piece, state)
            sequence.keep_checkpoint()
            done += len(piece)
            report(done)
            if not whole:
                break
        return self._scores_after(state, [len(state) - 1])[0]

    @property
    def reads_several(self) -> bool:
        """Whether one pass can prefill several prompts: where a sequence leaves only keys and values, no recurrent
        states."""
        return self.kv.states is None and self.drafting is None

    def prefill_several(
        self,
        sequences: Sequence[SequenceKV],
        prompts: Sequence[Sequence[int]],
        cancel: CancelCheck | None,
        restart: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Prefill prompt i after sequence i, all of them in one pass of up to `chunk_rows` rows; only where it
        `reads_several`.

        Returns the scores [sequences, vocab] after each. Raises as `prefill` does; then no sequence has changed.
        """
        if self.gate is not None:
            self.gate.fetch_rows([token for ids in prompts for token in ids])
        chunk, rows = self.chunk.fill_several(sequences, prompts)
        state = self.network.forward(chunk, rows, self.kv, self.scratch, self._between(cancel, restart))
        for sequence, ids in zip(sequences, prompts, strict=True):
            sequence.advance(len(ids))
        return self._scores_after(state, [part.stop - 1 for part, _ in rows.chunks])

    def decode(self, sequences: Sequence[SequenceKV], tokens: Sequence[int]) -> torch.Tensor:
        """One step of up to MAX_BATCH sequences: token i is appended to sequence i. Returns the scores [B, vocab] for
        the next tokens."""
        longest = self.buffers.fill(sequences, tokens)
        scores = self.buffers.step(len(sequences), longest)
        for sequence in sequences:
            sequence.advance(1)
            sequence.keep_checkpoint(written=True)
        if len(sequences) == 1:
            self.note_computed(sequences[0], tokens)
        return scores

    def check(self, sequence: SequenceKV, ids: Sequence[int]) -> torch.Tensor:
        """A verify pass over up to MAX_BATCH ids: scores [T, vocab] after each, as decode steps would give them.

        The sequence does not change until the caller advances it, by as many of the ids as were accepted.
        """
        chunk, rows = self.buffers.fill_verify(sequence, ids)
        scores = self._scores(self.network.forward(chunk, rows, self.kv, self.scratch))
        self.note_computed(sequence, ids, ahead=True)
        return scores

    def note_computed(self, sequence: SequenceKV, ids: Sequence[int], *, ahead: bool = False) -> None:
        """Tell the draft layer that a pass has computed a few ids: the sequence's last ones or, with `ahead`, ids after
        its end."""
        if self.drafting is not None:
            self._keep_for_draft(sequence, ids, residual(self.network, self.scratch.rows(len(ids))), ahead=ahead)

    def _keep_for_draft(
        self, sequence: SequenceKV, ids: Sequence[int], state: torch.Tensor, *, ahead: bool = False
    ) -> None:
        """Keep the residual rows of computed ids for the draft layer; `ahead`: of ids after the sequence's end."""
        if self.drafting is not None:
            start = sequence.length - (0 if ahead else len(ids))
            self.drafting.see(
                sequence,
                start,
                ids,
                carried(self.network, state[-HELD_ROWS:] if len(ids) > HELD_ROWS else state, self.scratch),
            )

    def logprobs(
        self,
        ids: Sequence[int],
        cancel: CancelCheck | None = None,
        *,
        top: int = 0,
        pictures: PictureTask | None = None,
    ) -> list[Logprobs]:
        """log p(ids[i+1] | ids[..i]) for every i, of the raw model, and the `top` likeliest ids there."""
        found: list[Logprobs] = []
        with self.kv.open(len(ids)) as sequence:
            for at in range(0, len(ids), self.chunk_rows):
                piece = ids[at : at + self.chunk_rows]
                state = self._forward(sequence, piece, cancel, pictures=pictures).clone()
                following = ids[at + 1 : at + 1 + len(state)]
                for row in range(0, len(following), SCORED_ROWS):
                    wanted = torch.tensor(following[row : row + SCORED_ROWS], device=state.device)
                    scores = self._scores(state[row : row + len(wanted)]).float()
                    found += scored_rows(scores, wanted, top)
        return found

    def states(self, ids: Sequence[int], after: Sequence[int], cancel: CancelCheck | None) -> torch.Tensor:
        """Residual states after the block counts `after`, concatenated: [tokens, hidden * len(after)] fp32 on the
        CPU."""
        rows: list[torch.Tensor] = []
        with self.kv.open(len(ids)) as sequence:
            for at in range(0, len(ids), self.chunk_rows):
                kept: dict[int, torch.Tensor] = {}
                self._forward(sequence, ids[at : at + self.chunk_rows], cancel, observe=_keeper(after, kept))
                rows.append(torch.cat([kept[index] for index in after], dim=1))
        return torch.cat(rows)

    def final_state(self, ids: Sequence[int], cancel: CancelCheck | None) -> torch.Tensor:
        """The last token's state after the final norm: [hidden] fp32 on the CPU."""
        with self.kv.open(len(ids)) as sequence:
            state = torch.empty(0)
            for at in range(0, len(ids), self.chunk_rows):
                state = self._forward(sequence, ids[at : at + self.chunk_rows], cancel)
            return self.network.final(state[-1:], self.scratch)[0].float().to("cpu", copy=True)

    def table_cost(self) -> tuple[float, int]:
        """Seconds and bytes that reading rows of tables in files has cost since this was last asked."""
        before, now = self._table_cost, self.network.table_cost()
        self._table_cost = now
        return now[0] - before[0], now[1] - before[1]

    def _scores_after(self, state: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """Scores after the rows `ends`, from the buffers of a decode step: kernels keep what they need per such buffer,
        so once."""
        few = residual(self.network, self.scratch.rows(len(ends)))
        return self._scores(few.copy_(state[list(ends)]))

    def _scores(self, state: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            self.gate.wait(EMBEDDING)  # a tied head
        return self.network.logits(state, self.scratch)

    def _forward(
        self,
        sequence: SequenceKV,
        ids: Sequence[int],
        cancel: CancelCheck | None,
        *,
        restart: Callable[[], bool] | None = None,
        observe: BetweenLayers | None = None,
        before: Sequence[int] = (),
        pictures: PictureTask | None = None,
    ) -> torch.Tensor:
        """One chunk; each block waits for its weights. `observe` gets the state before each block. `before`: see
        ChunkBuffers.fill."""
        between = self._between(cancel, restart, observe)
        loaded = self.gate is None or self.gate.complete
        bare = observe is None and pictures is None and not sequence.shift
        if self.short is not None and self.short.takes(len(ids)) and loaded and bare:
            between(0, self.scratch.rows(1)["x"])
            state = self.short.forward(sequence, ids)
            sequence.advance(len(ids))
            return state
        if self.gate is not None:
            self.gate.fetch_rows(ids)
        chunk, rows = self.chunk.fill(sequence, ids, before)
        with self._placed(rows, sequence.length, pictures, cancel):
            state = self.network.forward(chunk, rows, self.kv, self.scratch, between)
        sequence.advance(len(ids))
        return state

    @contextmanager
    def _placed(
        self, batch: ForwardBatch, first: int, pictures: PictureTask | None, cancel: CancelCheck | None
    ) -> Iterator[None]:
        """The rows of a chunk with those of its pictures. Raises Stopped when `cancel` is true while the vision tower
        runs."""
        if pictures is None:
            yield
            return
        if self.rotary is None:
            raise ValueError("the runner was made without the rotary table that pictures need")
        with ExitStack() as held:
            try:
                held.enter_context(pictures.rows(batch, first, self.rotary, cancel))
            except PictureStopped:
                raise Stopped from None
            yield

    def _between(
        self,
        cancel: CancelCheck | None,
        restart: Callable[[], bool] | None = None,
        observe: BetweenLayers | None = None,
    ) -> BetweenLayers:
        def between(index: int, state: torch.Tensor) -> None:
            if self.gate is not None:
                self.gate.wait(index + 1)
            if cancel is not None and cancel():
                raise Stopped
            if restart is not None and restart():
                raise PassRestarted
            if observe is not None:
                observe(index, state)

        return between


def _keeper(after: Sequence[int], kept: dict[int, torch.Tensor]) -> BetweenLayers:
    def keep(index: int, state: torch.Tensor) -> None:
        if index in after:
            kept[index] = state.float().to("cpu", copy=True)

    return keep
