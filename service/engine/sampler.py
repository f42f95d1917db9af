"""From one row of scores to the next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ..core import Logprobs, Sampling
from ..errors import ModelError, RequestError
from .candidates import largest
from .penalties import Penalties, set_finite

# Below this temperature, scores divided by it exceed fp32: greedy, which is the limit.
GREEDY_BELOW = 1e-5
# Scores that are summed as one group before a draw looks inside it: 152,000 scores then need no second copy, whose new
# pages took longer than the sum. Scores go through numpy: torch wakes one thread per processor for them, and these spin
# for milliseconds while other processes want to run (with a service on 16 processors, its client).
DRAW_GROUP = 1024
_NO_IDS = np.empty(0, np.int64)
# Candidates looked at first: top_p and min_p rarely need more, and a full sort of 150,000 scores takes 10 ms.
FIRST_CANDIDATES = 1024


class Adjustments:
    """A request's bias and the prompt's penalized ids as arrays: made once, read only, shared by its choices.

    `biased` are ids and `biases` what is added to their scores. `prompt`: ids that the repetition penalty applies to
    from the start, each once. All ids are below `limit`.
    """

    def __init__(self, sampling: Sampling, prompt: Iterable[int], limit: int) -> None:
        bias = {token: value for token, value in sampling.logit_bias.items() if token < limit}
        self.biased, self.biases = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        penalized = (sampling.repetition_penalty or 1.0) != 1.0
        self.prompt = (
            np.unique(np.fromiter((token for token in prompt if token < limit), np.int64)) if penalized else _NO_IDS
        )


class Sampler:
    """Samples one choice's tokens with random numbers of its own: the same seed gives the same tokens. It touches no
    global state.

    Order: bias, penalties, ids that the tokenizer lacks or that are not allowed, temperature, top_k, top_p, min_p, one
    draw. In `sampling` only the seed may be None. An id that is not allowed is never chosen, whatever its score: it is
    masked after bias and penalties. The i-th sampled token uses the draw `uniform(i)`, so a step may be computed twice,
    or ahead.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Iterable[int],
        limit: int,
        *,
        top: int | None = None,
        adjustments: Adjustments | None = None,
    ) -> None:
        """`top`: how many of the likeliest tokens `logprobs` has; None: no `logprobs`. `adjustments`: those of the
        request, if they are made already."""
        self.sampling = sampling
        self.limit = limit
        self.top = top
        # Of the last choice, in the raw model.
        self.logprobs: Logprobs | None = None
        # Returns the ids that may come next, bool [limit], or None for all; called for every token.
        self.allowed: Callable[[], np.ndarray | None] | None = None
        # Returns the id to use instead of the chosen one.
        self.corrected: Callable[[int], int] | None = None
        # Tokens that were sampled and accepted: the number of the next draw.
        self.drawn = 0
        self._draws = draws_of(seed)
        self._uniforms: list[float] = []
        self._exps: np.ndarray | None = None
        self.adjustments = Adjustments(sampling, prompt, limit) if adjustments is None else adjustments
        self._penalties = Penalties(sampling, self.adjustments.prompt, limit)
        # All accepted tokens, the forced ones too.
        self.written: list[int] = []
        # Whether the scores depend on the tokens so far, and whether there is a bias.
        self.penalized, self.biased = self._penalties.active, len(self.adjustments.biased) > 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen, without a draw."""
        return (self.sampling.temperature or 0.0) < GREEDY_BELOW

    def choose(self, logits: torch.Tensor) -> int:
        """The next id for `logits` [vocab] (any float type, any device; changed in place where it is fp32 on the CPU).

        Changes nothing of the sampler but `logprobs`: the same scores give the same id until `accept`.
        """
        scores = logits.float().cpu()
        raw = None if self.top is None else scores.log_softmax(0)
        token = self._chosen(scores if self.limit >= len(scores) else scores[: self.limit])
        token = token if self.corrected is None else self.corrected(token)
        self.logprobs = None if raw is None else measured(raw, token, self.top or 0)
        return token

    def uniform(self, index: int) -> float:
        """The draw in [0, 1) for the sampled token number `index`, from 0."""
        while len(self._uniforms) <= index:
            self._uniforms.append(next(self._draws))
        return self._uniforms[index]

    def accept(self, token: int, *, forced: bool = False) -> None:
        """Count a token of the completion, for the penalties and, if it was not forced, for the next draw."""
        self._penalties.count(token)
        self.written.append(token)
        self.drawn += not forced

    def mask(self) -> np.ndarray | None:
        """The ids that may come next, bool [limit], or None for all. Raises RequestError where none may."""
        if self.allowed is None or (allowed := self.allowed()) is None:
            return None
        allowed = allowed[: self.limit]
        if not allowed.any():
            raise RequestError(
                f"the grammar of this answer allows none of the {self.limit:,} tokens after {len(self.written):,} of"
                " them; the answer cannot go on: change the schema, or leave it out"
            )
        return allowed

    def _chosen(self, scores: torch.Tensor) -> int:
        values, allowed = scores.numpy(), self.mask()
        if self.biased:
            set_finite(values, self.adjustments.biased, values[self.adjustments.biased] + self.adjustments.biases)
        self._penalties.apply(values)
        if allowed is not None:
            np.copyto(values, -np.inf, where=~allowed)
        if self.greedy:
            best = int(values.argmax())  # torch's takes 0.4 ms for 152,000 scores, this one 0.02
            _require_number(float(values[best]))
            return best
        return self._draw(scores)

    def _draw(self, scores: torch.Tensor) -> int:
        s, every = self.sampling, scores.numpy()
        width = min(s.top_k or self.limit, self.limit)
        if width < self.limit:
            values, ids = largest(every, width)
            self._scale(values, float(values[0]))
            return self._pick(self._filtered(torch.from_numpy(values).softmax(0)), ids)
        self._scale(every, float(every.max()))
        filtered = (s.top_p or 1.0) < 1.0 or (s.min_p or 0.0) > 0.0
        if width == self.limit and not filtered:
            return self._pick_of_all(np.exp(every, out=every))
        whole = self._log_of_sum(every)
        values, ids = scores.topk(min(width, FIRST_CANDIDATES))
        chances = (values - whole).exp()
        if len(values) < width and not self._enough(chances):
            values, ids = scores.sort(descending=True)
            chances = (values - whole).exp()
        return self._pick(self._filtered(chances), ids.numpy())

    def _scale(self, values: np.ndarray, best: float) -> None:
        """Turn scores, of which `best` is the largest, into exponents at the temperature, in place."""
        _require_number(best)
        with np.errstate(over="ignore"):  # scores beyond FP32 have no chance
            values -= best
            values /= np.float32(self.sampling.temperature or 1.0)

    def _log_of_sum(self, values: np.ndarray) -> float:
        """log of the sum of all exp(values), of which the largest is 0."""
        if self._exps is None or len(self._exps) != len(values):
            self._exps = np.empty_like(values)
        return math.log(float(np.exp(values, out=self._exps).sum(dtype=np.float64)))

    def _enough(self, chances: torch.Tensor) -> bool:
        """Whether these likeliest candidates include all that top_p and min_p keep."""
        s = self.sampling
        return bool(chances.sum() >= (s.top_p or 1.0)) or bool(chances[-1] < (s.min_p or 0.0) * chances[0])

    def _filtered(self, chances: torch.Tensor) -> torch.Tensor:
        """Set to 0 what top_p (Holtzman et al. 2019) and min_p (Nguyen et al. 2024) drop from descending `chances`; the
        first stays."""
        s = self.sampling
        keep = chances.cumsum(0) - chances < (s.top_p or 1.0)
        keep &= chances >= (s.min_p or 0.0) * chances[0]
        keep[0] = True
        return chances * keep

    def _pick(self, chances: torch.Tensor, ids: np.ndarray) -> int:
        """The next draw, by the inverse of the cumulative distribution."""
        return int(ids[_index_at(chances.numpy(), self.uniform(self.drawn))])

    def _pick_of_all(self, values: np.ndarray) -> int:
        """The same among all tokens, DRAW_GROUP at a time; the chances `values` need not sum to 1."""
        totals = np.add.reduceat(values, range(0, len(values), DRAW_GROUP), dtype=np.float64)
        sums = totals.cumsum()
        aim = self.uniform(self.drawn) * sums[-1]
        part = min(int(np.searchsorted(sums, aim, side="right")), int(np.flatnonzero(totals)[-1]))
        inside = values[part * DRAW_GROUP : (part + 1) * DRAW_GROUP]
        return part * DRAW_GROUP + _index_at(inside, (aim - (sums[part] - totals[part])) / totals[part])


def _index_at(chances: np.ndarray, share: float) -> int:
    """The index where the cumulative sum of `chances` passes `share` of the total; the last chance above 0 if rounding
    passes none."""
    cumulative = chances.cumsum(dtype=np.float64)
    # Rounding may make the share negative: the first id would be chosen, even with chance 0.
    index = int(np.searchsorted(cumulative, max(0.0, share * cumulative[-1]), side="right"))
    return index if index < len(chances) else int(np.flatnonzero(chances)[-1])


def draws_of(seed: int) -> Iterator[float]:
    """An endless sequence of draws in [0, 1) for a seed of 64 bits.

    torch's CPU generator uses only the lower 32 bits of a seed. Larger seeds use Philox (Salmon et al. 2011), whose raw
    numbers are the same in every version of numpy.
    """
    if seed < 1 << 32:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield float(torch.rand(1, generator=generator, dtype=torch.float64))
    philox = np.random.Philox(key=seed)
    while True:
        yield (philox.random_raw() >> 11) * 2.0**-53


def measured(raw: torch.Tensor, token: int, top: int) -> Logprobs:
    """The log-probability of `token` and the `top` likeliest ids, from `raw` [vocab]."""
    values, ids = raw.topk(top)
    return Logprobs(float(raw[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _require_number(best: float) -> None:
    if not math.isfinite(best):
        raise ModelError(
            f"the model computed {best} as its best score; its weights are damaged or do not belong to its config; "
            "download it again"
        )
