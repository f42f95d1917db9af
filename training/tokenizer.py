"""The writer's tokenizer: a small byte-level BPE trained on generated ideas and answers. Chinese characters never
merge with each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from . import ideas, scenes

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 4096
_PIECES = r"\p{Han}| ?(?:(?!\p{Han})\p{L})+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


def corpus(count: int, seed: int) -> Iterator[str]:
    """Ideas, answers and scene facts, as in training."""
    rng = random.Random(seed)
    for _ in range(count):
        idea = ideas.random_idea(rng)
        yield idea.text
        yield ideas.answer(idea, rng.choice(ideas.STYLES), rng)
        if idea.scene is not None:
            yield scenes.Scene.facts(idea.scene)
    for style in ideas.STYLES:
        yield from [ideas.preset(style)] * (count // 50)
    yield from ["system\n", "user\n", "assistant\n"] * (count // 50)


def train(count: int = 60_000, seed: int = 11) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same file."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(count, seed), trainer)
    return tokenizer


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class CachedEncoder:
    """Encodes piece by piece with a cache: the same ids as the tokenizer on the generated texts, many times faster."""

    _SPECIAL = re.compile("(" + "|".join(re.escape(s) for s in SPECIALS) + ")")
    _PIECE = re.compile(r"[\u4e00-\u9fff]| ?[^\W\d_\u4e00-\u9fff]+| ?\d| ?[^\s\w]+|\s+(?!\S)|\s")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._SPECIAL.split(text):
            for piece in (part,) if part in SPECIALS else self._PIECE.findall(part):
                known = self._cache.get(piece)
                if known is None:
                    known = self._cache[piece] = self._tokenizer.encode(piece).ids
                ids += known
        return ids
