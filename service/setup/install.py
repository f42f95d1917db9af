"""install.sh, as far as it can be Python: makes the tree, fills it step by step, and takes it away again. Standard library only."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from ..errors import OnedeskError
from ..peers.note import running as running_service
from ..places import TREE_LINK
from .checks import run_checks
from .environment import PINS, TORCH, Environment
from .foreign import find_foreign, model_paths, no_comfyui
from .pack import (
    NAME,
    PREFIX_OF_DEMO,
    add_package,
    link,
    link_demo_models,
    read_project,
)
from .source import Source
from .steps import SetupError, Steps, locked
from .tree import SETTINGS, Desk, Tree, run_script, write_if_changed
from .unit import add_unit, remove_unit

LOG = logging.getLogger(__name__)
CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_IDEA = "a red circle on blue"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 13))
TEST_PYTHON = (3, 11)
GIB = 1 << 30
# A fresh installation was 2.0 GB with the CPU build of torch and 5.7 GB with the CUDA build; pip unpacks one wheel at a time beside it.
ROOM = 3 * GIB
ROOM_CUDA = 8 * GIB
ROOM_SERVICE = GIB // 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"install.sh: {message}; see install.sh --help\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line of install.sh; exits with 2 for a wrong one."""
    parser = _Parser(prog="install.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--prefix", type=Path, default=Path.home() / "dgx-local")
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--comfyui-python", type=Path)
    parser.add_argument("--torch", default=TORCH, metavar="SPEC")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--service", action="store_true")
    parser.add_argument("--uninstall", action="store_true")
    options = parser.parse_args(arguments)
    if options.uninstall and (options.demo or options.test or options.service or options.comfyui):
        parser.error("--uninstall goes with --prefix only")
    if options.comfyui_python and not options.comfyui:
        parser.error("--comfyui-python goes with --comfyui")
    if options.comfyui and (reason := no_comfyui(options.comfyui.expanduser())):
        parser.error(reason)
    if not options.torch.strip() or options.torch.strip().startswith("-"):
        parser.error(f"--torch is {options.torch!r}; use what pip install takes, such as {TORCH}")
    prefix = options.prefix.expanduser().resolve()
    if reason := bad_prefix(prefix):
        parser.error(f"--prefix is {str(prefix)!r}: {reason}")
    options.prefix = prefix
    return options


def bad_prefix(prefix: Path) -> str | None:
    """Why `prefix` cannot hold an installation, None if it can."""
    if any(sign in str(prefix) for sign in ":\n\r"):
        return "colons and line ends cannot stand in the path of a Python environment"
    if prefix in (Path("/"), Path.home().resolve()):
        return "that folder has other uses; name one of its own"
    if prefix == CHECKOUT or CHECKOUT in prefix.parents:
        return "it lies in the checkout; name a folder outside it"
    if prefix.exists() and not prefix.is_dir():
        return "it is a file"
    script = prefix / "run.sh"
    if script.is_file() and "Onedesk" not in script.read_text(encoding="utf-8", errors="replace"):
        return "it holds a run.sh that is not ours; name another folder"
    return None


