"""Speculative decoding: which draft tokens to propose, and whether verifying them is worth a wider pass. Pure Python.

Draft tokens are what followed the last occurrence of the text's latest tokens (prompt lookup, Saxena 2023), or come
from the draft layer (see drafting.py). They are verified in one pass. Each position is then chosen from its true
scores, with the draw that it would have had in a step of its own, so the completion is the same, only sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# Lengths of the latest tokens that are looked up, the longest first.
NGRAM_LENGTHS: tuple[int, ...] = (4, 3, 2)
# The share of a run's time, prefill included, that rejected draft tokens may have cost at any moment. The promise is 3
# %. Measured with 0.02: decode took up to 1.07 times as long after a prefill of half its time (quiet machine, medians
# of 7); with 0.01: 1.03.
MAX_LOSS = 0.01
# Weight of a new measurement in the moving average of a pass's seconds.
SMOOTHING = 0.2
# Rows that the draft layer prefills in the time of one draft token: only the last of them goes through the head. BF16
# 6.6, INT4 5.8.
PREFILL_ROWS_PER_DRAFT_TOKEN = 6
# Upper bound for passes wider than any measured: linear extrapolation times this. Measured: up to 1.1 times linear, see
# lab/notebook.md.
EXTRAPOLATION_FACTOR = 1.25
# The measured extra cost of a width counts as if this many earlier passes of it had cost nothing extra. So one slow
# measurement on a busy machine does not keep a width from being tried again.
PRIOR_FREE_PASSES = 2
# Rows that the draft layer has to prefill while it drafts step by step. After a pause there are more, once.
USUAL_UNREAD = 2


class PromptLookup:
    """The tokens of one text, and where each n-gram of them last occurred."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """Append a token to the text."""
        end = len(self._ids)
        for length in NGRAM_LENGTHS:
            if end >= length:
                self._after[tuple(self._ids[end - length :])] = end
        self._ids.append(token)

    def propose(self, most: int) -> tuple[int, list[int]]:
        """The length of the n-gram that was found again (0: none), and up to `most` tokens after it; a cycle is
        continued."""
        ids = self._ids
        for length in NGRAM_LENGTHS:
            start = self._after.get(tuple(ids[-length:])) if len(ids) >= length else None
            if start is not None:
                draft: list[int] = []
                for index in range(start, start + most):
                    draft.append(ids[index] if index < len(ids) else draft[index - len(ids)])
                return length, draft
        return 0, []


@dataclass(slots=True)
class PassCosts:
    """Measured seconds of a pass by its rows, the number of measurements, and the seconds of one token of the draft
    layer.

    `draft_share`: bytes that drafting one token reads, as a share of those that a pass of one row reads; 0 without a
    draft layer.
    """

    measured: dict[int, float] = field(default_factory=dict)
    draft_share: float = 0.0
    measured_draft: float = 0.0
    passes: dict[int, int] = field(default_factory=dict)

    def record(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took `seconds`."""
        known = self.measured.get(rows)
        self.measured[rows] = seconds if known is None else known + SMOOTHING * (seconds - known)
        self.passes[rows] = self.passes.get(rows, 0) + 1

    def record_draft(self, tokens: int, unread: int, seconds: float) -> None:
        """The draft layer took `seconds` for `tokens` draft tokens; it had `unread` rows to prefill first."""
        each = seconds / (tokens + (unread - 1) / PREFILL_ROWS_PER_DRAFT_TOKEN)
        self.measured_draft = (
            each if not self.measured_draft else self.measured_draft + SMOOTHING * (each - self.measured_draft)
        )

    @property
    def draft_token(self) -> float:
        """Seconds per token of the draft layer; estimated from the bytes that it reads until they were measured."""
        return self.measured_draft or self.draft_share * self.upper_bound(1)

    def upper_bound(self, rows: int) -> float:
        """The most seconds that a pass of `rows` takes; 0 if nothing was measured. See EXTRAPOLATION_FACTOR."""
        return self._between(
            rows, self.measured.__getitem__, lambda known: self.measured[known] * EXTRAPOLATION_FACTOR * rows / known
        )

    def estimate(self, rows: int) -> float:
        """Seconds that a pass of `rows` takes, on the assumption that rows beyond the measured ones are free. See
        PRIOR_FREE_PASSES."""
        return self._between(rows, self._shrunk, self._shrunk)

    def _shrunk(self, rows: int) -> float:
        seconds, single = self.measured[rows], self.measured.get(1)
        passes = self.passes.get(rows)
        if single is None or passes is None:
            return seconds
        return single + (seconds - single) * passes / (passes + PRIOR_FREE_PASSES)

    def _between(self, rows: int, known: Callable[[int], float], beyond: Callable[[int], float]) -> float:
        if rows in self.measured:
            return known(rows)
        below = max((other for other in self.measured if other < rows), default=0)
        above = min((other for other in self.measured if other > rows), default=0)
        if not below or not above:
            return beyond(below) if below else known(above) if above else 0.0
        share = (rows - below) / (above - below)
        return known(below) + share * (known(above) - known(below))


