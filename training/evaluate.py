"""Measures the demo models on held-out ideas.

python -m training.evaluate --writer FOLDER [--painter FILE --vae FILE] [--ideas 500] [--pictures 200]
                            [--plain] [--device cuda] [--comfyui FOLDER] [--json FILE] [--sheet FILE]
Without --plain the writer runs through the project's own engine; with it, through the training code's network in
batches.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from . import check, examples, ideas, tokenizer
from .autoencoder import load_autoencoder
from .flux import load_painter, sample
from .network import generate, load_network
from .painter import LAYERS

MOST = 96  # most tokens per answer, its end included
STEPS = 12
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Answer:
    """The writer's answer to an idea; `ended`: by itself within MOST tokens."""

    idea: ideas.Idea
    style: str
    text: str
    ended: bool


class Writes(Protocol):
    """Any object that answers (idea, style) pairs and returns hidden states of raw texts."""

    def answers(self, asked: Sequence[tuple[ideas.Idea, str]], seed: int) -> list[Answer]: ...

    def states(self, text: str) -> torch.Tensor: ...


class PlainWriter:
    """The training code's network: one batch, no cache; for a GPU."""

    def __init__(self, folder: Path, device: str) -> None:
        self._network, self._tokenizer, self._device = load_network(folder, device), tokenizer.load(folder), device

    def answers(self, asked: Sequence[tuple[ideas.Idea, str]], seed: int) -> list[Answer]:
        prompts = [self._tokenizer.encode(examples.chat(_system(style), idea.text)).ids for idea, style in asked]
        rows = generate(self._network, prompts, (0, 2), MOST, TEMPERATURE, seed)
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return [Answer(i, s, t, r[-1] in (0, 2)) for (i, s), t, r in zip(asked, texts, rows, strict=True)]

    @torch.no_grad()
    def states(self, text: str) -> torch.Tensor:
        ids = torch.tensor([self._tokenizer.encode(text).ids], device=self._device)
        return self._network.states(ids, LAYERS)[0].float()


class EngineWriter:
    """The same checkpoint opened by the project's engine, as for a user."""

    def __init__(self, folder: Path, device: str) -> None:
        from onedesk.service.registry import REGISTRY

        self._model = REGISTRY.open(folder, device=device, context=512)

    def answers(self, asked: Sequence[tuple[ideas.Idea, str]], seed: int) -> list[Answer]:
        from onedesk.service.core import Message, Request, Sampling

        made = []
        for index, (idea, style) in enumerate(asked):
            system = _system(style)
            turns = (*((Message("system", system),) if system else ()), Message("user", idea.text))
            sampling = Sampling(temperature=TEMPERATURE, top_p=1.0, top_k=0, seed=seed + index)
            events = list(self._model.generate(Request(messages=turns, sampling=sampling, max_tokens=MOST)))
            result = events[-1].result
            made.append(Answer(idea, style, result.text, result.finish == "stop"))
        return made

    def states(self, text: str) -> torch.Tensor:
        return self._model.embed_prompt(text, LAYERS)

    def close(self) -> None:
        self._model.close()


def _system(style: str) -> str | None:
    return None if style == "none" else ideas.preset(style)


def held_out_ideas(count: int, seed: int, kind: str | None = None) -> list[ideas.Idea]:
    """Ideas whose combination was never trained on."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        idea = ideas.random_idea(rng, kind)
        if idea.key and ideas.held_out(idea.key) and ideas.fits(idea, ideas.answer(idea, "natural", rng)):
            found.append(idea)
    return found


def asked_for(found: Sequence[ideas.Idea]) -> list[tuple[ideas.Idea, str]]:
    """Each idea with a style; none (no system prompt), natural, tags and json in rotation."""
    return [(idea, ("none", "natural", "tags", "json")[i % 4]) for i, idea in enumerate(found)]


def writer_figures(made: Sequence[Answer]) -> dict[str, float]:
    """The five quality shares, and the number of answers behind each."""
    bodies, valid, objects = [], 0, 0
    for answer in made:
        value = check.as_object(answer.text) if answer.style == "json" else None
        objects += answer.style == "json"
        valid += value is not None
        bodies.append(value["prompt"] if value else answer.text)
    pairs = list(zip(made, bodies, strict=True))
    count = len(made)
    return {
        "ideas": count,
        "words_kept": sum(not check.lost_words(a.idea.text, b) for a, b in pairs) / count,
        "three_attributes": sum(len(check.added_attributes(a.idea.text, b)) >= 3 for a, b in pairs) / count,
        "ends_within_96": sum(a.ended for a in made) / count,
        "no_repeated_four": sum(not check.repeats_four(b) for b in bodies) / count,
        "valid_json": valid / max(1, objects),
        "json_asked": objects,
    }


def prompt_of(answer: Answer) -> str:
    """The painter's prompt: the answer, or the prompt inside its JSON object."""
    value = check.as_object(answer.text) if answer.style == "json" else None
    return value["prompt"] if value else answer.text


