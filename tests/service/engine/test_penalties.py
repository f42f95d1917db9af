"""Penalties and candidates of the host sampler: those counted anew for every token, at a cost that does not grow."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import FP32_MAX, NEUTRAL, Sampling
from onedesk.service.engine.candidates import COLUMN, FEW, largest
from onedesk.service.engine.sampler import Sampler

VOCAB = 151_936
CARD = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}

# Calls of a choice and its acceptance with all penalties; 95 were counted.
MOST_STEPS = 110


def sampler(prompt: tuple[int, ...] = (), limit: int = VOCAB, **changes: float) -> Sampler:
    return Sampler(Sampling(**changes).with_defaults(NEUTRAL), 5, prompt, limit)  # type: ignore[arg-type]


def anew(scores: np.ndarray, prompt: list[int], written: list[int], sampling: dict[str, float]) -> np.ndarray:
    """What the penalties make of `scores`, counted over the whole text."""
    made = scores.copy()
    counts = Counter(token for token in written if token < len(scores))
    divisor = np.float32(sampling["repetition_penalty"])
    for token in {*counts, *(token for token in prompt if token < len(scores))} if divisor != 1 else ():
        made[token] = made[token] / divisor if made[token] > 0 else made[token] * divisor
    for token, count in counts.items():
        amount = np.float32(sampling["presence_penalty"]) + np.float32(sampling["frequency_penalty"]) * np.float32(
            count
        )
        made[token] = np.clip(made[token] - amount, -FP32_MAX, FP32_MAX) if amount else made[token]
    return made


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 79), max_size=30),
    written=st.lists(st.integers(0, 79), max_size=120),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.3]),
    repetition=st.sampled_from([1.0, 1.1, 0.8]),
)
def test_they_are_those_of_the_whole_text(
    prompt: list[int], written: list[int], presence: float, frequency: float, repetition: float
) -> None:
    changes = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    chooser = sampler(tuple(prompt), 70, temperature=0.0, **changes)
    raw = np.random.default_rng(len(written)).normal(size=80).astype(np.float32)
    for at, token in enumerate(written):
        if at % 17 == 0:
            scores = torch.from_numpy(raw.copy())
            chooser.choose(scores)
            np.testing.assert_array_equal(scores.numpy()[:70], anew(raw[:70], prompt, written[:at], changes))
        chooser.accept(token)
    scores = torch.from_numpy(raw.copy())
    chooser.choose(scores)
    np.testing.assert_array_equal(scores.numpy()[:70], anew(raw[:70], prompt, written, changes))


def test_choices_that_share_a_prompt_do_not_share_what_they_write() -> None:
    first = sampler((3, 5), 40, temperature=0.0, repetition_penalty=2.0)
    second = Sampler(first.sampling, 1, (), 40, adjustments=first.adjustments)
    first.accept(7)
    scores = torch.ones(40)
    second.choose(scores)
    assert scores[[3, 5, 7]].tolist() == [0.5, 0.5, 1.0]


def steps(chooser: Sampler, scores: torch.Tensor) -> int:
    """Calls of one choice and its acceptance, those of C functions included."""
    seen = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    work, before = scores.clone(), sys.getprofile()
    sys.setprofile(count)
    try:
        chooser.accept(chooser.choose(work))
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("penalties", [{}, PENALTIES, {"presence_penalty": 1.5}], ids=["none", "all", "presence"])
def test_a_choice_takes_as_many_steps_after_a_long_text(penalties: dict[str, float]) -> None:
    chooser = sampler(tuple(range(1000)), **CARD, **penalties)
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    for token in range(500, 520):
        chooser.accept(token)
    steps(chooser, scores)
    early = max(steps(chooser, scores) for _ in range(3))
    assert early <= MOST_STEPS
    for token in range(20_000):
        chooser.accept(token % 9000, forced=True)
    assert max(steps(chooser, scores) for _ in range(3)) <= early


def test_card_settings_change_only_penalized_scores() -> None:
    """One pass reads all scores; none of the rest is scaled or shifted."""
    chooser = sampler(**CARD, **PENALTIES)
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    raw = scores.clone()
    for token in (7, 7, 9):
        chooser.accept(token)
    chooser.choose(scores)
    assert torch.nonzero(scores != raw)[:, 0].tolist() == [7, 9]


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([5, COLUMN * FEW, COLUMN * FEW * 20 + 77, 40_000]),
    count=st.integers(1, 20),
    levels=st.sampled_from([3, 50, 10**6]),
    kept=st.sampled_from([1.0, 0.01, 0.0003]),
    seed=st.integers(0, 100),
)
def test_the_largest_are_those_of_a_full_sort(size: int, count: int, levels: int, kept: float, seed: int) -> None:
    """With ties, and with most scores masked by a grammar."""
    chance = np.random.default_rng(seed)
    values = chance.integers(0, levels, size).astype(np.float32)
    values[chance.random(size) > kept] = -np.inf
    values[0] = 1.0
    found, ids = largest(values, count)
    wanted = np.sort(values)[::-1][:count]
    here = wanted > -np.inf
    np.testing.assert_array_equal(found[: here.sum()], wanted[here])
    assert (found[here.sum() :] == -np.inf).all()
    np.testing.assert_array_equal(values[ids], found)
    assert len(set(ids.tolist())) == len(ids)


@pytest.mark.parametrize("at", [0, 70_000, VOCAB - 1])
def test_a_nan_is_found_wherever_it_is(at: int) -> None:
    values = np.zeros(VOCAB, np.float32)
    values[at] = np.nan
    assert np.isnan(largest(values, 20)[0][0])


def test_of_equal_scores_the_lower_ids_are_candidates() -> None:
    values = np.arange(VOCAB, dtype=np.float32) // 50
    found, ids = largest(values, 20)
    top = values.max()
    assert found.tolist() == [top] * 20
    assert ids.tolist() == list(range(int(top) * 50, int(top) * 50 + 20))
