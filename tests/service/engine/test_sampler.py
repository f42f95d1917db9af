"""The sampler against transformers' processors, chances counted, and its promises on seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import Sampling
from onedesk.service.engine.sampler import Adjustments, Sampler
from onedesk.service.errors import ModelError
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NEUTRAL = Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0)


def sampler(
    seed: int = 0, *, vocab: int = 50, prompt: tuple[int, ...] = (), **changes: float | int | dict[int, float]
) -> Sampler:
    return Sampler(Sampling(**changes).with_defaults(NEUTRAL), seed, prompt, vocab)  # type: ignore[arg-type]


def scores(seed: int, vocab: int = 50, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(chooser: Sampler, logits: torch.Tensor) -> int:
    token = chooser.choose(logits.clone())
    chooser.accept(token)
    return token


def possible(chooser: Sampler, logits: torch.Tensor, draws: int = 400) -> set[int]:
    return {draw(chooser, logits) for _ in range(draws)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    temperature=st.floats(0.2, 2.0),
    vocab=st.sampled_from([50, 3000]),
)
def test_only_what_transformers_keeps_is_chosen(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, vocab: int
) -> None:
    logits = scores(seed, vocab)
    kept = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1.0:
        kept = TopPLogitsWarper(top_p)(None, kept)
    if min_p:
        kept = MinPLogitsWarper(min_p)(None, kept)
    allowed = set(torch.nonzero(torch.isfinite(kept[0]))[:, 0].tolist())
    chosen = possible(
        sampler(seed, vocab=vocab, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature), logits, 60
    )
    # A token whose cumulative chance lies within rounding of top_p may fall on either side.
    assert len(chosen - allowed) <= 1
    chances = logits.div(temperature).softmax(0)
    assert all(chances[i] <= 1.001 * min(chances[j] for j in allowed) for i in chosen - allowed)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.5, "min_p": 0.05}])
def test_chances_are_the_models(changes: dict[str, float]) -> None:
    logits, draws = scores(1, vocab=12, spread=1.5), 6000
    kept = logits / changes.get("temperature", 1.0)
    chances = kept.softmax(0)
    order = chances.argsort(descending=True)
    ordered = chances[order]
    keep = torch.ones(12, dtype=torch.bool)
    if "top_k" in changes:
        keep[int(changes["top_k"]) :] = False
    if "top_p" in changes:
        keep &= ordered.cumsum(0) - ordered < changes["top_p"]
    if "min_p" in changes:
        keep &= ordered >= changes["min_p"] * ordered[0]
    wanted = torch.zeros(12)
    wanted[order] = ordered * keep / (ordered * keep).sum()
    chooser = sampler(9, vocab=12, **changes)
    counted = torch.bincount(torch.tensor([draw(chooser, logits) for _ in range(draws)]), minlength=12) / draws
    # 5 standard deviations of a binomial count.
    assert bool(((counted - wanted).abs() <= 5 * (wanted * (1 - wanted) / draws).sqrt() + 1e-9).all())


def test_repetition_penalty_is_transformers() -> None:
    logits, seen = scores(3), [4, 9, 9, 20]
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits[None].clone())[0]
    chooser = sampler(prompt=(4, 9), repetition_penalty=1.7, temperature=0)
    for token in (9, 20):
        chooser.accept(token)
    work = logits.clone()
    assert chooser.choose(work) == int(wanted.argmax())
    torch.testing.assert_close(work, wanted)


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = torch.zeros(6)
    chooser = sampler(vocab=6, prompt=(5,), presence_penalty=0.5, frequency_penalty=0.25, temperature=0)
    for token in (1, 1, 2):
        chooser.accept(token)
    work = logits.clone()
    chooser.choose(work)
    torch.testing.assert_close(work, torch.tensor([0.0, -1.0, -0.75, 0.0, 0.0, 0.0]))


def test_bias_and_the_tokenizers_size_bound_the_choice() -> None:
    logits = torch.zeros(50)
    logits[40] = 100.0
    assert possible(sampler(vocab=30, logit_bias={7: 60.0, 45: 99.0}), logits, 20) == {7}
    assert sampler(vocab=30, temperature=0).choose(logits.clone()) != 40


def test_greedy_and_a_vanishing_temperature_take_the_best() -> None:
    logits = scores(5)
    best = int(logits.argmax())
    for temperature in (0, 1e-300, 1e-7, 1e-4):
        assert possible(sampler(temperature=temperature), logits, 5) == {best}


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_seed_gives_the_same_choices_and_touches_nothing_global(seed: int) -> None:
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state())
    runs = []
    for _ in range(2):
        chooser = sampler(seed)
        runs.append([draw(chooser, scores(i)) for i in range(30)])
    assert runs[0] == runs[1]
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.random.get_rng_state(), state[2])


@pytest.mark.parametrize("changes", [{}, {"top_k": 7, "top_p": 0.9}, {"temperature": 0}, {"frequency_penalty": 0.3}])
def test_looking_ahead_does_not_change_what_is_drawn(changes: dict[str, float]) -> None:
    plain, looking, found = sampler(5, **changes), sampler(5, **changes), []
    for place in range(20):
        looking.uniform(place + 3)
        looking.choose(scores(100 + place))
        found.append((draw(plain, scores(place)), draw(looking, scores(place))))
    assert all(one == other for one, other in found)


def test_a_forced_token_takes_no_draw() -> None:
    plain, forced = sampler(6), sampler(6)
    forced.accept(3, forced=True)
    assert [draw(plain, scores(i)) for i in range(5)] == [draw(forced, scores(i)) for i in range(5)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0}, {"temperature": 0.3, "top_k": 3, "logit_bias": {4: 5.0}, "presence_penalty": 1.0}],
)
def test_the_log_probability_is_the_raw_models(changes: dict[str, Any]) -> None:
    chooser = Sampler(Sampling(**changes).with_defaults(NEUTRAL), 3, (), 40, top=2)
    for place in range(5):
        token, raw = draw(chooser, scores(place)), scores(place).log_softmax(0)
        assert chooser.logprobs is not None
        assert chooser.logprobs.token == pytest.approx(float(raw[token]), abs=1e-5)
        assert chooser.logprobs.top[0] == (int(raw.argmax()), pytest.approx(float(raw.max()), abs=1e-5))
        assert len(chooser.logprobs.top) == 2


def test_different_seeds_differ() -> None:
    runs = {tuple(sampler(seed).choose(torch.zeros(50)) for _ in range(1)) for seed in range(40)}
    assert len(runs) > 10


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_the_models_fault(temperature: float, value: float) -> None:
    logits = torch.zeros(50)
    logits[3] = value
    with pytest.raises(ModelError, match="weights are damaged"):
        sampler(temperature=temperature).choose(logits)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.sampled_from([1, 50, 1023, 1024, 1025, 3000]), none=st.floats(0.0, 0.999))
def test_a_draw_among_all_is_the_inverse_of_the_cumulative_distribution(seed: int, vocab: int, none: float) -> None:
    logits = scores(seed, vocab)
    logits[1:][torch.rand(vocab - 1, generator=torch.Generator().manual_seed(seed + 1)) < none] = float("-inf")
    chooser = sampler(seed, vocab=vocab)
    sums = logits.double().softmax(0).cumsum(0)
    for place in range(5):
        token, aim = draw(chooser, logits), chooser.uniform(place)
        assert torch.isfinite(logits[token])
        assert (sums[token - 1] if token else 0.0) - 1e-6 <= aim <= sums[token] + 1e-6


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = [7 + (high << 32) for high in (0, 1, 2, 3, 2**16, 2**31, 2**32 - 1)]
    first = [tuple(sampler(seed).uniform(place) for place in range(4)) for seed in seeds]
    assert len(set(first)) == len(seeds)
    assert all(0 <= value < 1 for draws in first for value in draws)


def test_seeds_of_32_bits_keep_their_draws() -> None:
    for seed in (0, 7, 2**32 - 1):
        generator = torch.Generator().manual_seed(seed)
        expected = [float(torch.rand(1, generator=generator, dtype=torch.float64)) for _ in range(5)]
        assert [sampler(seed).uniform(place) for place in range(5)] == expected


def test_draws_of_large_seeds_are_the_same_everywhere() -> None:
    assert [round(sampler(2**63 + 5).uniform(place), 9) for place in range(3)] == [
        0.447436391,
        0.357947341,
        0.149155487,
    ]


def test_large_seeds_draw_evenly() -> None:
    chooser = sampler(2**40)
    assert abs(np.mean([chooser.uniform(place) for place in range(4000)]) - 0.5) < 0.02


def test_choices_of_a_request_share_what_it_adds_to_scores() -> None:
    sampling = Sampling(repetition_penalty=1.5, logit_bias={3: 2.0}).with_defaults(NEUTRAL)
    shared = Adjustments(sampling, (1, 2, 2, 3), 50)
    alone, beside = Sampler(sampling, 1, (1, 2, 2, 3), 50), Sampler(sampling, 1, (), 50, adjustments=shared)
    for turn in range(30):
        logits = scores(turn)
        assert draw(alone, logits) == draw(beside, logits)
    assert shared.prompt.tolist() == [1, 2, 3]
