"""How to start an engine of another kind: its arguments, its environment, and its readiness check. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..errors import FileError, PeerError
from ..python_process import python_environment

# No engine contacts a hub or reports usage.
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Prefixes of variables that configure these engines. Values in our environment are meant for other runs.
_FOREIGN = ("LLAMA_", "VLLM_")
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt")


@dataclass(frozen=True, slots=True)
class LaunchMachine:
    """The machine that the engine will run on: its total memory in bytes, and whether a GPU has its own memory or
    shares the host's.
    """

    total: int
    kind: Literal["cpu", "discrete", "integrated"]

    @property
    def one_pool(self) -> bool:
        """Whether memory moved from the GPU to the host stays in the same pool."""
        return self.kind != "discrete"


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where the child listens, and its key, which is in `key_file` (mode 0600) and `key`, never in its arguments.
    `preset`: the path to write Launch.preset to.
    """

    port: int
    key: str = field(repr=False)
    key_file: Path = field(repr=False)
    preset: Path = Path()


@dataclass(frozen=True, slots=True)
class Launch:
    """`argv` and the additions to its environment. `sleeps`: it can release its memory and take it again without a
    restart. `preset`: the content of a file that it reads, "" for none.
    """

    argv: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    sleeps: bool = False
    preset: str = ""


def environment(launch: Launch, scratch: Path) -> dict[str, str]:
    """The child's complete environment: our variables without settings of such engines, the offline switches, its
    caches in `scratch`.
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
    """Bytes of the weights in a file or folder. Raises FileError if there are none."""
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
    """Raise PeerError for an option that we set ourselves: with two values, the wrong one might win."""
    for option in options:
        word = option.partition("=")[0]
        if word in ours:
            raise PeerError(f"{title}: {word} in options is set from its table or by us; take it out of options")
