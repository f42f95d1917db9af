"""Tensors of a running model: prefill in chunks, decode step by step, several sequences at once."""

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
from .drafting import HELD, Drafting
from .picture_reader import PictureStopped, PictureTask
from .scoring import scored_rows

# Tokens a chunk: enough for the matrix products to reach their rate, few enough to stop between two of them.
CHUNK = 256
# On a GPU launches must be fewer than what the device does meanwhile, and a chunk is read in some 20 ms.
CUDA_CHUNK = 1024
# Some hundred tokens meet nearly all experts: each pass reads all of them, so a prompt should be few passes.
SPARSE_CUDA_CHUNK = 2048
# Rows of scores held at once when every position is scored: 16 of 152,000 are 10 MB.
SCORED_ROWS = 16


def chunk_rows(device: torch.device, *, sparse: bool) -> int:
    """Tokens a chunk on this device, of a network with experts (`sparse`) or without."""
    if device.type != "cuda":
        return CHUNK
    return SPARSE_CUDA_CHUNK if sparse else CUDA_CHUNK


def first_piece(tokens: int, rows: int, border: int = 0) -> int:
    """How many of `tokens` the next pass of at most `rows` reads. A pass of a few rows adds up in another order than one of many: no
    prompt ends in such a one, so that its scores do not depend on how much of it was kept.

    `border`: a pass is to end behind so many tokens, for something is kept there.
    """
    if border:
        return min(border, rows)
    left = tokens - rows
    return min(tokens, rows - FEW_ROWS if 0 < left <= FEW_ROWS < rows else rows)


