"""Beam search: the bookkeeping against every text there is, the whole against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.api import OpenModel
from onedesk.service.config import Config
from onedesk.service.core import Request, Sampling
from onedesk.service.engine.beam_search import Candidate, Hypotheses
from onedesk.service.registry import Registry
from oracle import load_model
from tiny_qwen3 import write_tiny_qwen3

END = 0
BIAS = 4.0


def logprobs_of(seed: int, vocab: int) -> dict[tuple[int, ...], list[float]]:
    """A random language: log-probabilities of the next token for each text, made when asked for."""

    class Language(dict[tuple[int, ...], list[float]]):
        def __missing__(self, text: tuple[int, ...]) -> list[float]:
            generator = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
            self[text] = (2 * torch.randn(vocab, generator=generator)).log_softmax(0).tolist()
            return self[text]

    return Language()


def search(language: dict[tuple[int, ...], list[float]], vocab: int, width: int, most: int) -> Hypotheses:
    hypotheses = Hypotheses(width, {END}, most)
    while not hypotheses.done:
        candidates = [
            Candidate(before.total + language[before.ids][token], place, token)
            for place, before in enumerate(hypotheses.running)
            for token in range(vocab)
        ]
        hypotheses.advance(sorted(candidates, key=lambda candidate: -candidate.total)[: hypotheses.looked_at])
    return hypotheses


def every_text(language: dict[tuple[int, ...], list[float]], vocab: int, most: int) -> dict[tuple[int, ...], float]:
    """The score of every text: with an end token before `most` tokens, or of `most` tokens without one."""
    scores = {}
    for length in range(most + 1):
        for ids in itertools.product(range(1, vocab), repeat=length):
            total = sum(language[ids[:place]][token] for place, token in enumerate(ids))
            if length == most:
                scores[ids] = total / length
            else:
                scores[ids, END] = (total + language[ids][END]) / (length + 1)
    return scores


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 4), most=st.integers(1, 4))
def test_as_wide_as_there_are_texts_the_best_text_is_found(seed: int, vocab: int, most: int) -> None:
    language = logprobs_of(seed, vocab)
    scores = every_text(language, vocab, most)
    hypotheses = search(language, vocab, vocab**most, most)
    best = hypotheses.best(3)
    assert [found.score for found in best] == pytest.approx(sorted(scores.values(), reverse=True)[: len(best)])
    for found in best:
        key = found.ids if found.finish == "length" else (found.ids, END)
        assert found.score == pytest.approx(scores[key])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 9), width=st.integers(1, 8), most=st.integers(1, 6))
def test_what_is_found_is_told_truly_and_ranked(seed: int, vocab: int, width: int, most: int) -> None:
    language = logprobs_of(seed, vocab)
    hypotheses = search(language, vocab, width, most)
    assert 1 <= len(hypotheses.found) <= width
    assert [f.score for f in hypotheses.found] == sorted((f.score for f in hypotheses.found), reverse=True)
    assert len({(f.ids, f.finish) for f in hypotheses.found}) == len(hypotheses.found)
    for found in hypotheses.found:
        tokens = (*found.ids, END) if found.finish == "stop" else found.ids
        total = sum(language[tokens[:place]][token] for place, token in enumerate(tokens))
        assert found.total == pytest.approx(total)
        assert len(tokens) <= most
        assert END not in found.ids


def test_one_beam_is_greedy() -> None:
    language = logprobs_of(5, 6)
    (found,) = search(language, 6, 1, 5).best(1)
    text: tuple[int, ...] = ()
    while len(text) < 5:
        token = max(range(6), key=lambda token: language[text][token])
        if token == END:
            break
        text += (token,)
    assert found.ids == text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "bare", vocab=61, tokenizer=False, template=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[OpenModel]:
    registry = Registry()
    registry.configure(Config(tree=folder.parent, model_roots=(folder.parent,), memory={"floor": 64 << 20}))
    yield registry.open(folder, context=512)
    registry.close()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prompt", [(5, 6, 7), tuple(range(3, 43))])
def test_the_search_is_that_of_transformers(
    folder: Path, model: OpenModel, width: int, prompt: tuple[int, ...]
) -> None:
    """Length penalty 1, early stopping off; the end token is made likely, so that texts of many lengths compete."""
    request = Request(ids=prompt, beams=width, n=width, max_tokens=12, sampling=Sampling(logit_bias={2: BIAS}))
    found = [event.result for event in model.generate(request) if event.result]
    with torch.no_grad():
        wanted = load_model(folder).generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=1.0,
            early_stopping=False,
            logits_processor=[Biased()],
            renormalize_logits=True,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = [row[row >= 0].tolist() for row in wanted.sequences[:, len(prompt) :]]
    ids = [[*result.ids, *([2] if result.finish == "stop" else [])] for result in found]
    assert {"stop", "length"} >= {result.finish for result in found}
    assert [text[: len(one)] for text, one in zip(texts, ids, strict=True)] == ids
    if width > 1:
        scores = [(result.logprob or 0.0) / result.usage.completion for result in found]
        assert scores == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)


class Biased:
    """transformers adds to log-probabilities; renormalizing them makes that the bias of scores."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 2] += BIAS
        return scores
