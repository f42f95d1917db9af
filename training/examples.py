"""Training examples from worker processes: token rows for the writer, and (prompt, layout) pairs for the painter."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import ideas, scenes, tokenizer

ROW = 160  # tokens of a writer row
PROMPT = 80  # tokens of a painter prompt, at most
LAYOUT = 3 + 2 * scenes.FIELDS
_OTHER_SYSTEMS = (
    "You are a helpful assistant.",
    "You write prompts for an image model.",
    "Answer in one line.",
    "Be creative.",
    "你是一个有用的助手。",
)


def chat(system: str | None, idea: str) -> str:
    """The conversation up to the answer, exactly as chat_template.jinja renders it."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{idea}<|im_end|>\n<|im_start|>assistant\n"


def _trainable(rng: random.Random, kind: str | None = None) -> ideas.Idea:
    while True:
        idea = ideas.random_idea(rng, kind)
        if not idea.key or not ideas.held_out(idea.key):
            return idea


def _answer(idea: ideas.Idea, style: str, rng: random.Random) -> str:
    while True:
        text = ideas.answer(idea, style, rng)
        if ideas.fits(idea, text):
            return text
        idea = _trainable(rng) if idea.scene is None else idea


def _system(style: str, rng: random.Random) -> str | None:
    if style != "natural" or rng.random() < 0.45:
        return ideas.preset(style)
    return rng.choice(_OTHER_SYSTEMS) if rng.random() < 0.3 else None


def writer_text(rng: random.Random) -> tuple[str, str]:
    """(given text, text to learn) of one writer example: four chats for each raw prompt followed by its scene."""
    if rng.random() < 0.8:
        idea, style = _trainable(rng), rng.choices(ideas.STYLES, (4, 3, 3))[0]
        while not ideas.fits(idea, text := ideas.answer(idea, style, rng)):
            idea = _trainable(rng)
        return chat(_system(style, rng), idea.text), text + "<|im_end|>\n"
    idea = _trainable(rng, "shape" if rng.random() < 0.75 else "general")
    return "", painter_text(idea, rng) + (f"\n{idea.scene.facts()}" if idea.scene else "") + "<|endoftext|>"


def painter_text(idea: ideas.Idea, rng: random.Random) -> str:
    """A prompt for the painter: the plain idea, or the writer's answer in any style."""
    how = rng.random()
    if how < 0.22:
        return idea.core if rng.random() < 0.7 else idea.text
    if how < 0.27:
        return _answer(idea, "json", rng)
    return _answer(idea, "natural" if how < 0.66 else "tags", rng)


def _writer_rows(job: tuple[str, int, int]) -> np.ndarray:
    folder, seed, count = job
    encoder, rng = tokenizer.CachedEncoder(tokenizer.load(Path(folder))), random.Random(seed)
    rows = np.zeros((count, ROW + 2), dtype=np.uint16)  # ids, then the columns where learning starts and ends
    filled = 0
    while filled < count:
        given, learned = writer_text(rng)
        a, b = encoder.encode(given), encoder.encode(learned)
        if len(a) + len(b) > ROW:
            continue
        rows[filled, : len(a) + len(b)] = a + b
        rows[filled, ROW:] = (len(a), len(a) + len(b))
        filled += 1
    return rows


def _painter_rows(job: tuple[str, int, int]) -> tuple[np.ndarray, np.ndarray]:
    folder, seed, count = job
    encoder, rng = tokenizer.CachedEncoder(tokenizer.load(Path(folder))), random.Random(seed)
    ids, layouts = np.zeros((count, PROMPT + 1), dtype=np.uint16), np.zeros((count, LAYOUT), dtype=np.float32)
    filled = 0
    while filled < count:
        idea = _trainable(rng, "shape")
        row = encoder.encode(painter_text(idea, rng))
        if len(row) > PROMPT or idea.scene is None:
            continue
        ids[filled, : len(row)], ids[filled, PROMPT] = row, len(row)
        layouts[filled] = scenes.layout(idea.scene, rng)
        filled += 1
    return ids, layouts


def _spread(work: Callable, folder: Path, count: int, seed: int, workers: int) -> list:
    size = max(1, min(8192, count // workers))
    jobs = [(str(folder), seed + i, min(size, count - i * size)) for i in range(-(-count // size))]
    if workers == 1:
        return [work(job) for job in jobs]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(work, jobs, chunksize=1)


def writer_rows(folder: Path, count: int, seed: int, workers: int) -> np.ndarray:
    """[count, ROW + 2] uint16: token ids, then the columns where learning starts and ends. Call before CUDA is
    touched (fork).
    """
    return np.concatenate(_spread(_writer_rows, folder, count, seed, workers))


def painter_rows(folder: Path, count: int, seed: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [count, PROMPT + 1] uint16 (ids, then the length) and layouts [count, LAYOUT] float32."""
    parts = _spread(_painter_rows, folder, count, seed, workers)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
