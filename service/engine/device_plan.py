"""The plan of a step on the device: what each row feeds and how its token is chosen, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .sampler import Sampler

if TYPE_CHECKING:
    from .stepper import Feed

    RowChoice: TypeAlias = "Feed | FirstChoice"

# Rows of a plan, see kernels/cuda/triton_plan.
PLAN_ROWS = 26
FLAGS, FIRST_NEW = 11, 18
# Tokens that a plan can name for counting in each row; where more are missing, all counts are sent again.
NEWEST = 8
PENALIZED, BIASED, MASKED, CHAINED = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class RowState:
    """What a row's choice depends on besides scores: `flags`, the sequence's slot, and the tokens to count before."""

    flags: int = 0
    slot: int = 0
    new: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class FirstChoice:
    """The choice after a prompt: a row that feeds nothing, see stepper.Feed."""

    sampler: Sampler
    draw: int
    token: int = 0
    source: int = -1
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of a step need. `draws`: a draw; `adjusts`: bias, penalties or a mask; `measures`:
    log-probabilities."""

    draws: bool = False
    adjusts: bool = False
    measures: bool = False


NEUTRAL_ROW = RowState()


def write_plan(
    plan: np.ndarray,
    feeds: Sequence[RowChoice],
    positions: Sequence[int],
    states: Sequence[RowState] = (),
    *,
    drafted: int | None = None,
) -> Needs:
    """Fill plan [PLAN_ROWS, batch] int32 for feeds at positions; rows beyond the feeds repeat the first, and choose
    nothing.

    `states`: one per feed; without them nothing is adjusted. `drafted`: the first row of draft tokens, which count as
    written for the rows from theirs on.
    """
    batch = plan.shape[1]
    drafted = batch if drafted is None else drafted
    floats = plan.view(np.float32)
    draws = adjusts = measures = False
    for row in range(batch):
        extra = row >= len(feeds)
        feed = feeds[0] if extra else feeds[row]
        state = NEUTRAL_ROW if extra or not states else states[row]
        sampler, s = feed.sampler, feed.sampler.sampling
        wanted = feed.wanted and not extra
        mode = _mode(sampler) if wanted else 0
        top = -1 if sampler.top is None or not wanted else sampler.top
        uniform = sampler.uniform(feed.draw) if mode else 0.0
        high = np.float32(uniform)
        plan[:, row] = (
            -1 if feed.token is None else feed.token,
            max(feed.source, 0),
            positions[row],
            mode,
            sampler.limit,
            min(s.top_k or sampler.limit, sampler.limit),
            *(0, 0, 0, 0, 0),
            state.flags,
            state.slot,
            *(0, 0, 0),
            drafted,
            top,
            *state.new,
            *(-1,) * (NEWEST - len(state.new)),
        )
        floats[6:11, row] = (
            (s.temperature or 1.0, s.top_p or 1.0, s.min_p or 0.0, high, uniform - float(high))
            if mode
            else (1.0, 1.0, 0.0, 0.0, 0.0)
        )
        floats[13:16, row] = (s.presence_penalty or 0.0, s.frequency_penalty or 0.0, s.repetition_penalty or 1.0)
        draws, adjusts, measures = draws or mode > 0, adjusts or state.flags > 0, measures or top >= 0
    return Needs(draws, adjusts, measures)


def _mode(sampler: Sampler) -> int:
    """0: the likeliest token, 1: a draw from all, 2: a draw from some."""
    s = sampler.sampling
    if sampler.greedy:
        return 0
    return 2 if (s.top_k and s.top_k < sampler.limit) or (s.top_p or 1.0) < 1.0 or (s.min_p or 0.0) > 0.0 else 1
