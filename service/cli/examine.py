"""Examines an installation: each part's state, and what to do if it is wrong."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ..config import Config, load_config
from ..errors import OnedeskError
from ..setup.tree import Desk, Tree

Status = Literal["ok", "warning", "failure"]
OLDEST_PYTHON = (3, 10)
NEEDED = ("safetensors", "tokenizers", "aiohttp", "jinja2", "numpy", "pillow", "psutil")
LITTLE_MEMORY = 2 << 30  # bytes available; less does not fit even a small model and an image
HIGH_PRESSURE = 10.0  # percent of the last 10 s in which something waited for memory
LITTLE_DISK = 5 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination. `fix` says what to do; empty if nothing needs to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def examine(config_file: Path | None, *, device: str) -> list[Check]:
    """All checks in order. Loads no model and changes nothing, except that it may compile a missing kernel into the
    cache.
    """
    checks = [_python(), *_packages()]
    try:
        config = load_config(config_file)
    except OnedeskError as error:
        return [
            *checks,
            Check("configuration", "failure", str(error), "correct the file, or name another one with --config"),
        ]
    checks.append(
        Check(
            "configuration",
            "ok",
            str(config.file) if config.file else "defaults; no onedesk.toml belongs to this Python",
        )
    )
    checks += _folders(config)
    torch_check = _torch()
    checks.append(torch_check)
    if torch_check.status == "failure":
        return checks
    for examined in (_device, _kernels, _memory, _backends, _models, _engines):
        checks += _guarded(examined, config, device)
    return [*checks, _comfyui(config)]


def _guarded(examined: Callable[[Config, str], Iterator[Check]], config: Config, device: str) -> list[Check]:
    """The checks, or one failure with the reason why they could not run."""
    try:
        return list(examined(config, device))
    except OnedeskError as error:
        return [
            Check(
                examined.__name__.strip("_"),
                "failure",
                str(error),
                "correct what the message names, then run onedesk doctor again",
            )
        ]


def _python() -> Check:
    shown = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "failure", shown, "install Python 3.10 or newer and run install.sh with it")
    return Check("python", "ok", shown)


def _packages() -> Iterator[Check]:
    missing, found = [], []
    for name in NEEDED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Check(
            "packages",
            "failure",
            f"not installed: {', '.join(missing)}",
            f"pip install {' '.join(missing)}, or run install.sh again",
        )
    else:
        yield Check("packages", "ok", ", ".join(found))


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch",
            "failure",
            f"does not load: {error}",
            "install torch for this machine (https://pytorch.org), or run install.sh",
        )
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check("torch", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")


def _device(config: Config, device: str) -> Iterator[Check]:
    import torch

    from ..api import pick_device

    if pick_device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        kind = (
            "integrated, one memory with the CPU"
            if getattr(properties, "is_integrated", 0)
            else "with memory of its own"
        )
        yield Check(
            "device", "ok", f"computes on the GPU: {properties.name}, sm_{properties.major}{properties.minor}, {kind}"
        )
    elif device == "cpu":
        yield Check("device", "ok", "computes on the CPU, as asked by --device cpu")
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        fix = "install a torch that is built for this machine's CUDA, or look at nvidia-smi for a driver fault"
        yield Check("device", "warning", "falls back to the CPU: there is an NVIDIA driver, but torch sees no GPU", fix)
    else:
        yield Check("device", "ok", "computes on the CPU; this machine shows no NVIDIA driver")


def _kernels(config: Config, device: str) -> Iterator[Check]:
    import torch

    from ..api import pick_device
    from ..kernels.choose import choose_kernels

    chosen = choose_kernels(pick_device(device), torch.bfloat16, config.cache)
    if chosen.reason.startswith("plain torch"):
        missing = "no C compiler" in chosen.reason
        fix = "install a C compiler (Debian, Ubuntu: apt install gcc)" if missing else "correct what the line names"
        yield Check("kernels", "warning", chosen.reason, f"{fix}; until then decode is slow")
    else:
        yield Check("kernels", "ok", f"{chosen.name}: {chosen.reason}")


def _memory(config: Config, device: str) -> Iterator[Check]:
    from ..api import pick_device
    from ..memory.budget import MemorySettings, make_budget, show
    from ..memory.claims import promised_elsewhere
    from ..memory.truth import read_truth

    values: dict[str, Any] = dict(config.memory)
    truth = read_truth(pick_device(device).type)
    budget = make_budget(truth, MemorySettings(**values), promised=promised_elsewhere(pick_device(device).type, truth))
    one_pool = truth.device_free is None or truth.integrated
    where = "one pool for CPU and GPU" if one_pool else "the GPU's own memory"
    detail = (
        f"{where}: {show(truth.available)} of {show(truth.total)} available (by {truth.rule}), budget"
        f" {show(budget.spendable)}"
    )
    if truth.available < LITTLE_MEMORY:
        yield Check("memory", "warning", detail, "end other programs, or choose a smaller model and context")
    elif truth.psi_some_avg10 is not None and truth.psi_some_avg10 > HIGH_PRESSURE:
        yield Check(
            "memory",
            "warning",
            f"{detail}; programs wait for memory {truth.psi_some_avg10:.0f} % of the time",
            "end other programs",
        )
    else:
        yield Check("memory", "ok", detail)


def _backends(config: Config, device: str) -> Iterator[Check]:
    """What each kind of memory can do here. A missing one is not a fault, since it is optional."""
    from ..api import pick_device
    from ..catalog.memory_report import abilities
    from ..memory.backends.choose_backend import describe_backends

    for found in describe_backends(pick_device(device).type):
        yield Check(f"{found.name} memory", "ok", f"{found.residency}: {abilities(found)}")


def _folders(config: Config) -> Iterator[Check]:
    if config.tree is None:
        yield Check(
            "tree",
            "warning",
            "no installed tree; the checkout's own models are offered",
            "run install.sh, or name a onedesk.toml",
        )
    else:
        lacking = [
            str(folder.relative_to(config.tree)) for folder in Tree(config.tree).folders() if not folder.is_dir()
        ]
        if lacking:
            yield Check(
                "tree",
                "warning",
                f"{config.tree} lacks {', '.join(lacking)}",
                "run install.sh again; it makes what is missing",
            )
        else:
            yield Check("tree", "ok", str(config.tree))
    for root in config.model_roots:
        readable = root.is_dir() and os.access(root, os.R_OK | os.X_OK)
        fix = "" if readable else "make the folder, or correct roots under [models] in onedesk.toml"
        yield Check(
            "model folder", "ok" if readable else "failure", str(root) if readable else f"{root} cannot be read", fix
        )
    yield _cache(config)


def _cache(config: Config) -> Check:
    there = next(folder for folder in (config.cache, *config.cache.parents) if folder.exists())
    if not os.access(there, os.W_OK):
        return Check(
            "cache", "failure", f"{config.cache} cannot be written", "make it writable; compiled kernels are kept there"
        )
    free = shutil.disk_usage(there).free
    if free < LITTLE_DISK:
        return Check(
            "cache",
            "warning",
            f"{free / 2**30:.1f} GiB are free on its disk",
            "free some room; models and pictures need it",
        )
    return Check("cache", "ok", f"{config.cache}, {free / 2**30:.0f} GiB free")


def _models(config: Config, device: str) -> Iterator[Check]:
    from ..catalog.inventory import TOY_NOTE, model_rows

    rows = model_rows(config, None, device=device, context=config.context)
    if not rows:
        yield Check(
            "models",
            "warning",
            "there is none",
            "put a model folder (config.json, *.safetensors, tokenizer.json) into models/",
        )
    for row in rows:
        other = (
            "choose a smaller context or another model"
            if row["opens"]
            else "do what the line says, or take the folder away"
        )
        fix = "" if row["fits"] else other
        toy = f"{TOY_NOTE}; " if row["toy"] else ""
        yield Check(f"model {row['name']}", "ok" if row["fits"] else "warning", toy + row["reason"], fix)


def _engines(config: Config, device: str) -> Iterator[Check]:
    """The other engines in onedesk.toml. None is started or contacted."""
    from ..peers.choose import check_peer

    for name, settings in config.peers.items():
        try:
            yield Check("engine", "ok", f"{name}: {check_peer(settings)}")
        except OnedeskError as error:
            yield Check(
                "engine", "warning", f"{name}: {error}", f"correct [peers.{name}] in onedesk.toml, or take it out"
            )


def _comfyui(config: Config) -> Check:
    if config.tree is None:
        return Check("comfyui", "ok", "none is looked for without an installed tree")
    tree = Tree(config.tree)
    desk = tree.load_desk() or Desk(str(tree.comfyui), sys.executable, made=True)
    comfyui = Path(desk.comfyui)  # also one that existed before
    pack = comfyui / "custom_nodes" / desk.pack
    if not comfyui.is_dir() and desk.made:
        return Check("comfyui", "ok", "this tree has none of its own (install.sh --comfyui links the pack into yours)")
    if not comfyui.is_dir():
        return Check(
            "comfyui", "warning", f"{comfyui} is gone", "run install.sh --comfyui with the folder where ComfyUI is now"
        )
    if not pack.exists():
        return Check(
            "comfyui",
            "failure",
            f"{pack} is missing: ComfyUI does not see the nodes",
            "run install.sh again; it makes the link",
        )
    if not pack.resolve().samefile(Path(__file__).resolve().parents[2]):
        return Check(
            "comfyui",
            "warning",
            f"{pack} leads to another copy of Onedesk: {pack.resolve()}",
            "run install.sh from the copy you mean",
        )
    return Check("comfyui", "ok", f"{comfyui} sees this pack")
