"""llama.cpp's server as a child: its arguments from budgets. Based on its documentation (tools/server/README.md)."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config import PeerSettings, model_name
from ..errors import FileError, PeerError
from ..memory.budget import show
from .launch import EngineEndpoint, Launch, LaunchMachine, check_options, weight_bytes

COMMAND = ("llama-server",)
HEALTH = "/health"
ALL_LAYERS = "999"
# The name of a split GGUF file: -00001-of-00003.gguf. The first part leads to the others.
_FIRST_PART = "-00001-of-"
OURS = (
    "-m",
    "--model",
    "-a",
    "--alias",
    "-c",
    "--ctx-size",
    "-np",
    "--parallel",
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
)
OURS += (
    "--host",
    "--port",
    "--api-key",
    "--api-key-file",
    "--sleep-idle-seconds",
    "-hf",
    "-hfr",
    "--hf-repo",
    "-mu",
    "--model-url",
)
OURS += ("--mmap", "--no-mmap", "-lm", "--load-mode", "--models-dir", "--models-preset", "--models-max")
# By a variable, since versions that do not know it ignore it.
VARIABLES = {"LLAMA_ARG_OFFLINE": "1"}


def launch(
    settings: PeerSettings, machine: LaunchMachine, endpoint: EngineEndpoint, knows: Callable[[str], bool]
) -> Launch:
    """Its arguments. `knows` says whether this version has an option. Raises PeerError, FileError.

    `context` is per sequence; the server divides one total among its slots. With several models it starts as a router,
    which runs each model in a process of its own, loads on demand, and ends the least recently used one.
    """
    title = f"[peers.{settings.name}]"
    check_options(title, settings.options, OURS)
    files = {name: model_file(title, Path(model)) for name, model in named_models(settings).items()}
    _check_room(title, settings, files)
    if settings.idle and not knows("--sleep-idle-seconds"):
        raise PeerError(
            f"{title}: this llama-server has no --sleep-idle-seconds; take idle out of its table, or install a"
            " newer one"
        )
    modes = _modes(settings, machine, knows)
    words, preset = [*(settings.command or COMMAND)], ""
    if settings.models:
        if not knows("--models-preset"):
            raise PeerError(
                f"{title}: this llama-server takes one model; write a table for each of them, or install a newer one"
            )
        words += ["--models-preset", str(endpoint.preset), "--models-max", str(settings.loaded)]
        preset = _preset(files, modes)
    else:
        [(name, file)] = files.items()
        words += [
            "-m",
            str(file),
            "--alias",
            name,
            *(word for key, value in modes.items() for word in (f"--{key}", value) if word),
        ]
    words += ["--host", "127.0.0.1", "--port", str(endpoint.port), "--api-key-file", str(endpoint.key_file)]
    return Launch((*words, *settings.options), VARIABLES, preset=preset)


def named_models(settings: PeerSettings) -> dict[str, str]:
    """The models that it serves, by name."""
    return {model_name(model): model for model in settings.models} or {settings.name: settings.model}


def _modes(settings: PeerSettings, machine: LaunchMachine, knows: Callable[[str], bool]) -> dict[str, str]:
    """A model's options by their long names; "" for an option without a value."""
    modes = {"ctx-size": str(settings.context * settings.sequences), "parallel": str(settings.sequences)}
    # Mapped file pages would be in memory and still count as available, so weights are read into private memory.
    modes |= {"load-mode": "none"} if knows("--load-mode") else {"no-mmap": ""}
    modes["n-gpu-layers"] = "0" if machine.kind == "cpu" else ALL_LAYERS
    return modes | ({"sleep-idle-seconds": str(max(1, round(settings.idle)))} if settings.idle else {})


def _preset(files: Mapping[str, Path], modes: Mapping[str, str]) -> str:
    """A router's preset file: a section per model, its options as keys."""
    lines = ["version = 1"]
    for name, file in files.items():
        lines += [f"[{name}]", f"model = {file}", *(f"{key} = {value or 'true'}" for key, value in modes.items())]
    return "\n".join(lines) + "\n"


def _check_room(title: str, settings: PeerSettings, files: Mapping[str, Path]) -> None:
    """Raise PeerError if the weights loaded at the same time leave none of its memory free."""
    sizes = sorted((_file_bytes(title, file) for file in files.values()), reverse=True)
    weights = sum(sizes[: settings.loaded] if settings.models else sizes)
    if weights >= settings.memory:
        raise PeerError(
            f"{title}: memory is {show(settings.memory)} and the weights alone take {show(weights)}; use more, or a"
            " smaller file"
        )
    for name in (file.name for file in files.values() if settings.models and not str(file).isprintable()):
        raise FileError(f"{title}: the path of {name!r} has signs that its list of models cannot hold; rename it")


def _file_bytes(title: str, file: Path) -> int:
    stem, part, _ = file.name.partition(_FIRST_PART)
    return sum(
        weight_bytes(title, one) for one in (file.parent.glob(f"{glob.escape(stem)}-*-of-*.gguf") if part else [file])
    )


def model_file(title: str, model: Path) -> Path:
    """The GGUF file to load: `model` itself, or the only one in the folder; for a split file, the first part. Raises
    FileError.
    """
    if not model.is_dir():
        if not model.is_file():
            raise FileError(f"{title}: there is no model {model.name}; correct model in its table")
        return model
    files = [file for file in sorted(model.glob("*.gguf")) if not file.name.startswith("mmproj")]
    firsts = [file for file in files if _FIRST_PART in file.name or "-of-" not in file.name]
    if len(firsts) != 1:
        names = ", ".join(file.name for file in firsts[:8]) or "none"
        raise FileError(
            f"{title}: the folder {model.name} must hold one GGUF model and has: {names}; name the file in model"
        )
    return firsts[0]
