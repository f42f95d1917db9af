"""From one row of scores to the next token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from ..core import Sampling
from ..errors import ModelError

# Below it the scores divided by the temperature leave fp32: greedy, as the limit is.
GREEDY_BELOW = 1e-5
# Candidates looked at first: top_p and min_p rarely need more, and a full sort of 150,000 scores takes 10 ms.
FIRST_CANDIDATES = 1024


class Sampler:
    """One request's choice of tokens, with its own random numbers: the same seed gives the same choices; nothing global is touched.

    Order: ids the tokenizer lacks, bias, penalties, temperature, top_k, top_p, min_p, one draw. `sampling` has no None but the seed.
    """

    def __init__(self, sampling: Sampling, seed: int, prompt: Iterable[int], limit: int) -> None:
        self._sampling = sampling
        self._limit = limit
        self._prompt = set(prompt)
        self._counts: Counter[int] = Counter()
        self._random = torch.Generator().manual_seed(seed)
        bias = {token: value for token, value in sampling.logit_bias.items() if token < limit}
        self._bias = (torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)) if bias else None

    def choose(self, logits: torch.Tensor) -> int:
        """The next id for `logits` [vocab] (any float type, any device; changed in place where it is fp32 on the CPU)."""
        scores = logits.float().cpu()[: self._limit]
        if self._bias is not None:
            scores.index_add_(0, *self._bias)
        self._penalize(scores)
        if (self._sampling.temperature or 0.0) < GREEDY_BELOW:
            best = int(scores.argmax())
            _require_number(scores[best])
            return best
        return self._draw(scores)

    def accept(self, token: int) -> None:
        """Count a token of the answer, sampled or forced, for the penalties."""
        self._counts[token] += 1

    def _penalize(self, scores: torch.Tensor) -> None:
        s = self._sampling
        repetition, presence, frequency = s.repetition_penalty or 1.0, s.presence_penalty or 0.0, s.frequency_penalty or 0.0
        if repetition != 1.0 and (self._prompt or self._counts):
            seen = _ids((self._prompt | self._counts.keys()), self._limit)
            values = scores[seen]
            scores[seen] = torch.where(values > 0, values / repetition, values * repetition)
        if (presence or frequency) and self._counts:
            seen = _ids(self._counts, self._limit)
            counts = torch.tensor([self._counts[int(i)] for i in seen], dtype=torch.float32)
            scores[seen] -= presence + frequency * counts

    def _draw(self, scores: torch.Tensor) -> int:
        s = self._sampling
        best = scores.max()
        _require_number(best)
        scores.sub_(best).div_(s.temperature or 1.0)
        width = min(s.top_k or self._limit, self._limit)
        filtered = (s.top_p or 1.0) < 1.0 or (s.min_p or 0.0) > 0.0
        if width == self._limit and not filtered:
            return self._pick(scores.softmax(0), None)
        if width < self._limit:
            values, ids = scores.topk(width)
            return self._pick(self._filtered(values.softmax(0)), ids)
        whole = scores.logsumexp(0)
        values, ids = scores.topk(min(width, FIRST_CANDIDATES))
        chances = (values - whole).exp()
        if len(values) < width and not self._enough(chances):
            values, ids = scores.sort(descending=True)
            chances = (values - whole).exp()
        return self._pick(self._filtered(chances), ids)

    def _enough(self, chances: torch.Tensor) -> bool:
        """Whether these candidates, the likeliest, hold all that top_p and min_p keep."""
        s = self._sampling
        return bool(chances.sum() >= (s.top_p or 1.0)) or bool(chances[-1] < (s.min_p or 0.0) * chances[0])

    def _filtered(self, chances: torch.Tensor) -> torch.Tensor:
        """Zero what top_p (Holtzman et al. 2019) and min_p (Nguyen et al. 2024) leave out of descending `chances`; the first stays."""
        s = self._sampling
        keep = chances.cumsum(0) - chances < (s.top_p or 1.0)
        keep &= chances >= (s.min_p or 0.0) * chances[0]
        keep[0] = True
        return chances * keep

    def _pick(self, chances: torch.Tensor, ids: torch.Tensor | None) -> int:
        """One draw by the inverse of the cumulative distribution."""
        cumulative = chances.double().cumsum(0)
        aim = torch.rand(1, generator=self._random, dtype=torch.float64) * cumulative[-1]
        index = min(int(torch.searchsorted(cumulative, aim, right=True)), len(chances) - 1)
        return int(ids[index]) if ids is not None else index


def _ids(tokens: Iterable[int], limit: int) -> torch.Tensor:
    return torch.tensor(sorted(token for token in tokens if token < limit), dtype=torch.int64)


def _require_number(best: torch.Tensor) -> None:
    if not torch.isfinite(best):
        raise ModelError(f"the model computed {float(best)} as its best score; its weights are damaged or do not belong to this config")
