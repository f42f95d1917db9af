"""What it takes to start an engine of another kind: its words, its environment, and how to tell that it is ready.
Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..errors import FileError, PeerError
from ..python_process import python_environment

# Nothing is asked of any hub, and no engine reports home.
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Variables by which these engines take settings: what stands in ours is meant for another run.
_FOREIGN = ("LLAMA_", "VLLM_")
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")


@dataclass(frozen=True, slots=True)
class LaunchMachine:
    """What the engine will run on: bytes of its memory in all, and whether a GPU has memory of its own or shares the
    host's.
    """

    total: int
    kind: Literal["cpu", "discrete", "integrated"]

    @property
    def one_pool(self) -> bool:
        """Whether what sleeps beside the GPU still takes the same memory."""
        return self.kind != "discrete"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the child listens, and its key: in `key_file` (mode 0600) and `key`, never among its words. `preset`: what
    Launch.preset
    is written to."""

    port: int
    key: str = field(repr=False)
    key_file: Path = field(repr=False)
    preset: Path = Path()


@dataclass(frozen=True, slots=True)
class Launch:
    """`argv` and what is put into its environment; `sleeps`: it can give its memory back and take it again without
    ending; `preset`: a
    file that it reads, "" for none."""

    argv: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    sleeps: bool = False
    preset: str = ""


def environment(launch: Launch, scratch: Path) -> dict[str, str]:
    """All that the child sees: our variables without settings of such engines, what keeps it offline, its caches in
    `scratch`.
    """
    kept = {name: value for name, value in python_environment().items() if not name.startswith(_FOREIGN)}
    return {
        **kept,
        **OFFLINE,
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "LLAMA_CACHE": str(scratch / "llama"),
        **launch.variables,
    }


def weight_bytes(title: str, model: Path) -> int:
    """Bytes of the weights in a file or folder. Raises FileError where there are none."""
    try:
        files = [model] if model.is_file() else sorted(model.iterdir())
        nbytes = sum(file.stat().st_size for file in files if file.suffix in _WEIGHT_SUFFIXES)
    except OSError as error:
        raise FileError(
            f"{title}: the model {model.name} cannot be read: {error.strerror}; correct model in its table"
        ) from error
    if not nbytes:
        raise FileError(
            f"{title}: {model.name} has no weights ({', '.join(_WEIGHT_SUFFIXES)}); correct model in its table"
        )
    return nbytes


def check_options(title: str, options: Sequence[str], ours: Sequence[str]) -> None:
    """Raise PeerError for an option that we set ourselves: what is said twice would be taken from the wrong place."""
    for option in options:
        word = option.partition("=")[0]
        if word in ours:
            raise PeerError(f"{title}: {word} in options is set from its table or by us; take it out of options")
