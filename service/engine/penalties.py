"""The penalties of one choice, kept token by token, so that applying them does not go over the text again."""

from __future__ import annotations

import numpy as np

from ..core import FP32_MAX, Sampling

FIRST_SIZE = 256
_MOST = np.float32(FP32_MAX)


class Penalties:
    """Presence, frequency and repetition penalties. `ids` are arrays of distinct tokens that only grow; applying takes
    the same number of array operations after any text.
    """

    def __init__(self, sampling: Sampling, prompt: np.ndarray, limit: int) -> None:
        """`prompt`: sorted distinct ids that the repetition penalty applies to from the start. Ids from `limit` on are
        not counted.
        """
        self._presence = np.float32(sampling.presence_penalty or 0.0)
        self._frequency = np.float32(sampling.frequency_penalty or 0.0)
        self._repetition = np.float32(sampling.repetition_penalty or 1.0)
        self._limit = limit
        self._subtracts = bool(self._presence or self._frequency)
        self._divides = self._repetition != 1.0
        self.active = self._subtracts or self._divides
        self._prompt = prompt
        self._seen, self._seen_count = prompt, len(prompt)
        self._written, self._amounts = np.empty(FIRST_SIZE, np.int64), np.empty(FIRST_SIZE, np.float32)
        self._counts: dict[int, list[int]] = {}  # per token: its index in the arrays, how often it was written

    def count(self, token: int) -> None:
        """Count a token of the completion."""
        if not self.active or token >= self._limit:
            return
        entry = self._counts.get(token)
        if entry is None:
            entry = self._counts[token] = [len(self._counts), 0]
            self._add(token, entry[0])
        entry[1] += 1
        self._amounts[entry[0]] = self._presence + self._frequency * np.float32(entry[1])

    def apply(self, values: np.ndarray) -> None:
        """Change the scores `values` (fp32 [vocab]) in place."""
        if self._divides and self._seen_count:
            seen = self._seen[: self._seen_count]
            found = values[seen]
            with np.errstate(over="ignore"):
                set_finite(values, seen, np.where(found > 0, found / self._repetition, found * self._repetition))
        if self._subtracts and self._counts:
            written = self._written[: len(self._counts)]
            set_finite(values, written, values[written] - self._amounts[: len(self._counts)])

    def _add(self, token: int, index: int) -> None:
        if index == len(self._written):
            self._written, self._amounts = _doubled(self._written), _doubled(self._amounts)
        self._written[index] = token
        at = int(np.searchsorted(self._prompt, token))
        if not self._divides or (at < len(self._prompt) and self._prompt[at] == token):
            return
        if self._seen_count == len(self._seen):
            self._seen = _doubled(self._seen)  # the prompt's own array is shared with other choices
        self._seen[self._seen_count] = token
        self._seen_count += 1


def set_finite(values: np.ndarray, ids: np.ndarray, changed: np.ndarray) -> None:
    """Set `values` at `ids` to `changed`, clipped to the range of FP32: an infinite score would outweigh every other
    for good."""
    values[ids] = np.maximum(np.minimum(changed, _MOST), -_MOST)


def _doubled(array: np.ndarray) -> np.ndarray:
    """A copy of `array` with as many free elements after it, at least FIRST_SIZE."""
    return np.concatenate((array, np.empty(max(FIRST_SIZE, len(array)), array.dtype)))
