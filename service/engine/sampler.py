"""From one row of scores to the next token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ..core import FP32_MAX, Logprobs, Sampling
from ..errors import ModelError

# Below it the scores divided by the temperature leave fp32: greedy, as the limit is.
GREEDY_BELOW = 1e-5
# Scores that are added up together before a draw looks among them: 152,000 scores then need no second copy of themselves, whose new pages
# took longer than the sum. All scores go through numpy: torch wakes a thread a processor for them, which then spin for milliseconds where
# others want to run (of a service on 16 processors its client).
DRAWN_TOGETHER = 1024
_NO_IDS = np.empty(0, np.int64)
# Candidates looked at first: top_p and min_p rarely need more, and a full sort of 150,000 scores takes 10 ms.
FIRST_CANDIDATES = 1024


class Adjustments:
    """What a request adds to scores or takes off them, as arrays: made once, shared by its choices and read only.

    `biased` and `biases` are ids and what is added there, `prompt` the ids for which the repetition penalty holds from the start, each
    once; all below `limit`.
    """

    def __init__(self, sampling: Sampling, prompt: Iterable[int], limit: int) -> None:
        bias = {token: value for token, value in sampling.logit_bias.items() if token < limit}
        self.biased, self.biases = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        penalized = (sampling.repetition_penalty or 1.0) != 1.0
        self.prompt = np.unique(np.fromiter((token for token in prompt if token < limit), np.int64)) if penalized else _NO_IDS


class Sampler:
    """One choice's way to its tokens, with its own random numbers: the same seed gives the same choices; nothing global is touched.

    Order: bias, penalties, ids that the tokenizer lacks or that are not allowed, temperature, top_k, top_p, min_p, one draw. `sampling`
    has no None but the seed. An id that is not allowed is never chosen, whatever the numbers: it is left out behind all that is added.
    The draw of the i-th token that is sampled is `uniform(i)` whatever was looked at before: a step may be computed twice, or ahead.
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
        """`top`: how many of the likeliest tokens `logprobs` shows at each position; None: it is not wanted at all. `adjustments`: where
        other choices of the request have them already."""
        self.sampling = sampling
        self.limit = limit
        self.top = top
        # Of the last choice, in the raw model.
        self.logprobs: Logprobs | None = None
        # Says which ids may come next, bool [limit], None for all; asked at every choice.
        self.allowed: Callable[[], np.ndarray | None] | None = None
        # Says which id is taken in place of the one that was chosen.
        self.corrected: Callable[[int], int] | None = None
        # How many tokens were sampled and accepted, so the number of the next draw.
        self.drawn = 0
        self._counts: Counter[int] = Counter()
        self._draws = draws_of(seed)
        self._uniforms: list[float] = []
        self._exps: np.ndarray | None = None
        self._adjustments = Adjustments(sampling, prompt, limit) if adjustments is None else adjustments

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
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

    def uniform(self, place: int) -> float:
        """The draw in [0, 1) for the sampled token number `place`, from 0."""
        while len(self._uniforms) <= place:
            self._uniforms.append(next(self._draws))
        return self._uniforms[place]

    def accept(self, token: int, *, forced: bool = False) -> None:
        """Count a token of the answer, for the penalties and, if it was not forced, for the next draw."""
        self._counts[token] += 1
        self.drawn += not forced

    @property
    def plain(self) -> bool:
        """Whether a choice depends on the scores, temperature, top_k, top_p, min_p and the draw alone: others cannot be made ahead."""
        s = self.sampling
        penalties = s.presence_penalty or s.frequency_penalty or (s.repetition_penalty or 1.0) != 1.0
        return not penalties and not len(self._adjustments.biased) and self.allowed is None and self.top is None

    def _chosen(self, scores: torch.Tensor) -> int:
        values, allowed = scores.numpy(), self.allowed() if self.allowed is not None else None
        if len(self._adjustments.biased):
            _set_finite(values, self._adjustments.biased, values[self._adjustments.biased] + self._adjustments.biases)
        self._penalize(values)
        if allowed is not None:
            np.copyto(values, -np.inf, where=~allowed[: len(values)])
        if self.greedy:
            best = int(values.argmax())  # torch's takes 0.4 ms for 152,000 scores, this one 0.02
            _require_number(float(values[best]))
            return best
        return self._draw(scores)

    def _penalize(self, values: np.ndarray) -> None:
        s = self.sampling
        repetition, presence, frequency = s.repetition_penalty or 1.0, s.presence_penalty or 0.0, s.frequency_penalty or 0.0
        written = np.array([token for token in self._counts if token < self.limit], np.int64)
        if repetition != 1.0:
            seen = np.union1d(self._adjustments.prompt, written)
            found = values[seen]
            with np.errstate(over="ignore"):
                _set_finite(values, seen, np.where(found > 0, found / np.float32(repetition), found * np.float32(repetition)))
        if (presence or frequency) and len(written):
            counts = np.array([self._counts[token] for token in written.tolist()], np.float32)
            _set_finite(values, written, values[written] - (np.float32(presence) + np.float32(frequency) * counts))

    def _draw(self, scores: torch.Tensor) -> int:
        s, every = self.sampling, scores.numpy()
        best = float(every.max())
        _require_number(best)
        with np.errstate(over="ignore"):  # what is beyond FP32 has no chance
            every -= best
            every /= np.float32(s.temperature or 1.0)
        width = min(s.top_k or self.limit, self.limit)
        filtered = (s.top_p or 1.0) < 1.0 or (s.min_p or 0.0) > 0.0
        if width == self.limit and not filtered:
            return self._pick_of_all(np.exp(every, out=every))
        if width < self.limit:
            values, ids = scores.topk(width)
            return self._pick(self._filtered(values.softmax(0)), ids)
        whole = self._log_of_sum(every)
        values, ids = scores.topk(min(width, FIRST_CANDIDATES))
        chances = (values - whole).exp()
        if len(values) < width and not self._enough(chances):
            values, ids = scores.sort(descending=True)
            chances = (values - whole).exp()
        return self._pick(self._filtered(chances), ids)

    def _log_of_sum(self, values: np.ndarray) -> float:
        """log of the sum of all exp(values), of which the largest is 0."""
        if self._exps is None or len(self._exps) != len(values):
            self._exps = np.empty_like(values)
        return math.log(float(np.exp(values, out=self._exps).sum(dtype=np.float64)))

    def _enough(self, chances: torch.Tensor) -> bool:
        """Whether these candidates, the likeliest, hold all that top_p and min_p keep."""
        s = self.sampling
        return bool(chances.sum() >= (s.top_p or 1.0)) or bool(chances[-1] < (s.min_p or 0.0) * chances[0])

    def _filtered(self, chances: torch.Tensor) -> torch.Tensor:
        """Zero what top_p (Holtzman et al. 2019) and min_p (Nguyen et al. 2024) leave out of descending `chances`; the first stays."""
        s = self.sampling
        keep = chances.cumsum(0) - chances < (s.top_p or 1.0)
        keep &= chances >= (s.min_p or 0.0) * chances[0]
        keep[0] = True
        return chances * keep

    def _pick(self, chances: torch.Tensor, ids: torch.Tensor) -> int:
        """The draw whose turn it is, by the inverse of the cumulative distribution."""
        return int(ids[_place(chances.numpy(), self.uniform(self.drawn))])

    def _pick_of_all(self, values: np.ndarray) -> int:
        """The same among all tokens, some of them at a time; the chances `values` need not add up to 1."""
        totals = np.add.reduceat(values, range(0, len(values), DRAWN_TOGETHER), dtype=np.float64)
        sums = totals.cumsum()
        aim = self.uniform(self.drawn) * sums[-1]
        part = min(int(np.searchsorted(sums, aim, side="right")), int(np.flatnonzero(totals)[-1]))
        inside = values[part * DRAWN_TOGETHER : (part + 1) * DRAWN_TOGETHER]
        return part * DRAWN_TOGETHER + _place(inside, (aim - (sums[part] - totals[part])) / totals[part])


