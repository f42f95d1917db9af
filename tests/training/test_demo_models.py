"""The shipped demo models: the writer through the project's own engine, the painter through stock ComfyUI code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from onedesk.service.core import Message
from onedesk.service.text.template import load_template
from onedesk.training import evaluate, examples, network
from onedesk.training.painter import LAYERS
from oracle import load_model
from safetensors import safe_open

IDEAS, PICTURES = 40, 20
SEED = 31


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "models" / "onedesk-demo-writer"


@pytest.fixture(scope="module")
def painter(repository: Path) -> tuple[Path, Path]:
    image = repository / "models" / "comfyui"
    return (
        image / "diffusion_models" / "onedesk-demo-painter.safetensors",
        image / "vae" / "onedesk-demo-painter-vae.safetensors",
    )


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[evaluate.EngineWriter]:
    opened = evaluate.EngineWriter(folder, "cpu")
    yield opened
    opened.close()


def test_the_files_are_as_small_as_promised(folder: Path, painter: tuple[Path, Path]) -> None:
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 12_000_000
    assert sum(f.stat().st_size for f in painter) <= 20_000_000


def test_transformers_computes_the_same(folder: Path, writer: evaluate.EngineWriter) -> None:
    text = "a red circle left of a blue square, 一只红色的狐狸"
    ours = network.load_network(folder, "cpu")
    ids = torch.tensor([evaluate.tokenizer.load(folder).encode(text).ids])
    with torch.no_grad():
        theirs = load_model(folder)(ids, output_hidden_states=True)
        assert (theirs.logits - ours(ids)).abs().max() < 1e-3
        states = torch.cat([theirs.hidden_states[k] for k in LAYERS], -1)[0]
    assert (states - writer.states(text)).abs().max() < 2e-3


def test_the_template_is_what_training_saw(folder: Path) -> None:
    template = load_template(folder)
    turns = [Message("system", "S"), Message("user", "a cat")]
    assert (
        template.render(turns, thinking="off") == examples.chat("S", "a cat") == template.render(turns, thinking="on")
    )
    assert template.render(turns[1:]) == examples.chat(None, "a cat")


def test_the_writer_keeps_its_promises(writer: evaluate.EngineWriter) -> None:
    figures = evaluate.writer_figures(writer.answers(evaluate.asked_for(evaluate.held_out_ideas(IDEAS, SEED)), SEED))
    assert figures["ideas"] == IDEAS
    assert figures["words_kept"] >= 0.97
    assert figures["three_attributes"] >= 0.97
    assert figures["ends_within_96"] >= 0.99
    assert figures["no_repeated_four"] >= 0.97
    assert figures["valid_json"] >= 0.95


def test_the_painter_draws_what_the_writer_wrote(
    writer: evaluate.EngineWriter, painter: tuple[Path, Path], comfyui_folder: Path
) -> None:
    made = writer.answers(evaluate.asked_for(evaluate.held_out_ideas(PICTURES, SEED + 1, "shape")), SEED + 1)
    prompts = [evaluate.prompt_of(a) for a in made] + ["a red circle on blue"] * 3
    pictures = evaluate.draw_with_comfyui(
        writer, *painter, prompts, [*range(PICTURES), 7, 7, 8], comfyui_folder, timeout=170
    )
    figures = evaluate.picture_figures([(a.idea, p) for a, p in zip(made, pictures, strict=False)])
    assert figures["pictures"] == PICTURES
    assert figures["right_shapes"] >= 0.8  # 20 pictures of a model that is right nine times in ten
    first, again, other = pictures[PICTURES:]
    assert np.array_equal(first, again)
    assert np.abs(first.astype(int) - other.astype(int)).mean() > 1


def test_the_painter_says_which_text_it_reads(painter: tuple[Path, Path]) -> None:
    with safe_open(str(painter[0]), "pt") as file:
        note = file.metadata()
    assert note["text_encoder"] == "onedesk-demo-writer"
    assert note["layers"] == ",".join(map(str, LAYERS))
