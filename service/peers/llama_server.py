"""llama.cpp's server as a child: its words from budgets. By its own description of its arguments (tools/server/README.md)."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

from ..config import PeerSettings
from ..errors import FileError, PeerError
from ..memory.budget import show
from .launch import Launch, Machine, Place, check_options, weight_bytes

COMMAND = ("llama-server",)
HEALTH = "/health"
ALL_LAYERS = "999"
# What a GGUF in several files is called: -00001-of-00003.gguf. The first of them names the rest.
_FIRST_PART = "-00001-of-"
OURS = ("-m", "--model", "-a", "--alias", "-c", "--ctx-size", "-np", "--parallel", "-ngl", "--gpu-layers", "--n-gpu-layers")
OURS += ("--host", "--port", "--api-key", "--api-key-file", "--sleep-idle-seconds", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url")
OURS += ("--mmap", "--no-mmap", "-lm", "--load-mode")
# By a variable, because versions that do not know it pass over it.
VARIABLES = {"LLAMA_ARG_OFFLINE": "1"}


def launch(settings: PeerSettings, machine: Machine, place: Place, knows: Callable[[str], bool]) -> Launch:
    """Its words. `knows` says whether this version has an option. Raises PeerError, FileError.

    `context` is each sequence's: the server shares one size among its slots.
    """
    title = f"[peers.{settings.name}]"
    check_options(title, settings.options, OURS)
    file = model_file(title, Path(settings.model))
    stem, part, _ = file.name.partition(_FIRST_PART)
    weights = sum(weight_bytes(title, one) for one in (file.parent.glob(f"{glob.escape(stem)}-*-of-*.gguf") if part else [file]))
    if weights >= settings.memory:
        raise PeerError(
            f"{title}: memory is {show(settings.memory)} and the weights alone take {show(weights)}; use more, or a smaller file"
        )
    words = [*(settings.command or COMMAND), "-m", str(file), "--alias", settings.name]
    words += ["-c", str(settings.context * settings.sequences), "-np", str(settings.sequences)]
    # Pages of the file would be in memory and yet count as available: weights are read into memory of the process's own.
    words += ["--load-mode", "none"] if knows("--load-mode") else ["--no-mmap"]
    words += ["-ngl", "0" if machine.kind == "cpu" else ALL_LAYERS]
    words += ["--host", "127.0.0.1", "--port", str(place.port), "--api-key-file", str(place.key_file)]
    if settings.idle:
        if not knows("--sleep-idle-seconds"):
            raise PeerError(f"{title}: this llama-server has no --sleep-idle-seconds; take idle out of its table, or install a newer one")
        words += ["--sleep-idle-seconds", str(max(1, round(settings.idle)))]
    return Launch((*words, *settings.options), VARIABLES)


def model_file(title: str, model: Path) -> Path:
    """The GGUF file to load: `model` itself, or the only one in the folder, of several parts the first. Raises FileError."""
    if not model.is_dir():
        if not model.is_file():
            raise FileError(f"{title}: there is no model {model.name}; correct model in its table")
        return model
    files = [file for file in sorted(model.glob("*.gguf")) if not file.name.startswith("mmproj")]
    firsts = [file for file in files if _FIRST_PART in file.name or "-of-" not in file.name]
    if len(firsts) != 1:
        names = ", ".join(file.name for file in firsts[:8]) or "none"
        raise FileError(f"{title}: the folder {model.name} must hold one GGUF model and has: {names}; name the file in model")
    return firsts[0]