def _place(chances: np.ndarray, share: float) -> int:
    """Where the cumulative distribution of `chances` passes `share` of its sum; the last chance there is, if rounding lets it pass none."""
    cumulative = chances.cumsum(dtype=np.float64)
    # Rounding may have brought a share below 0, where the first id of all would be taken, one without a chance among them.
    place = int(np.searchsorted(cumulative, max(0.0, share * cumulative[-1]), side="right"))
    return place if place < len(chances) else int(np.flatnonzero(chances)[-1])


def draws_of(seed: int) -> Iterator[float]:
    """The draws in [0, 1) of a seed of 64 bits, without an end.

    torch's generator for the CPU takes the lower 32 bits of a seed and drops the others, so seeds that have some go to Philox (Salmon et
    al. 2011), whose raw numbers are the same in every version of numpy.
    """
    if seed < 1 << 32:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield float(torch.rand(1, generator=generator, dtype=torch.float64))
    philox = np.random.Philox(key=seed)
    while True:
        yield (philox.random_raw() >> 11) * 2.0**-53


def _set_finite(values: np.ndarray, ids: np.ndarray, changed: np.ndarray) -> None:
    """Put `changed` into `values` at `ids`, no further than FP32 reaches: what is infinite there would outweigh everything for good."""
    values[ids] = np.clip(changed, -FP32_MAX, FP32_MAX)


def measured(raw: torch.Tensor, token: int, top: int) -> Logprobs:
    """The log-probability of `token` and the `top` likeliest, of `raw` [vocab]."""
    values, ids = raw.topk(top)
    return Logprobs(float(raw[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _require_number(best: float) -> None:
    if not math.isfinite(best):
        raise ModelError(
            f"the model computed {best} as its best score; its weights are damaged, or others than its config; download it again"
        )