@dataclass(slots=True)
class Acceptance:
    """Draft tokens of one source that were verified and accepted. It starts from what is assumed before anything was
    measured."""

    verified: float
    accepted: float

    @property
    def chance(self) -> float:
        """How likely the next draft token is accepted, if those before it were."""
        return self.accepted / self.verified


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a verify pass may hold: `most` draft tokens, after `unprocessed` tokens of the text before its latest one.

    `unread`: rows that the draft layer would have to prefill first, 0 where it cannot draft.
    """

    most: int
    unprocessed: int = 0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to verify: tokens that were looked up, or a number of tokens for the draft layer. Neither: an ordinary
    step."""

    tokens: tuple[int, ...] = ()
    layer_tokens: int = 0


class Speculator:
    """Decides on one text's draft tokens. It proposes some only where the measured costs say that it pays, within
    MAX_LOSS of the time.

    `spent`: seconds that the text has taken before the first step.
    """

    def __init__(self, prompt: Iterable[int], costs: PassCosts, spent: float = 0.0) -> None:
        self._lookup = PromptLookup(prompt)
        self._costs = costs
        # Assumed at the start: of looked-up tokens one of two is accepted, of the draft layer's four of five
        # (published: 0.7 to 0.9).
        self._looked_up = {length: Acceptance(2.0, 1.0) for length in NGRAM_LENGTHS}
        self._drafted = Acceptance(5.0, 4.0)
        self._current = self._drafted
        self._spent = spent
        self._saved = 0.0  # seconds that accepted tokens have saved, less what rejected ones cost
        self.proposed = 0
        self.accepted = 0

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self._lookup.push(token)

    def plan(self, limits: DraftLimits) -> DraftPlan:
        """The draft tokens that are worth a verify pass now."""
        if limits.most < 1 or not self._costs.upper_bound(1):
            return DraftPlan()
        length, tokens = self._lookup.propose(limits.most)
        looked_up, gain = self._best(self._looked_up[length], len(tokens), limits, None) if length else (0, 0.0)
        unread = limits.unread if self._costs.draft_share else 0
        drafted, drafted_gain = self._best(self._drafted, limits.most, limits, unread) if unread else (0, 0.0)
        if drafted_gain > gain:
            self._current = self._drafted
            return DraftPlan(layer_tokens=drafted)
        if looked_up:
            self._current = self._looked_up[length]
        return DraftPlan(tokens=tuple(tokens[:looked_up]))

    def _best(self, source: Acceptance, most: int, limits: DraftLimits, unread: int | None) -> tuple[int, float]:
        """The best number of draft tokens of a source to verify, and the seconds that they save; `unread` for the draft
        layer only."""
        costs, allowed = self._costs, self._saved + MAX_LOSS * self._spent
        single, now, chance = costs.upper_bound(1), limits.unprocessed + 1, source.chance
        base = costs.estimate(now)
        token = costs.draft_token if unread else 0.0
        counts = unread or 1, min(unread or 1, USUAL_UNREAD)
        first, usual = ((rows - 1) / PREFILL_ROWS_PER_DRAFT_TOKEN for rows in counts)
        best, best_gain, expected, power = 0, 0.0, 0.0, 1.0
        for count in range(1, most + 1):
            power *= chance
            expected += power
            worth = expected * single - token * (count + usual)
            if worth <= best_gain:
                continue  # no gain even if rows were free: most steps of a text that does not repeat itself end here
            gain = worth - (costs.estimate(now + count) - base)
            risk = costs.upper_bound(now + count) - single + token * (count + first)
            if gain > best_gain and risk <= allowed:
                best, best_gain = count, gain
        return best, best_gain

    def record(
        self, proposed: int, accepted: int, seconds: float | None, *, rows: int = 0, drafting: float = 0.0
    ) -> None:
        """A step took `seconds`, `drafting` of them in the draft layer; None: not typical, as when a graph was
        captured.

        It verified `proposed` draft tokens (0: none), accepted the first `accepted`, and had `rows` rows (0: one more
        than proposed).
        """
        if seconds is not None:
            self._costs.record(rows or proposed + 1, seconds - drafting)
            self._spent += seconds
            if proposed or rows > 1:
                self._saved += (accepted + 1) * self._costs.upper_bound(1) - seconds
        if not proposed:
            return
        self.proposed += proposed
        self.accepted += accepted
        self._current.verified += min(accepted + 1, proposed)
        self._current.accepted += accepted
