"""The Python part of install.sh: makes the tree, fills it step by step, and removes it again. Standard library only."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from ..errors import OnedeskError
from ..peers.note import running as running_service
from .adopt import find_record, is_installation
from .checks import run_checks
from .environment import PINS, TORCH, Environment
from .foreign import find_foreign, model_paths, no_comfyui
from .pack import NAME, add_package, link_demo_models, read_project, recorded_link
from .record import FILE as RECORD
from .record import Record, digest, remove
from .source import ComfyUISource, move_additions, shipped_files
from .steps import LOCK, SetupError, Steps, locked
from .survey import report, survey, torch_specs
from .tree import CACHE_ENTRIES, CACHES, OFFLINE, SETTINGS, Desk, Tree, run_script
from .unit import add_unit, remove_unit

LOG = logging.getLogger(__name__)
CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_IDEA = "a red circle on blue"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 13))
TEST_PYTHON = (3, 11)
GIB = 1 << 30
# A new installation took 2.0 GB with the CPU build of torch and 5.7 GB with the CUDA build; in addition pip unpacks one
# wheel at a time.
ROOM = 3 * GIB
ROOM_CUDA = 8 * GIB
ROOM_SERVICE = GIB // 4
# Image models by the names that `onedesk pull` takes; a test compares them with hub/image_models.toml.
MODEL_NAMES = ("z-image-turbo", "z-image", "flux2-klein-4b", "klein-4b", "flux-2-klein-4b", "qwen-image")


class _InstallParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"install.sh: {message}; see install.sh --help\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of install.sh; exits with 2 for an invalid one."""
    parser = _InstallParser(prog="install.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--prefix", type=Path, default=Path.home() / "dgx-local")
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--comfyui-python", type=Path)
    parser.add_argument("--torch", metavar="SPEC")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--service", action="store_true")
    parser.add_argument("--models", action="append", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--uninstall", action="store_true")
    options = parser.parse_args(arguments)
    others = (options.demo, options.test, options.service, options.comfyui, options.models, options.dry_run)
    if options.uninstall and any(others):
        parser.error("--uninstall goes with --prefix only")
    if options.dry_run and options.yes:
        parser.error("--dry-run changes nothing, so there is nothing to say --yes to; leave one out")
    for name in options.models:
        if reason := bad_model_name(name):
            parser.error(f"--models is {name!r}: {reason}")
    if options.comfyui_python and not options.comfyui:
        parser.error("--comfyui-python goes with --comfyui")
    if options.comfyui and (reason := no_comfyui(options.comfyui.expanduser())):
        parser.error(reason)
    if options.torch is not None and (not options.torch.strip() or options.torch.strip().startswith("-")):
        parser.error(f"--torch is {options.torch!r}; use what pip install takes, such as {TORCH}")
    prefix = options.prefix.expanduser().resolve()
    if reason := bad_prefix(prefix):
        parser.error(f"--prefix is {str(prefix)!r}: {reason}")
    options.prefix = prefix
    return options


def bad_prefix(prefix: Path) -> str | None:
    """Why `prefix` cannot hold an installation; None if it can."""
    if any(sign in str(prefix) for sign in ":\n\r"):
        return "colons and line ends cannot stand in the path of a Python environment"
    if prefix in (Path("/"), Path.home().resolve()):
        return "that folder has other uses; name one of its own"
    if prefix == CHECKOUT or CHECKOUT in prefix.parents:
        return "it lies in the checkout; name a folder outside it"
    if prefix.exists() and not prefix.is_dir():
        return "it is a file"
    script = prefix / "run.sh"
    ours = (
        script.is_file()
        and not script.is_symlink()
        and "Onedesk" in script.read_text(encoding="utf-8", errors="replace")
    )
    if os.path.lexists(script) and not ours:
        return "it holds a run.sh that is not ours; name another folder"
    return None


def check_prefix(tree: Tree) -> None:
    """Refuse a prefix with folders of the names that we need, made by others. SetupError names them."""
    for folder in tree.folders():
        if os.path.lexists(folder) and not folder.is_dir():
            raise SetupError(f"{folder} is there and is not a folder; name another --prefix")
    for file in (tree.script, tree.prefix / RECORD):
        if os.path.lexists(file):
            raise SetupError(f"{file} is there and no installation of ours has made it; name another --prefix")
    for folder in (tree.envs, tree.cache):
        if folder.is_symlink():
            raise SetupError(
                f"{folder} is a link, and no installation of ours has made it; name another --prefix. To have that"
                " folder on another disk, move it there after installing, and leave a link in its place"
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise SetupError(
                f"{folder} is there and no installation of ours has made it (conda has an envs/ too); name another"
                " --prefix"
            )


def check_machine(options: argparse.Namespace) -> None:
    """Refuse an unsupported machine: system, processor, Python, free disk space. SetupError says what to do."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        raise SetupError(
            f"this is {platform.system()} on {platform.machine()}; Onedesk installs on Linux, {' and '.join(MACHINES)}"
        )
    low, high = PYTHONS
    version = ".".join(map(str, sys.version_info[:3]))
    if not low <= sys.version_info[:2] <= high:
        raise SetupError(
            f"Python {version} does not fit; name one from {low[0]}.{low[1]} to {high[0]}.{high[1]} with --python"
        )
    if options.test and sys.version_info[:2] < TEST_PYTHON:
        raise SetupError(
            f"the tests compare with transformers 5.24, which Python {version} cannot have; name 3.11 to 3.13 with"
            " --python"
        )
    existing = next(folder for folder in (options.prefix, *options.prefix.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise SetupError(f"{existing} cannot be written to; name a folder of yours with --prefix")
    free = shutil.disk_usage(existing).free
    fresh = not (options.prefix / "envs" / "desk.json").exists()
    need = ROOM if fresh and not options.comfyui else ROOM_SERVICE
    if free < need:
        raise SetupError(
            f"{existing} has {free / GIB:.1f} GiB free and {need / GIB:.1f} GiB are needed; free some, or name another"
            " --prefix"
        )
    if fresh and not options.comfyui and free < ROOM_CUDA:
        LOG.info(
            "disk      %.1f GiB free: enough for torch without CUDA, which is 2 GB in all; with CUDA it takes 6 GB",
            free / GIB,
        )


def install_all(tree: Tree, options: argparse.Namespace, record: Record) -> Environment:
    """ComfyUI, the pack and the service in one new environment."""
    steps = Steps(tree)
    environment = Environment(tree.envs / NAME, steps)
    environment.make(sys.executable, record)
    with environment.torch_unchanged():
        environment.add_torch(options.torch_specs)
        environment.add_pins("packages", PINS)
        environment.settle_operators()
        ComfyUISource(environment, steps).fetch(record)
        recorded_link(record, tree.comfyui / "custom_nodes" / NAME, CHECKOUT)
        recorded_link(record, tree.pack / NAME, CHECKOUT)
        add_package(environment, tree, CHECKOUT)
    record.write_file(tree.model_paths, model_paths(tree, kinds=()))
    record.write_file(tree.record, Desk(str(tree.comfyui), str(environment.python), made=True).text())
    return environment


def install_beside(tree: Tree, options: argparse.Namespace, record: Record) -> Environment:
    """The service in its own environment, next to a ComfyUI whose environment is only read."""
    steps = Steps(tree)
    foreign = find_foreign(options.comfyui.expanduser().resolve(), options.comfyui_python, steps)
    service = Environment(tree.envs / "service", steps)
    with foreign.unchanged():
        service.make(str(foreign.python), record)
        foreign.share_packages(service, read_project(CHECKOUT))
        recorded_link(record, tree.pack / NAME, CHECKOUT)
        add_package(service, tree, CHECKOUT)
        record.write_file(tree.model_paths, model_paths(tree))
        previous = tree.load_desk()
        pack, link_path = foreign.add_pack(CHECKOUT, tree, record)
        if previous and previous.link and Path(previous.link) != link_path:
            record.forget_link(Path(previous.link))
        record.write_file(
            tree.record,
            Desk(str(foreign.folder), str(foreign.python), made=False, pack=pack, link=str(link_path)).text(),
        )
    return service


def install(tree: Tree, options: argparse.Namespace) -> int:
    """Make or complete the installation, then run the other requested actions."""
    check_machine(options)
    if not is_installation(tree):
        check_prefix(tree)
    found = survey(tree.prefix, os.environ)
    options.torch_specs = (
        torch_specs(found.accelerator, platform.machine(), TORCH) if options.torch is None else (options.torch,)
    )
    report(found, tree.prefix, planned(tree, options))
    if options.dry_run:
        LOG.info("dry run   nothing was changed")
        return 0
    if not confirmed(tree, options):
        LOG.info("ended     nothing was changed")
        return 1
    made = [folder for folder in (tree.prefix, *tree.prefix.parents) if not folder.exists()]
    tree.prefix.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(locked(tree))
        record = find_record(tree) or new_record(tree, made)
        prepare(tree, record)
        environment = install_beside(tree, options, record) if options.comfyui else install_all(tree, options, record)
        link_demo_models(tree, CHECKOUT, record)
        if options.service:
            add_unit(tree, environment.folder / "bin" / NAME, CHECKOUT, record)
        LOG.info("ready     %s start opens ComfyUI; %s/bin/onedesk is the command", tree.script, environment.folder)
        failed = pull_models(environment, options.models)
        failed += run_demo(environment) if options.demo else []
        if options.test:
            more = ["--comfyui", str(options.comfyui.expanduser().resolve())] if options.comfyui else []
            record.make_tree(tree.envs / "tmp")
            failed += run_checks(environment, environment.steps, CHECKOUT, more)
    if failed:
        LOG.error("install.sh: failed: %s", ", ".join(failed))
    return 1 if failed else 0


def new_record(tree: Tree, made: Sequence[Path]) -> Record:
    """The record of a new installation; `made`: the folders down to the prefix that were created for it."""
    record = Record(tree.prefix)
    record.folders = ["." if folder == tree.prefix else str(folder) for folder in made]
    record.save()
    return record


def prepare(tree: Tree, record: Record) -> None:
    """Make the missing folders of the tree, and its files."""
    record.save()
    for folder in tree.folders():
        if folder != tree.logs or not record.behind_link(tree.cache):  # content under that link belongs to its owner
            record.make_folder(folder)
    for folder in (tree.pack, Steps(tree).stamps):
        record.make_tree(folder)
    tree.make()
    record.write_file(tree.script, run_script(), executable=True)
    if not os.path.lexists(tree.settings):
        record.write_file(tree.settings, SETTINGS)


def planned(tree: Tree, options: argparse.Namespace) -> str:
    """What this run will install, in one line."""
    if is_installation(tree):
        parts = [f"check and complete the installation in {tree.prefix}"]
    elif options.comfyui:
        parts = [f"add Onedesk to {options.comfyui}, and the service to {tree.prefix} (0.3 GB)"]
    else:
        spec = options.torch_specs[0]
        size = "5.7 GB" if spec == TORCH else "2.0 GB" if "+cpu" in spec else "2 to 6 GB"
        parts = [f"install ComfyUI, {spec.split()[0]} and Onedesk into {tree.prefix} ({size} in all)"]
    parts += [f"fetch {name} (its size is shown first)" for name in options.models]
    parts += ["draw the demo's picture"] if options.demo else []
    parts += ["run the checks and tests"] if options.test else []
    parts += ["run onedesk serve at each login"] if options.service else []
    return "; ".join(parts)


def confirmed(tree: Tree, options: argparse.Namespace) -> bool:
    """Ask on a terminal before a new installation, and which models to fetch; without a terminal the answer is yes."""
    if options.yes or is_installation(tree) or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    if input("Go on? [Y/n] ").strip().lower() not in ("", "y", "yes"):
        return False
    while not options.models and not options.comfyui:
        name = input(f"Fetch an image model with its Qwen ({', '.join(MODEL_NAMES)}; Enter for none)? ").strip()
        if not name:
            break
        if reason := bad_model_name(name):
            LOG.info("models    %s", reason)
        else:
            options.models.append(name)
    return True


def bad_model_name(name: str) -> str | None:
    """Why `onedesk pull` could not take a model by this name; None if it could."""
    if name in MODEL_NAMES or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return None
    return f"use {', '.join(MODEL_NAMES)}, or OWNER/NAME of a repository"


def pull_models(environment: Environment, names: Sequence[str]) -> list[str]:
    """Fetch models with `onedesk pull`; returns what failed. What is there already is not fetched again."""
    failed = []
    variables = {name: value for name, value in environment.steps.environment().items() if name not in OFFLINE}
    for name in names:
        LOG.info("models    fetching %s ...", name)
        sys.stdout.flush()
        argv = [environment.folder / "bin" / NAME, "pull", name]
        if subprocess.run(argv, env=variables, stdin=subprocess.DEVNULL, check=False).returncode:
            failed.append(f"models ({name}; go on with: {argv[0]} pull {name})")
    return failed


def run_demo(environment: Environment) -> list[str]:
    """Run `onedesk demo`; returns what failed."""
    LOG.info("demo      an idea becomes a prompt and a picture (a minute or two) ...")
    sys.stdout.flush()
    argv = [environment.folder / "bin" / NAME, "demo", DEMO_IDEA]
    code = subprocess.run(argv, env=environment.steps.environment(), stdin=subprocess.DEVNULL, check=False).returncode
    return ["demo"] if code else []


def noted_process(tree: Tree) -> int | None:
    """The process id of the running ComfyUI that run.sh started, by /proc and the tree's own record; see
    desk.find_running.
    """
    try:
        pid = int(json.loads((tree.cache / "comfyui.json").read_text(encoding="utf-8"))["pid"])
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = b"main.py" in words or b"launch_comfyui" in words
    return pid if ours and b"--port" in words else None


def uninstall(tree: Tree) -> int:
    """Remove what this installation has made, by its record; models, data, changed settings and the user's additions
    stay.
    """
    if not is_installation(tree):
        raise SetupError(f"there is no installation in {tree.prefix}; name the right folder with --prefix")
    if running := noted_process(tree):
        raise SetupError(
            f"ComfyUI still runs from {tree.prefix} (process {running}); end it first with {tree.script} stop"
        )
    with locked(tree):
        record = find_record(tree)
        if record is None:
            raise SetupError(f"the installation in {tree.prefix} has just been taken away by another install.sh")
        remove_unit(record)
        if service := running_service(tree.cache):
            raise SetupError(
                f"a service still runs from {tree.prefix} (process {service.pid}); end it first, with Ctrl-C or kill"
                f" {service.pid}"
            )
        for name in list(record.links):
            record.forget_link(tree.prefix / name)
        if record.owns_tree(tree.comfyui):
            for moved in move_additions(tree.comfyui, tree.data / "ComfyUI", shipped_files(Steps(tree))):
                LOG.info("moved     %s: it is not of ComfyUI's release, so it is yours", moved)
        clear_cache(tree, record)
        record.files[LOCK] = digest(b"")
        record.remove()
    if tree.envs.is_dir():
        for entry in sorted(tree.envs.iterdir()):
            LOG.info("kept      %s, which this installation did not make", entry)
    if tree.prefix.exists():
        left = ", ".join(sorted(entry.name for entry in tree.prefix.iterdir())) or "nothing"
        LOG.info("left      in %s: %s; delete what you do not need", tree.prefix, left)
    return 0


def clear_cache(tree: Tree, record: Record) -> None:
    """Remove the files that our programs write into cache/; anything else there stays and is named."""
    if record.behind_link(tree.cache):
        LOG.info("kept      %s, which is a link; what it leads to was not touched", tree.cache)
        return
    if not tree.cache.is_dir():
        return
    patterns = {*(path.partition("/")[0] for path in CACHES.values()), *CACHE_ENTRIES}
    for entry in sorted(tree.cache.iterdir()):
        if entry.is_symlink() or not any(fnmatchcase(entry.name, pattern) for pattern in patterns):
            LOG.info("kept      %s, which none of our programs has made", entry)
        else:
            remove(entry)
    if any(tree.cache.iterdir()):
        LOG.info("cleared   %s, except for what is named above", tree.cache)
    else:
        LOG.info("removed   %s", tree.cache)


def main(arguments: Sequence[str]) -> int:
    """Run the requested action of install.sh; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = parse(arguments)
    tree = Tree(options.prefix)
    try:
        return uninstall(tree) if options.uninstall else install(tree, options)
    except OnedeskError as error:
        sys.stderr.write(f"install.sh: {error}\n")
    except OSError as error:
        sys.stderr.write(
            f"install.sh: {error.strerror}: {error.filename}; check the rights and the room there, then run it again\n"
        )
    except KeyboardInterrupt:
        sys.stderr.write("install.sh: interrupted; run it again to go on from here\n")
        return 130
    return 1