def check_machine(options: argparse.Namespace) -> None:
    """Refuse a machine that cannot run it: system, processor, Python, room on the disk. SetupError says what to do."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        raise SetupError(f"this is {platform.system()} on {platform.machine()}; Onedesk installs on Linux, {' and '.join(MACHINES)}")
    low, high = PYTHONS
    version = ".".join(map(str, sys.version_info[:3]))
    if not low <= sys.version_info[:2] <= high:
        raise SetupError(f"Python {version} does not fit; name one from {low[0]}.{low[1]} to {high[0]}.{high[1]} with --python")
    if options.test and sys.version_info[:2] < TEST_PYTHON:
        raise SetupError(f"the tests compare with transformers 5.24, which Python {version} cannot have; name 3.11 to 3.13 with --python")
    place = next(folder for folder in (options.prefix, *options.prefix.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        raise SetupError(f"{place} cannot be written to; name a folder of yours with --prefix")
    free = shutil.disk_usage(place).free
    fresh = not (options.prefix / "envs" / "desk.json").exists()
    need = ROOM if fresh and not options.comfyui else ROOM_SERVICE
    if free < need:
        raise SetupError(f"{place} has {free / GIB:.1f} GiB free and {need / GIB:.1f} GiB are needed; free some, or name another --prefix")
    if fresh and not options.comfyui and free < ROOM_CUDA:
        LOG.info("room      %.1f GiB free: enough for torch without CUDA, which is 2 GB in all; with CUDA it takes 6 GB", free / GIB)


def install_all(tree: Tree, options: argparse.Namespace) -> Environment:
    """ComfyUI, the pack and the service in one new environment."""
    steps = Steps(tree)
    environment = Environment(tree.envs / NAME, steps)
    environment.make(sys.executable)
    with environment.torch_unchanged():
        environment.add_torch(options.torch)
        environment.add_pins("packages", PINS)
        environment.settle_operators()
        Source(environment, steps).fetch()
        link(tree.comfyui / "custom_nodes" / NAME, CHECKOUT)
        add_package(environment, tree, CHECKOUT)
    write_if_changed(tree.model_paths, model_paths(tree, kinds=()))
    tree.save_desk(Desk(str(tree.comfyui), str(environment.python), made=True))
    return environment


def install_beside(tree: Tree, options: argparse.Namespace) -> Environment:
    """The service in an environment of its own, beside a ComfyUI whose environment is only read."""
    steps = Steps(tree)
    foreign = find_foreign(options.comfyui.expanduser().resolve(), options.comfyui_python, steps)
    service = Environment(tree.envs / "service", steps)
    with foreign.unchanged():
        service.make(str(foreign.python))
        foreign.share_packages(service, read_project(CHECKOUT))
        add_package(service, tree, CHECKOUT)
        write_if_changed(tree.model_paths, model_paths(tree))
        previous = tree.load_desk()
        pack, place = foreign.add_pack(CHECKOUT, tree)
        if previous and previous.link and Path(previous.link) != place:
            remove_pack(Path(previous.link), tree)
        tree.save_desk(Desk(str(foreign.folder), str(foreign.python), made=False, pack=pack, link=str(place)))
    return service


def install(tree: Tree, options: argparse.Namespace) -> int:
    """Make or complete the installation, then what else was asked for."""
    check_machine(options)
    tree.prefix.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(locked(tree))
        tree.make()
        tree.write_files()
        environment = install_beside(tree, options) if options.comfyui else install_all(tree, options)
        link_demo_models(tree, CHECKOUT)
        if options.service:
            add_unit(tree, environment.folder / "bin" / NAME, CHECKOUT)
        LOG.info("ready     %s start opens ComfyUI; %s/bin/onedesk is the command", tree.script, environment.folder)
        failed = run_demo(environment) if options.demo else []
        if options.test:
            more = ["--comfyui", str(options.comfyui.expanduser().resolve())] if options.comfyui else []
            failed += run_checks(environment, environment.steps, CHECKOUT, more)
    if failed:
        LOG.error("install.sh: failed: %s", ", ".join(failed))
    return 1 if failed else 0


def run_demo(environment: Environment) -> list[str]:
    """Run `onedesk demo`; returns what failed."""
    LOG.info("demo      an idea becomes a prompt and a picture (a minute or two) ...")
    sys.stdout.flush()
    argv = [environment.folder / "bin" / NAME, "demo", DEMO_IDEA]
    code = subprocess.run(argv, env=environment.steps.environment(), stdin=subprocess.DEVNULL, check=False).returncode
    return ["demo"] if code else []


def remove_link(place: Path) -> None:
    """Take away a link of ours; anything that is not a link stays."""
    if place.is_symlink():
        place.unlink()
        LOG.info("removed   %s", place)


def remove_pack(place: Path, tree: Tree) -> None:
    """Take away the link that `add_pack` made for the tree, unless it was made anew for another one since."""
    target = place.readlink() if place.is_symlink() else place
    other = Tree(target if place.name == TREE_LINK else target.parent.parent.parent)
    if other.script.is_file() and not other.prefix.samefile(tree.prefix):
        LOG.info("kept      %s, which leads to another installation", place)
    else:
        remove_link(place)


def noted_process(tree: Tree) -> int | None:
    """The id of the ComfyUI that run.sh started and that still runs, by /proc and the tree's own note; see desk.find_running."""
    try:
        pid = int(json.loads((tree.cache / "comfyui.json").read_text(encoding="utf-8"))["pid"])
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = b"main.py" in words or b"launch_comfyui" in words
    return pid if ours and b"--port" in words else None


def uninstall(tree: Tree) -> int:
    """Take away what can be made again, the user unit, and our link in somebody's ComfyUI; models, data and changed settings stay."""
    if not tree.script.is_file():
        raise SetupError(f"there is no installation in {tree.prefix}; name the right folder with --prefix")
    if running := noted_process(tree):
        raise SetupError(f"ComfyUI still runs from {tree.prefix} (process {running}); end it first with {tree.script} stop")
    with locked(tree):
        remove_unit(tree)
        if service := running_service(tree.cache):
            raise SetupError(
                f"a service still runs from {tree.prefix} (process {service.pid}); end it first, with Ctrl-C or kill {service.pid}"
            )
        if desk := tree.load_desk():
            remove_pack(Path(desk.link), tree) if desk.link else None
        for place in [*tree.models.glob(f"{PREFIX_OF_DEMO}*"), *tree.image_models.glob(f"*/{PREFIX_OF_DEMO}*")]:
            remove_link(place)
        for folder in (tree.envs, tree.cache):
            shutil.rmtree(folder, ignore_errors=True)
            LOG.info("removed   %s", folder)
        if tree.script.read_text(encoding="utf-8") == run_script():
            tree.script.unlink()
        if tree.settings.is_file() and tree.settings.read_text(encoding="utf-8") == SETTINGS:
            tree.settings.unlink()
        (tree.prefix / ".lock").unlink()
    for folder in (*tree.image_models.glob("*"), *reversed(tree.folders()), tree.prefix):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if tree.prefix.exists():
        LOG.info("kept      your models, data and settings in %s; delete that folder if you do not need them", tree.prefix)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Do what install.sh was asked; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = parse(arguments)
    tree = Tree(options.prefix)
    try:
        return uninstall(tree) if options.uninstall else install(tree, options)
    except OnedeskError as error:
        sys.stderr.write(f"install.sh: {error}\n")
    except OSError as error:
        sys.stderr.write(f"install.sh: {error.strerror}: {error.filename}; check the rights and the room there, then run it again\n")
    except KeyboardInterrupt:
        sys.stderr.write("install.sh: interrupted; run it again to go on from here\n")
        return 130
    return 1