def last_border(start: int, tokens: int) -> int:
    """How many of `tokens` at position `start` lie before the last block border behind which more than a few are left; 0 for none."""
    return max(0, (start + tokens - FEW_ROWS - 1) // BLOCK * BLOCK - start)


class Stopped(Exception):  # noqa: N818 - a signal inside the engine, never seen outside
    """The caller asked to stop in the middle of a chunk; the sequence is as it was before the chunk."""


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
    ) -> None:
        """`rotary`: the network's, of a model that reads pictures.
        `gate` is asked for weights before they are used (see Destination.part); None when all are there."""
        self.gate = gate
        self.drafting = drafting
        self.rotary = rotary
        self.network = network
        self.kv = kv
        self.scratch = scratch
        self.chunk, self.buffers = buffers
        self._table_cost = (0.0, 0)

    @property
    def chunk_rows(self) -> int:
        """Tokens that one pass reads at most."""
        return min(self.scratch.tokens, chunk_rows(self.kv.keys[0].device, sparse=True))

    def close(self) -> None:
        """Let go of every tensor; the runner cannot be used afterwards."""
        if self.drafting is not None:
            self.drafting.close()
        del self.drafting, self.rotary, self.network, self.kv, self.scratch, self.gate, self.chunk, self.buffers

    def prefill(
        self,
        sequence: SequenceKV,
        ids: Sequence[int],
        cancel: CancelCheck | None,
        report: Callable[[int], None],
        *,
        whole: bool = True,
        pictures: PictureTask | None = None,
    ) -> torch.Tensor:
        """Read `ids` behind the sequence, or one chunk of them where not `whole`; `report` gets how many are read. `pictures` are those of
        the whole sequence.

        Returns the scores [vocab] for the token behind what was read. Raises Stopped when `cancel` turns true, at the latest after one
        layer of one chunk.
        """
        state, done = torch.empty(0), 0
        while done < len(ids):
            left = len(ids) - done
            border = 0 if sequence.cuts_anywhere else last_border(sequence.length, left)
            piece = ids[done : done + first_piece(left, self.chunk_rows, border)]
            state = self._forward(sequence, piece, cancel, before=ids[:done], pictures=pictures)
            self._see(sequence, piece, state)
            sequence.keep_checkpoint()
            done += len(piece)
            report(done)
            if not whole:
                break
        return self._scores_behind(state, [len(state) - 1])[0]

    @property
    def reads_several(self) -> bool:
        """Whether prompts of several sequences can be read in one pass: where keys and values are all that they leave behind."""
        return self.kv.states is None and self.drafting is None

    def prefill_several(
        self, sequences: Sequence[SequenceKV], prompts: Sequence[Sequence[int]], cancel: CancelCheck | None
    ) -> torch.Tensor:
        """Read prompt i behind sequence i, all of them in one pass of up to `chunk_rows` rows; only where it `reads_several`.

        Returns the scores [sequences, vocab] behind each. Raises Stopped as `prefill` does; then nothing of any of them was read.
        """
        if self.gate is not None:
            self.gate.fetch_rows([token for ids in prompts for token in ids])
        chunk, rows = self.chunk.fill_several(sequences, prompts)
        state = self.network.forward(chunk, rows, self.kv, self.scratch, self._between(cancel))
        for sequence, ids in zip(sequences, prompts, strict=True):
            sequence.advance(len(ids))
        return self._scores_behind(state, [part.stop - 1 for part, _ in rows.chunks])

    def decode(self, sequences: Sequence[SequenceKV], tokens: Sequence[int]) -> torch.Tensor:
        """One step of up to MAX_BATCH sequences, token i behind sequence i: scores [B, vocab] for the tokens after them."""
        longest = self.buffers.fill(sequences, tokens)
        scores = self.buffers.step(len(sequences), longest)
        for sequence in sequences:
            sequence.advance(1)
            sequence.keep_checkpoint(written=True)
        if len(sequences) == 1:
            self.saw(sequences[0], tokens)
        return scores

    def check(self, sequence: SequenceKV, ids: Sequence[int]) -> torch.Tensor:
        """Read a few ids, up to MAX_BATCH, in one pass: scores [T, vocab] behind each, as decode steps would give them.

        The sequence is as it was until the caller advances it, by as many of them as it wants.
        """
        chunk, rows = self.buffers.fill_verify(sequence, ids)
        scores = self._scores(self.network.forward(chunk, rows, self.kv, self.scratch))
        self.saw(sequence, ids, ahead=True)
        return scores

    def saw(self, sequence: SequenceKV, ids: Sequence[int], *, ahead: bool = False) -> None:
        """A pass has read a few ids, which are the sequence's last ones or, `ahead`, stand behind its end."""
        if self.drafting is not None:
            self._see(sequence, ids, residual(self.network, self.scratch.rows(len(ids))), ahead=ahead)

    def _see(self, sequence: SequenceKV, ids: Sequence[int], state: torch.Tensor, *, ahead: bool = False) -> None:
        """Let the layer that drafts know what was read, just now or, `ahead`, behind the sequence's end."""
        if self.drafting is not None:
            start = sequence.length - (0 if ahead else len(ids))
            self.drafting.see(sequence, start, ids, carried(self.network, state[-HELD:] if len(ids) > HELD else state, self.scratch))

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
        """Residual states after the block counts `after`, side by side: [tokens, hidden * len(after)] fp32 on the CPU."""
        rows: list[torch.Tensor] = []
        with self.kv.open(len(ids)) as sequence:
            for at in range(0, len(ids), self.chunk_rows):
                kept: dict[int, torch.Tensor] = {}
                self._forward(sequence, ids[at : at + self.chunk_rows], cancel, _keeper(after, kept))
                rows.append(torch.cat([kept[index] for index in after], dim=1))
        return torch.cat(rows)

    def final_state(self, ids: Sequence[int], cancel: CancelCheck | None) -> torch.Tensor:
        """The last token's state behind the final norm: [hidden] fp32 on the CPU."""
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

    def _scores_behind(self, state: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """Scores behind a few rows, in the rows of a step: what kernels keep for each tensor of a few rows is kept once."""
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
        seen: BetweenLayers | None = None,
        before: Sequence[int] = (),
        pictures: PictureTask | None = None,
    ) -> torch.Tensor:
        """One chunk, each block after its weights have come and unless `cancel` is true; `seen` gets the state before each. `before`: see
        ChunkBuffers.fill.
        """
        if self.gate is not None:
            self.gate.fetch_rows(ids)
        chunk, rows = self.chunk.fill(sequence, ids, before)
        with self._placed(rows, sequence.length, pictures, cancel):
            state = self.network.forward(chunk, rows, self.kv, self.scratch, self._between(cancel, seen))
        sequence.advance(len(ids))
        return state

    @contextmanager
    def _placed(self, batch: ForwardBatch, first: int, pictures: PictureTask | None, cancel: CancelCheck | None) -> Iterator[None]:
        """The rows of a chunk with what stands for pictures in it. Raises Stopped when `cancel` turns true while the tower reads."""
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

    def _between(self, cancel: CancelCheck | None, seen: BetweenLayers | None = None) -> BetweenLayers:
        def between(index: int, state: torch.Tensor) -> None:
            if self.gate is not None:
                self.gate.wait(index + 1)
            if cancel is not None and cancel():
                raise Stopped
            if seen is not None:
                seen(index, state)

        return between


def _keeper(after: Sequence[int], kept: dict[int, torch.Tensor]) -> BetweenLayers:
    def keep(index: int, state: torch.Tensor) -> None:
        if index in after:
            kept[index] = state.float().to("cpu", copy=True)

    return keep
