"""The user's existing ComfyUI: its environment is only read, and the pack is linked into its custom_nodes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..tree_names import TREE_LINK
from .environment import PINS, VERSIONS, Environment, pinned
from .pack import NAME, Project, recorded_link
from .record import Record
from .steps import SetupError, Steps
from .tree import Tree, write_if_changed

LOG = logging.getLogger(__name__)
# Where a ComfyUI's environment usually is, relative to its folder.
PYTHONS = (
    ".venv/bin/python",
    "venv/bin/python",
    "env/bin/python",
    "../.venv/bin/python",
    "../venv/bin/python",
    "../env/bin/python",
)
PATH_FILE = "comfyui-environment.pth"
FOLDERS = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"
# Kinds of image models; each is a folder of models/comfyui.
KINDS = (
    *(
        "checkpoints",
        "clip_vision",
        "configs",
        "controlnet",
        "diffusers",
        "diffusion_models",
        "embeddings",
        "gligen",
        "hypernetworks",
    ),
    *(
        "latent_upscale_models",
        "loras",
        "model_patches",
        "photomaker",
        "style_models",
        "text_encoders",
        "upscale_models",
        "vae",
        "vae_approx",
    ),
)


@dataclass(frozen=True, slots=True)
class Foreign:
    """The user's ComfyUI in `folder`, run by `python`."""

    folder: Path
    python: Path
    steps: Steps

    def versions(self) -> dict[str, str]:
        """The packages of its environment."""
        answer = self.steps.ask(self.python, VERSIONS)
        if answer is None:
            raise SetupError(
                f"{self.python} does not run; name the Python that starts this ComfyUI with --comfyui-python"
            )
        return json.loads(answer)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Compare its packages before and after; SetupError if any has changed."""
        before = self.versions()
        if "torch" not in before:
            raise SetupError(
                f"{self.python} has no torch, so it cannot be what starts {self.folder}; name the right one with"
                " --comfyui-python"
            )
        yield
        after = self.versions()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            raise SetupError(
                f"the environment of {self.folder} has changed while we worked: {', '.join(changed)}; this must never"
                " happen"
            )
        LOG.info("comfyui   its environment is as it was: %d packages, torch %s", len(after), after["torch"])

    def share_packages(self, service: Environment, project: Project) -> None:
        """Make that environment's packages visible in ours, after our own, and install the missing ones in ours."""
        answer = self.steps.ask(self.python, FOLDERS)
        folders = dict.fromkeys(json.loads(answer or "[]"))
        write_if_changed(service.packages / PATH_FILE, "".join(f"{folder}\n" for folder in folders))
        # The only marker among our dependencies is for Python 3.10, which has no TOML parser.
        old = service.packages.parent.name == "python3.10"
        needed = (*project.dependencies, *project.service)
        names = [re.split(r"[ ;<>=~\[]", dependency)[0] for dependency in needed if old or ";" not in dependency]
        missing = {name: None for name in names if name not in service.versions()}
        wanted = pinned(PINS, missing)
        if wanted and not self.steps.done("service", " ".join(wanted)):
            with self.steps.step("service", f"adding {', '.join(missing)} to our own environment"):
                service.pip("service", "--no-deps", *wanted)
            self.steps.mark("service", " ".join(wanted))

    def add_pack(self, checkout: Path, tree: Tree, record: Record) -> tuple[str, Path]:
        """Link the pack into its custom_nodes through the tree's own link, so that the pack finds its tree (see
        config.installed_file).

        If the checkout itself is in custom_nodes, the link goes from it to the tree. Returns the pack's name there and
        the link.
        """
        nodes = self.folder / "custom_nodes"
        if nodes.is_dir() and checkout.parent.samefile(nodes):
            link_path = checkout / TREE_LINK
            if link_path.is_symlink():  # to the tree of an earlier installation
                link_path.unlink()
            recorded_link(record, link_path, tree.prefix)
            return checkout.name, link_path
        recorded_link(record, nodes / NAME, tree.pack / NAME)
        return NAME, nodes / NAME


def no_comfyui(folder: Path) -> str | None:
    """Why `folder` is not a ComfyUI; None if it is one."""
    if (folder / "main.py").is_file() and (folder / "comfy").is_dir():
        return None
    return f"{folder} is no ComfyUI: it has no main.py and comfy/; name the folder that holds them with --comfyui"


def find_foreign(folder: Path, python: Path | None, steps: Steps) -> Foreign:
    """The ComfyUI in `folder` and the Python that runs it; SetupError if there is none."""
    if reason := no_comfyui(folder):
        raise SetupError(reason)
    choices = [python] if python else [folder / path for path in PYTHONS]
    for choice in choices:
        if choice.exists():
            return Foreign(folder, choice.absolute(), steps)
    looked = ", ".join(str(choice) for choice in choices)
    raise SetupError(
        f"no Python found for {folder} (looked at {looked}); name the one that starts it with --comfyui-python"
    )


def model_paths(tree: Tree, kinds: Sequence[str] = KINDS) -> str:
    """A model path file that adds the tree's language models and these kinds of image models to ComfyUI's folders.

    JSON strings are valid YAML, so any path can be written.
    """
    lines = ["onedesk:", f"  base_path: {json.dumps(str(tree.models), ensure_ascii=False)}", '  llm: "."']
    return "\n".join([*lines, *(f'  {kind}: "comfyui/{kind}"' for kind in kinds)]) + "\n"
