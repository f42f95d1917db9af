"""Sampling on the device: the plan of a step's rows as numbers, and the kernels that choose tokens from the scores.

Same order and meaning as engine/sampler: ids that the tokenizer lacks, temperature, top_k, top_p, min_p, one draw. The
host samples what depends on more (bias, penalties, a grammar, log-probabilities); see Sampler.plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels.cuda.cuda_plan import on_grid
from ..memory.lease import Lease, carved_bytes
from .sampler import Sampler

if TYPE_CHECKING:
    from .stepper import Feed

# Rows of a plan, see kernels/cuda/triton_sample.
PLAN_ROWS = 11
BLOCK = 4096
VALUES = 65536


class DeviceSampler:
    """Buffers for choosing tokens from up to `rows` rows of scores, and the kernel launches. Nothing is allocated
    later."""

    def __init__(self, lease: Lease, rows: int, vocab: int, half: str, *, early: bool) -> None:
        """half: "bf16" or "fp16", the scores' type. early: programmatic dependent launch."""
        self._vocab, self._half, self._early = vocab, half, early
        self._blocks = -(-vocab // BLOCK)
        self.chosen, self.plan, self._goals, self._seen, self._counts, self._broken, self._matches = (
            lease.carve(shape, torch.int32).zero_() for shape in _integers(rows, self._blocks)
        )
        self._peaks, self._masses = (lease.carve((rows, self._blocks), torch.float32).zero_() for _ in range(2))
        self._rests = lease.carve((rows,), torch.float64).zero_()

    @staticmethod
    def nbytes(rows: int, vocab: int) -> int:
        """Bytes of the buffers, alignment included."""
        blocks = -(-vocab // BLOCK)
        integers = sum(carved_bytes(shape, torch.int32) for shape in _integers(rows, blocks))
        return integers + 2 * carved_bytes((rows, blocks), torch.float32) + carved_bytes((rows,), torch.float64)

    def feed(self, plan: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Copy tokens and positions of a plan [PLAN_ROWS, batch] to where the network reads them."""
        from ..kernels.cuda.triton_sample import feed

        on_grid(feed, (1,))(plan, self.chosen, ids, positions, plan.shape[1], PADDED=16)

    def choose(self, scores: torch.Tensor, plan: torch.Tensor, *, draws: bool) -> None:
        """Choose into `chosen` from scores [batch, vocab]; -1 where they are no numbers. draws: whether any row is not
        greedy."""
        from ..kernels.cuda.triton_sample import decide, find, likeliest, survey

        batch, room = plan.shape[1], 1 << (self._blocks - 1).bit_length()
        bits, sizes = scores.view(torch.int16), (self._vocab, batch)
        forms = {"BLOCKS": self._blocks, "HALF": self._half, "PDL": self._early, "num_warps": 8}
        if self._early:
            forms["launch_pdl"] = True
        grid = (batch, self._blocks)
        if not draws:
            found = (self._peaks, self._matches, self._broken, self._seen, self.chosen)
            on_grid(likeliest, grid)(bits, plan, *found, *sizes, BLOCK=BLOCK, PADDED=room, **forms)
            return
        seen = (self._peaks, self._masses, self._broken, self._counts)
        on_grid(survey, grid)(bits, plan, *seen, *sizes, BLOCK=BLOCK, **forms)
        on_grid(decide, (batch,))(plan, *seen, self._goals, self._rests, batch, PADDED=room, **forms)
        rest = (self._peaks, self._counts, self._goals, self._rests, self._matches, self._seen, self.chosen)
        on_grid(find, grid)(bits, plan, *rest, *sizes, BLOCK=BLOCK, PADDED=room, **forms)


def _integers(rows: int, blocks: int) -> tuple[tuple[int, ...], ...]:
    return (rows,), (PLAN_ROWS * rows,), (2 * rows,), (rows,), (rows, VALUES), (rows, blocks), (rows, blocks)


def write_plan(plan: np.ndarray, feeds: Sequence[Feed], positions: Sequence[int]) -> bool:
    """Fill plan [PLAN_ROWS, batch] int32 for feeds at positions; rows beyond the feeds repeat the first. Returns
    whether any draws."""
    draws = False
    floats = plan.view(np.float32)
    for row in range(plan.shape[1]):
        feed = feeds[row] if row < len(feeds) else feeds[0]
        sampler = feed.sampler
        mode = _mode(sampler) if feed.wanted and sampler.plain else 0
        plan[:6, row] = (
            -1 if feed.token is None else feed.token,
            max(feed.source, 0),
            positions[row],
            mode,
            sampler.limit,
            0,
        )
        if mode:
            draws = True
            s = sampler.sampling
            uniform = sampler.uniform(feed.draw)
            high = np.float32(uniform)
            plan[5, row] = min(s.top_k or sampler.limit, sampler.limit)
            floats[6:11, row] = (s.temperature or 1.0, s.top_p or 1.0, s.min_p or 0.0, high, uniform - float(high))
        else:
            floats[6:11, row] = (1.0, 1.0, 0.0, 0.0, 0.0)
    return draws


def _mode(sampler: Sampler) -> int:
    """0: the likeliest token, 1: a draw from all, 2: a draw from some."""
    s = sampler.sampling
    if sampler.greedy:
        return 0
    return 2 if (s.top_k and s.top_k < sampler.limit) or (s.top_p or 1.0) < 1.0 or (s.min_p or 0.0) > 0.0 else 1
