"""The generated data: enough concepts, held-out combinations apart, answers that keep what the check asks for."""

from __future__ import annotations

import random
from pathlib import Path

from onedesk.training import check, examples, ideas, lexicon, tokenizer


def test_the_lists_hold_enough_concepts() -> None:
    lists = lexicon.load()
    assert len({s.en for s in lists.subjects}) >= 750
    assert lists.concepts() >= 2000
    assert all(entry.en and entry.zh for entries in lists.attributes.values() for entry in entries)


def test_training_never_sees_a_held_out_combination() -> None:
    rng = random.Random(5)
    for _ in range(400):
        idea = examples._trainable(rng)
        assert not (idea.key and ideas.held_out(idea.key))
    assert all(ideas.held_out(idea.key) for idea in examples_of_the_test())


def examples_of_the_test() -> list[ideas.Idea]:
    from onedesk.training import evaluate

    return evaluate.held_out_ideas(30, seed=6)


def test_written_answers_pass_every_check() -> None:
    rng = random.Random(7)
    for _ in range(300):
        idea = ideas.random_idea(rng)
        for style in ideas.STYLES:
            text = ideas.answer(idea, style, rng)
            value = check.as_object(text) if style == "json" else {"prompt": text}
            assert value is not None
            assert check.lost_words(idea.core, value["prompt"]) == []
            assert len(check.added_attributes(idea.text, value["prompt"])) >= 3


def test_the_fast_encoder_equals_the_tokenizer(repository: Path) -> None:
    exact = tokenizer.load(repository / "models" / "onedesk-demo-writer")
    fast, rng = tokenizer.CachedEncoder(exact), random.Random(8)
    for _ in range(300):
        for text in examples.writer_text(rng):
            assert fast.encode(text) == exact.encode(text).ids