def picture_figures(scenes_and_pictures: Sequence[tuple[ideas.Idea, np.ndarray]]) -> dict[str, float]:
    """Shares of pictures with the right shapes and colours, background, positions, and all of them."""
    verdicts = [check.judge(idea.scene, picture) for idea, picture in scenes_and_pictures if idea.scene]
    count = len(verdicts)
    named = ("shapes", "background", "places", "all")
    return {"pictures": count, **{f"right_{n}": sum(getattr(v, n) for v in verdicts) / count for n in named}}


def to_pixels(pictures: torch.Tensor) -> np.ndarray:
    """[N, 3, H, W] in 0..1 -> [N, H, W, 3] uint8."""
    return (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


@torch.no_grad()
def draw(
    writer: Writes,
    painter_file: Path,
    vae_file: Path,
    prompts: Sequence[str],
    seeds: Sequence[int],
    device: str,
    batch: int = 1,
) -> np.ndarray:
    """Pictures [N, 128, 128, 3] uint8 by the training code's own Euler sampler; in batches, short prompts are padded
    and masked.
    """
    painter, autoencoder = load_painter(painter_file, device), load_autoencoder(vae_file, device)
    made = []
    for start in range(0, len(prompts), batch):
        states = [writer.states(p).to(device) for p in prompts[start : start + batch]]
        text = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        lengths = torch.tensor([len(s) for s in states], device=device)
        mask = torch.arange(text.shape[1], device=device)[None] < lengths[:, None]
        made.append(
            autoencoder.decode(
                sample(painter, text, mask if batch > 1 else None, list(seeds[start : start + batch]), STEPS)
            )
        )
    return to_pixels(torch.cat(made))


def draw_with_comfyui(
    writer: Writes,
    painter_file: Path,
    vae_file: Path,
    prompts: Sequence[str],
    seeds: Sequence[int],
    comfyui: Path,
    timeout: float = 3600,
) -> np.ndarray:
    """The same through stock ComfyUI code (UNETLoader, VAELoader, KSampler dpmpp_2m and beta at cfg 1, VAEDecode) in a
    child process.
    """
    job = {f"text_{i}": writer.states(p).contiguous() for i, p in enumerate(prompts)}
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        save_file({**job, "seeds": torch.tensor(list(seeds))}, Path(folder) / "job.safetensors")
        command = [
            sys.executable,
            "-m",
            "training.comfy_draw",
            str(comfyui),
            f"{folder}/job.safetensors",
            f"{folder}/out.npy",
            "--painter",
            str(painter_file.resolve()),
            "--vae",
            str(vae_file.resolve()),
            "--steps",
            str(STEPS),
        ]
        subprocess.run(command, check=True, cwd=root, timeout=timeout, capture_output=True)
        return np.load(Path(folder) / "out.npy")


def _report(figures: dict[str, dict], seconds: float) -> None:
    for part, values in figures.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:20} {value:.3f}" if isinstance(value, float) else f"  {name:20} {value}")
    print(f"{seconds:.0f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writer", type=Path, required=True)
    parser.add_argument("--painter", type=Path)
    parser.add_argument("--vae", type=Path)
    parser.add_argument("--ideas", type=int, default=500)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument(
        "--comfyui", type=Path, help="draw with the stock code of this ComfyUI folder instead of our own sampler"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of the pictures here (PNG)")
    settings = parser.parse_args()
    begin = time.perf_counter()
    writer: Writes = (PlainWriter if settings.plain else EngineWriter)(settings.writer, settings.device)
    figures: dict[str, dict] = {}
    if settings.ideas:
        made = writer.answers(asked_for(held_out_ideas(settings.ideas, settings.seed)), settings.seed)
        figures["writer"] = writer_figures(made)
        for answer in made[:12]:
            print(f"{answer.idea.text!r} [{answer.style}] -> {answer.text}")
        for answer in [a for a in made if check.lost_words(a.idea.text, a.text)][:12]:
            print(f"lost {check.lost_words(answer.idea.text, answer.text)}: {answer.idea.text!r} -> {answer.text}")
    if settings.painter and settings.pictures:
        made = writer.answers(
            asked_for(held_out_ideas(settings.pictures, settings.seed + 1, "shape")), settings.seed + 1
        )
        chosen = [a.idea for a in made]
        for name, prompts in (
            ("painter after writer", [prompt_of(a) for a in made]),
            ("painter on plain ideas", [i.core for i in chosen]),
        ):
            files, seeds = (settings.painter, settings.vae), range(len(prompts))
            if settings.comfyui:
                pictures = draw_with_comfyui(writer, *files, prompts, seeds, settings.comfyui)
            else:
                pictures = draw(writer, *files, prompts, seeds, settings.device, 50 if settings.device == "cuda" else 1)
            figures[name] = picture_figures(list(zip(chosen, pictures, strict=True)))
            if settings.sheet:
                _sheet(
                    pictures,
                    settings.sheet.with_name(f"{settings.sheet.stem}-{name.split()[1]}{settings.sheet.suffix}"),
                )
    _report(figures, time.perf_counter() - begin)
    if settings.json:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def _sheet(pictures: np.ndarray, path: Path) -> None:
    from PIL import Image

    wide = min(10, len(pictures))
    rows = [np.concatenate(list(pictures[i : i + wide]), 1) for i in range(0, len(pictures) - wide + 1, wide)]
    Image.fromarray(np.concatenate(rows, 0)).save(path)


if __name__ == "__main__":
    main()
