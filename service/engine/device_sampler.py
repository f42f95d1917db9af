"""Sampling on the device: the buffers and the kernels that choose tokens from the scores.

Same order and meaning as engine/sampler: bias, penalties, ids that are not allowed or that the tokenizer lacks,
temperature, top_k, top_p, min_p, one draw; log-probabilities of the raw model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..core import LOGPROBS_LIMIT, Logprobs
from ..kernels.cuda.cuda_plan import on_grid
from ..memory.lease import Lease, carved_bytes
from .device_plan import PLAN_ROWS, Needs
from .device_slots import DeviceSlots

BLOCK = 4096
VALUES = 65536
# A row of `measures`, see kernels/cuda/triton_adjust.
MEASURED = 1 + 2 * LOGPROBS_LIMIT


class DeviceSampler:
    """Buffers for choosing tokens from up to `rows` rows of scores, and the kernel launches. Nothing is allocated
    later."""

    def __init__(self, lease: Lease, rows: int, vocab: int, half: str, *, early: bool) -> None:
        """half: "bf16" or "fp16", the scores' type. early: programmatic dependent launch."""
        self.vocab, self._half, self._early = vocab, half, early
        self._blocks = -(-vocab // BLOCK)
        made = [lease.carve(shape, dtype).zero_() for shape, dtype in _buffers(rows, vocab)]
        # `first`: the first token of a sequence; `chosen` is what the next step may read.
        self.chosen, self.first, self.plan, self.masks, self.measures = made[:5]
        self._goals, self._seen, self._counts, self._broken, self._matches = made[5:10]
        self._weights, self._keys, self._peaks, self._masses, self._work, self._rests = made[10:]
        self.slots = DeviceSlots(lease, rows, vocab)

    @staticmethod
    def nbytes(rows: int, vocab: int) -> int:
        """Bytes of the buffers, alignment included."""
        own = sum(carved_bytes(shape, dtype) for shape, dtype in _buffers(rows, vocab))
        return own + DeviceSlots.nbytes(rows, vocab)

    def feed(self, plan: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Copy tokens and positions of a plan [PLAN_ROWS, batch] to where the network reads them."""
        from ..kernels.cuda.triton_sample import feed

        on_grid(feed, (1,))(plan, self.chosen, ids, positions, plan.shape[1], PADDED=16)

    def choose(self, scores: torch.Tensor, plan: torch.Tensor, needs: Needs, *, first: bool = False) -> None:
        """Choose into `chosen`, or into `first`, from scores [batch, vocab]; -1 where they are no numbers, or none is
        allowed. Log-probabilities go to `measures`."""
        from ..kernels.cuda.triton_adjust import measure

        batch, chosen = plan.shape[1], self.first if first else self.chosen
        bits, sizes, grid, forms = scores.view(torch.int16), (self.vocab, batch), (batch, self._blocks), self._forms
        half, blocks = {"HALF": self._half}, self._tiles
        if needs.adjusts or needs.draws:
            self._choose_drawn(bits, plan, chosen, adjusts=needs.adjusts)
        else:
            from ..kernels.cuda.triton_sample import likeliest

            found = (self._peaks, self._matches, self._broken, self._seen, chosen)
            on_grid(likeliest, grid)(bits, plan, *found, *sizes, BLOCK=BLOCK, **blocks, **half, **forms)
        if needs.measures:
            found = (chosen, self._peaks, self._masses, self._keys, self._seen, self.measures)
            on_grid(measure, grid)(bits, plan, *found, *sizes, BLOCK=BLOCK, **blocks, **half, **forms)

    def close(self) -> None:
        """Drop what the slots hold."""
        self.slots.close()

    def _choose_drawn(self, bits: torch.Tensor, plan: torch.Tensor, chosen: torch.Tensor, *, adjusts: bool) -> None:
        from ..kernels.cuda.triton_adjust import bin_scores, tally
        from ..kernels.cuda.triton_sample import decide, find, survey

        batch, vocab, forms = plan.shape[1], self.vocab, self._forms
        grid, one = (batch, self._blocks), (batch,)
        kind = {"HALF": self._half, "ADJUST": adjusts}
        if adjusts:
            on_grid(tally, one)(plan, self.chosen, self.slots.written, vocab, batch, **forms)
        seen = (self._peaks, self._masses, self._broken, self._counts)
        own = (self._work, self.slots.written, self.slots.bias, self.masks, self.masks.shape[1])
        sized = {"BLOCK": BLOCK, "BLOCKS": self._blocks}
        on_grid(survey, grid)(bits, plan, *seen, *own, vocab, batch, **sized, **kind, **forms)
        if adjusts:
            found = (self._work, plan, self._peaks, self._counts, self._weights)
            on_grid(bin_scores, grid)(*found, vocab, batch, BLOCK=BLOCK, **self._tiles, **forms)
        goals = (self._weights, self._goals, self._rests)
        on_grid(decide, one)(plan, *seen, *goals, batch, **self._tiles, **kind, **forms)
        rest = (self._peaks, self._counts, *goals, self._matches, self._seen, chosen, self._work)
        on_grid(find, grid)(bits, plan, *rest, vocab, batch, BLOCK=BLOCK, **self._tiles, **kind, **forms)

    @property
    def _tiles(self) -> dict[str, int]:
        return {"BLOCKS": self._blocks, "PADDED": 1 << (self._blocks - 1).bit_length()}

    @property
    def _forms(self) -> dict[str, bool | int]:
        return {"PDL": self._early, "num_warps": 8} | ({"launch_pdl": True} if self._early else {})


def write_mask(target: np.ndarray, allowed: np.ndarray | None) -> None:
    """Write a mask (bool [limit]; None: all are allowed) as bits into int32 [words], the lowest bit first; ids beyond
    it are not allowed."""
    target[:] = -1 if allowed is None else 0
    if allowed is not None:
        bits = np.packbits(allowed, bitorder="little")
        target.view(np.uint8)[: len(bits)] = bits


def mask_words(vocab: int) -> int:
    """Words of 32 bits that a mask takes."""
    return -(-vocab // 32)


def read_measures(row: np.ndarray, top: int) -> Logprobs:
    """The log-probabilities of a row of `measures` (int32 [MEASURED]) with the `top` likeliest ids."""
    floats = row.view(np.float32)
    values = floats[1 + LOGPROBS_LIMIT : 1 + LOGPROBS_LIMIT + top].tolist()
    return Logprobs(float(floats[0]), tuple(zip(row[1 : 1 + top].tolist(), values, strict=True)))


def _buffers(rows: int, vocab: int) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
    """chosen, first, plan, masks, measures, goals, seen, counts, broken, matches; weights, keys; peaks, masses, work;
    rests."""
    blocks = -(-vocab // BLOCK)
    whole: list[tuple[int, ...]] = [(rows,), (1,), (PLAN_ROWS * rows,), (rows, mask_words(vocab)), (rows, MEASURED)]
    whole += [(2 * rows,), (rows,), (rows, VALUES), (rows, blocks), (rows, blocks)]
    longs: list[tuple[int, ...]] = [(rows, VALUES), (rows, blocks, LOGPROBS_LIMIT)]
    floats: list[tuple[int, ...]] = [(rows, blocks), (rows, blocks), (rows, vocab)]
    return [
        *((shape, torch.int32) for shape in whole),
        *((shape, torch.int64) for shape in longs),
        *((shape, torch.float32) for shape in floats),
        ((rows,), torch.float64),
    ]
