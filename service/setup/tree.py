"""The fixed directory tree of an installation: where models, environments, caches and the user's data lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Every cache that a tool under our roof may write, by the variable that moves it; values are folders under the tree's cache/.
CACHES: Mapping[str, str] = {
    "XDG_CACHE_HOME": "xdg",
    "PIP_CACHE_DIR": "pip",
    "UV_CACHE_DIR": "uv",
    "HF_HOME": "huggingface",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
    "VLLM_CACHE_ROOT": "vllm",
    "npm_config_cache": "npm",
    "NODE_COMPILE_CACHE": "node",
    "PYRIGHT_PYTHON_CACHE_DIR": "pyright",
}

# Nothing is asked of any hub at run time, and no tool reports home.
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """An installation at `prefix`. Nothing of ours is written outside it."""

    prefix: Path

    @property
    def models(self) -> Path:
        """Language models, a folder each."""
        return self.prefix / "models"

    @property
    def image_models(self) -> Path:
        """ComfyUI's kinds of models: diffusion_models, vae, loras and so on."""
        return self.models / "comfyui"

    @property
    def envs(self) -> Path:
        """Virtual environments and ComfyUI; can be made again by install.sh."""
        return self.prefix / "envs"

    @property
    def comfyui(self) -> Path:
        """The ComfyUI that install.sh makes."""
        return self.envs / "ComfyUI"

    @property
    def cache(self) -> Path:
        """Caches and logs; may be deleted whenever nothing runs."""
        return self.prefix / "cache"

    @property
    def logs(self) -> Path:
        """One log a step of the installer, and ComfyUI's."""
        return self.cache / "logs"

    @property
    def data(self) -> Path:
        """The user's own: input, output, user, knowledge."""
        return self.prefix / "data"

    @property
    def settings(self) -> Path:
        """The one configuration file."""
        return self.prefix / "onedesk.toml"

    def folders(self) -> tuple[Path, ...]:
        """Every folder that an installation has, parents first."""
        data = tuple(self.data / name for name in ("input", "output", "user", "knowledge"))
        return (self.models, self.image_models, self.envs, self.cache, self.logs, self.data, *data)

    def make(self) -> None:
        """Make what is missing of the tree; existing folders are left as they are."""
        for folder in (*self.folders(), *(self.cache / name for name in dict.fromkeys(CACHES.values()))):
            folder.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Variables that keep every cache inside the tree and every hub client offline."""
        return {name: str(self.cache / folder) for name, folder in CACHES.items()} | dict(OFFLINE)
