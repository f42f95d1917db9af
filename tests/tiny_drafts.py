"""Tiny checkpoints with a multi-token prediction layer: with random weights, or rigged so that every draft token is
right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from onedesk.service.model.decoder import drafting
from onedesk.service.model.families import describe
from safetensors.torch import load_file, save_file
from tiny_families import write_family
from torch.nn.functional import normalize

Tensors = dict[str, torch.Tensor]
# The weights that are zero in a layer without effect.
SILENT = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "down_proj",
    "value_proj.weight",
    "input_mix_weight_up.weight",
)


def write_drafter(folder: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint of `family` with a random draft layer: almost no draft token is right."""
    return add_draft(write_family(folder, family, seed=5, **changes))


def add_draft(folder: Path, *, said: int | None = 1) -> Path:
    """Add a draft layer with random weights to a transformers checkpoint; `said`: the config's entries for it."""
    generator, own = torch.Generator().manual_seed(5), {}
    config = json.loads((folder / "config.json").read_text())
    for destination in drafting(describe(config)):
        for source in destination.sources:
            noise = torch.randn(source.shape, generator=generator)
            own[source.name] = noise * (0.1 if noise.dim() == 1 else 0.7 * noise.shape[-1] ** -0.5)
    if said is not None:
        config.get("text_config", config)["mtp_num_hidden_layers"] = said
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, lambda tensors: tensors | own)
    return folder


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    """Rewrite the checkpoint's tensors after editing."""
    path = folder / "model.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in edit(load_file(path)).items()}, path, metadata={"format": "pt"}
    )


def write_rigged(folder: Path, family: str, *, wrong: float = 0.0, **changes: Any) -> Path:
    """A checkpoint whose text is one fixed cycle of all tokens, and whose drafts follow it: every draft token is right.

    `wrong`: noise of the draft layer; with 0.25 about every third draft token is wrong.
    """
    add_draft(write_family(folder, family, seed=5, tie_word_embeddings=False, **changes))
    change(folder, lambda tensors: tensors | _rigged(tensors, wrong))
    return folder


def _rigged(tensors: Tensors, wrong: float) -> Tensors:
    table, head = (
        next(name for name in tensors if name.endswith(f"{which}.weight")) for which in ("embed_tokens", "lm_head")
    )
    generator = torch.Generator().manual_seed(1)
    vocab, hidden = tensors[table].shape
    embedding = normalize(torch.randn(vocab, hidden, generator=generator))
    order = torch.randperm(vocab, generator=generator)
    follows, scored = torch.empty(vocab, dtype=torch.int64), torch.empty(vocab, hidden)
    follows[order] = order.roll(-1)
    scored[follows] = embedding
    silent = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith(SILENT)}
    norms = {name: torch.zeros_like(tensors[name]) for name in tensors if "norm" in name and "linear_attn" not in name}
    joint, of_hidden = (
        torch.eye(hidden) + wrong * torch.randn(hidden, hidden, generator=generator),
        torch.zeros(hidden, hidden),
    )
    if "mtp.fc.weight" in tensors:
        projections = {"mtp.fc.weight": torch.cat((joint, of_hidden), 1)}
    else:
        projections = {"mtp.fc_embedding.weight": joint, "mtp.fc_hidden.weight": of_hidden}
    return silent | norms | {table: embedding, head: 4 * scored} | projections
