"""The fixed directory tree of an installation: models, environments, caches and the user's data. Standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..tree_names import FILE_NAME

# The caches of the tools that we run, by the variable that moves each; values are folders under the tree's cache/.
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

# Other entries that the installer, the service, the command and ComfyUI write into cache/, as name patterns. uninstall
# removes those that match these and CACHES, and nothing else there.
CACHE_ENTRIES = (
    *("tmp", "temp", "logs", "source", "rustup", "ruff", "hypothesis", "peers", "quantized", "bench", "pycache"),
    *(
        "kernels-*",
        ".kernels-*",
        ".quantized-*",
        ".bench-*",
        "service.*",
        ".service.*",
        "read-ceiling.json",
        ".read-ceiling.json.tmp",
        "comfyui.json",
        ".comfyui.json.part",
    ),
)

# No hub is contacted at run time, and no tool sends telemetry.
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}

SETTINGS = """\
# Onedesk's one configuration file. Every value is optional; unknown names are errors. See docs/memory.md and
# docs/settings.md.

[models]
roots = ["models"]

[memory]

[service]
"""

RUN_HEAD = """\
#!/usr/bin/env bash
# Onedesk: start, stop and ask the ComfyUI of this folder. Written by install.sh; every cache stays inside this folder.
#   run.sh [start|stop|status|demo] [--port N] [-- ARGUMENTS FOR COMFYUI]
set -euo pipefail
here=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
"""

RUN_TAIL = """\
for name in onedesk service; do
  python=$here/envs/$name/bin/python
  if [[ -x $python ]]; then
    exec "$python" -I -X pycache_prefix="$here/cache/pycache" -m onedesk.service.setup.desk "$here" "$@"
  fi
done
echo "run.sh: there is no environment in $here/envs; run install.sh again" >&2
exit 1
"""


def run_script() -> str:
    """The text of run.sh. It locates its own folder, so it contains no path."""
    exports = [f'export {name}="$here/cache/{folder}"' for name, folder in CACHES.items()]
    return (
        RUN_HEAD
        + "\n".join([*exports, *(f"export {name}={value}" for name, value in OFFLINE.items())])
        + "\n"
        + RUN_TAIL
    )


def write_if_changed(path: Path, text: str, *, executable: bool = False) -> bool:
    """Write `text` to `path` in one step unless the content is equal; returns whether it was written."""
    mode = 0o755 if executable else 0o644
    part = path.with_name(f".{path.name}.part")
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        part.unlink(missing_ok=True)  # left by an interrupted run
        return False
    part.write_text(text, encoding="utf-8")
    part.chmod(mode)
    part.replace(path)
    return True


@dataclass(frozen=True, slots=True)
class Desk:
    """What run.sh needs to know of an installation: which ComfyUI it starts, with which Python, and who made it.

    `made` is true for a ComfyUI that install.sh made; `pack` is the pack's name in its custom_nodes; `link` is our link
    in the user's own ComfyUI.
    """

    comfyui: str
    python: str
    made: bool
    pack: str = "onedesk"
    link: str | None = None

    def text(self) -> str:
        """Its stored text."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Tree:
    """An installation at `prefix`. We write nothing outside it."""

    prefix: Path

    @property
    def models(self) -> Path:
        """Language models, one folder each."""
        return self.prefix / "models"

    @property
    def image_models(self) -> Path:
        """ComfyUI's kinds of models: diffusion_models, vae, loras and so on."""
        return self.models / "comfyui"

    @property
    def envs(self) -> Path:
        """Virtual environments and ComfyUI; install.sh can rebuild them."""
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
        """One log per installer step, and ComfyUI's."""
        return self.cache / "logs"

    @property
    def data(self) -> Path:
        """The user's files: input, output, user, knowledge."""
        return self.prefix / "data"

    @property
    def settings(self) -> Path:
        """The one configuration file."""
        return self.prefix / FILE_NAME

    @property
    def script(self) -> Path:
        """run.sh."""
        return self.prefix / "run.sh"

    @property
    def pack(self) -> Path:
        """The folder whose only entry is the link `onedesk` to the checkout; it is on the Python path of our
        environment.
        """
        return self.envs / "pack"

    @property
    def record(self) -> Path:
        """The stored Desk of this installation."""
        return self.envs / "desk.json"

    @property
    def model_paths(self) -> Path:
        """The file that adds the tree's models to ComfyUI."""
        return self.envs / "model_paths.yaml"

    def folders(self) -> tuple[Path, ...]:
        """Every folder of an installation, parents first."""
        data = tuple(self.data / name for name in ("input", "output", "user", "knowledge"))
        return (self.models, self.image_models, self.envs, self.cache, self.logs, self.data, *data)

    def make(self) -> None:
        """Make the missing folders of the tree; existing folders do not change."""
        for folder in (*self.folders(), *(self.cache / name for name in dict.fromkeys(("tmp", *CACHES.values())))):
            folder.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Variables that keep every cache inside the tree and every hub client offline."""
        return {name: str(self.cache / folder) for name, folder in CACHES.items()} | dict(OFFLINE)

    def write_files(self) -> list[Path]:
        """Write run.sh, and onedesk.toml if there is none; returns what was written."""
        written = [self.script] if write_if_changed(self.script, run_script(), executable=True) else []
        if not self.settings.exists():
            write_if_changed(self.settings, SETTINGS)
            written.append(self.settings)
        return written

    def save_desk(self, desk: Desk) -> None:
        """Store `desk` for run.sh."""
        write_if_changed(self.record, desk.text())

    def load_desk(self) -> Desk | None:
        """The Desk of this installation, None if the installer has not reached that step."""
        return Desk(**json.loads(self.record.read_text(encoding="utf-8"))) if self.record.is_file() else None
