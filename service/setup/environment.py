"""Our own virtual environment: how it is made, what is installed, and the check that an existing torch is never
replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..python_process import isolated_command
from .comfyui import operators_missing
from .record import Record
from .steps import SetupError, Steps

LOG = logging.getLogger(__name__)
HERE = Path(__file__).parent
PINS = HERE / "pins.txt"
TEST_PINS = HERE / "pins-test.txt"
TORCH = "torch==2.13.0"
COMPILED = ("torchvision", "torchaudio")

VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)
TRY_TORCH = "import torch; print(torch.ones(2).sum().item(), torch.__version__)"
TRY_OPERATORS = "import torch, torchaudio, torchvision; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
TRY_LAUNCHER = (
    f"import sys; sys.path.insert(0, {str(HERE)!r}); from launch_comfyui import OperatorsFirst; "
    "sys.meta_path.insert(0, OperatorsFirst()); import torchaudio, torchvision"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment at `folder`, managed through the installer's `steps`."""

    folder: Path
    steps: Steps

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        found = sorted(self.folder.glob("lib/python3*/site-packages"))
        if not found:
            raise SetupError(f"{self.folder} has no site-packages; delete that folder and run install.sh again")
        return found[0]

    def make(self, python: str, record: Record) -> None:
        """Create it with `python` unless it already works."""
        if self.python.exists() and self.steps.ask(self.python, "import pip") is not None:
            return
        advice = (
            "install Python's venv module (Debian, Ubuntu: apt install python3-venv) or name another Python with"
            " --python"
        )
        with self.steps.step("python", f"making {self.folder.name} with {python}"):
            record.empty_tree(self.folder)
            self.steps.run("python", isolated_command("-m", "venv", self.folder, python=python), advice)

    def versions(self) -> dict[str, str]:
        """Every package visible to its Python, with its version."""
        answer = self.steps.ask(self.python, VERSIONS)
        if answer is None:
            raise SetupError(f"the Python of {self.folder} does not run; delete that folder and run install.sh again")
        return json.loads(answer)

    def pip(self, step: str, *arguments: str | Path, advice: str = "") -> None:
        """Run pip in it; SetupError with the end of its output."""
        advice = (
            advice
            or "check that pip can reach its package index (pip config list; PIP_INDEX_URL), then run install.sh again"
        )
        self.steps.run(step, isolated_command("-m", "pip", "install", *arguments, python=self.python), advice)

    def add_torch(self, specs: Sequence[str]) -> None:
        """Install torch if there is none: the first of `specs` that pip can get. An existing one stays, whatever its
        version."""
        there = self.versions().get("torch")
        if there and (self.steps.done("torch", there) or self.steps.ask(self.python, TRY_TORCH)):
            LOG.info("torch     %s is there and stays as it is", there)
            self.steps.mark("torch", there)
            return
        advice = (
            "choose another build with --torch SPEC (docs/install.md), or check the package index that pip uses (pip"
            " config list)"
        )
        again = ["--force-reinstall"] if there else []
        for spec in specs:
            with self.steps.step("torch", f"installing {spec} (the largest download; minutes)"):
                try:
                    self.pip("torch", "--constraint", PINS, *again, *spec.split(), advice=advice)
                except SetupError:
                    if spec == specs[-1]:
                        raise
                    LOG.info("torch     pip cannot get it here; %s is tried next", specs[-1])
                    continue
                if not self.steps.ask(self.python, TRY_TORCH):
                    reason = f"step torch failed: {spec} is installed but does not load"
                    raise SetupError(f"{reason}\n  what to do: {advice}")
                break
        self.steps.mark("torch", self.versions()["torch"])

    def add_pins(self, step: str, pins: Path) -> None:
        """Install exactly the packages of the list `pins`, without their dependencies: packages not listed do not
        change.
        """
        key = f"{hashlib.sha256(pins.read_bytes()).hexdigest()} {self.packages.parent.name} {self.folder.name}"
        if self.steps.done(step, key):
            return
        with self.steps.step(step, f"installing the packages of {pins.name} (minutes)"):
            self.pip(step, "--no-deps", "--requirement", pins)
        self.steps.mark(step, key)

    def add_missing(self, name: str, pin: str) -> None:
        """Install `pin` of the package `name`, without its dependencies, unless some version is already installed."""
        if name in self.versions():
            return
        with self.steps.step(name, f"installing {pin}"):
            self.pip(name, "--no-deps", pin)

    def settle_operators(self) -> None:
        """Remove the compiled operators of torchvision and torchaudio if they do not load with this torch.

        ComfyUI needs only the plain Python of the two; it is then started through launch_comfyui.py.
        """
        versions = self.versions()
        key = " ".join(f"{name} {versions.get(name)}" for name in ("torch", *COMPILED))
        if self.steps.done("operators", key):
            return
        with self.steps.step("operators", "trying torchvision and torchaudio beside this torch"):
            if operators_missing(self.python):
                self.pip(
                    "operators", "--no-deps", "--force-reinstall", *(f"{name}=={versions[name]}" for name in COMPILED)
                )
            if self.steps.ask(self.python, TRY_OPERATORS) is None:
                LOG.info("operators they are built for another torch: their compiled parts are left out")
                for file in [file for name in COMPILED for file in (self.packages / name).rglob("*.so*")]:
                    file.unlink()
                if self.steps.ask(self.python, TRY_LAUNCHER) is None:
                    raise SetupError(
                        f"step operators failed: {key} do not load together\n  what to do: choose the torch that"
                        " matches with --torch"
                    )
        self.steps.mark("operators", key)

    @contextmanager
    def torch_unchanged(self) -> Iterator[None]:
        """Compare torch before and after; SetupError if an existing one has changed."""
        before = self.versions().get("torch")
        yield
        after = self.versions().get("torch")
        LOG.info("torch     before: %s, now: %s", before or "none", after or "none")
        if before and after != before:
            raise SetupError(
                f"torch was {before} and is {after or 'gone'}; this must never happen: please report it with"
                f" {self.steps.tree.logs}"
            )


def pinned(pins: Path, names: Mapping[str, object]) -> list[str]:
    """The lines of the list `pins` that pin one of `names`, with their markers."""
    lines = (line.strip() for line in pins.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line.partition("==")[0] in names]
