"""What run.sh does: start, stop and ask the ComfyUI of an installation.

python -m onedesk.service.setup.desk PREFIX [start|stop|status|demo] [--port N] [-- ARGUMENTS FOR COMFYUI]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..errors import FileError, OnedeskError, PeerError
from ..peers.note import running as running_service
from ..python_process import SAFE_FOLDER, package_command, probe_command, python_environment
from .comfyui import Client, command
from .tree import Desk, Tree, write_if_changed

LOG = logging.getLogger(__name__)
PORT = 8188
# SIGINT ends ComfyUI and its children, as Ctrl-C does. A shell's background job may ignore it and then gets SIGTERM.
INTERRUPT_SECONDS, PATIENCE_SECONDS = 10.0, 20.0
POLL_SECONDS = 0.1
# A process is ours if its start time matches; the clock of /proc has steps of 10 ms.
SAME_START_SECONDS = 0.05
DEMO_IDEA = "a red circle on blue"
TRY_DEVICE = "import torch; a = getattr(torch, 'accelerator', torch.cuda); print(bool(a.is_available()))"


@dataclass(frozen=True, slots=True)
class Running:
    """A ComfyUI started by run.sh."""

    pid: int
    started: float
    port: int


def pid_file(tree: Tree) -> Path:
    """The file that records the running ComfyUI."""
    return tree.cache / "comfyui.json"


def find_running(tree: Tree) -> Running | None:
    """The running ComfyUI that was started from `tree`. A record whose process id was reused is ignored."""
    try:
        running = Running(**json.loads(pid_file(tree).read_text(encoding="utf-8")))
        alive = abs(psutil.Process(running.pid).create_time() - running.started) < SAME_START_SECONDS
    except (FileNotFoundError, ValueError, TypeError, psutil.NoSuchProcess):
        return None
    return running if alive else None


def need_desk(tree: Tree) -> Desk:
    """The Desk of `tree`; FileError if nothing is installed there."""
    desk = tree.load_desk()
    if desk is None or not (Path(desk.comfyui) / "main.py").is_file():
        raise FileError(f"there is no ComfyUI in {tree.prefix}; run install.sh again")
    return desk


def device_arguments(python: Path) -> list[str]:
    """--cpu for a Python whose torch finds no accelerator."""
    answer = subprocess.run(
        probe_command(python, TRY_DEVICE),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=SAFE_FOLDER,
        env=python_environment(),
    )
    if answer.returncode != 0:
        raise PeerError(f"torch does not load in ComfyUI's environment: {answer.stderr.strip().splitlines()[-1:]}")
    return [] if answer.stdout.strip() == "True" else ["--cpu"]


def folder_arguments(tree: Tree, desk: Desk, *, own_folders: bool) -> list[str]:
    """ComfyUI's options for model and file folders. `own_folders` puts input, output, user and temp files into the
    tree.
    """
    arguments = ["--extra-model-paths-config", str(tree.model_paths)]
    arguments += ["--models-directory", str(tree.image_models)] if desk.made else []
    if own_folders:
        arguments += ["--temp-directory", str(tree.cache)]
        for name in ("input", "output", "user"):
            arguments += [f"--{name}-directory", str(tree.data / name)]
    return arguments


def start(tree: Tree, port: int, more: Sequence[str]) -> None:
    """Become ComfyUI, in the foreground, on a port of 127.0.0.1. Does not return; raises an OnedeskError if it cannot
    start.
    """
    if running := find_running(tree):
        raise PeerError(
            f"it is already running: http://127.0.0.1:{running.port} (process {running.pid}); run.sh stop ends it"
        )
    desk = need_desk(tree)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PeerError(f"port {port} is taken by another program; choose one with --port") from error
    note = Running(os.getpid(), psutil.Process().create_time(), port)
    write_if_changed(pid_file(tree), json.dumps(asdict(note)))
    python = Path(desk.python)
    argv = command(python, Path(desk.comfyui)) + folder_arguments(tree, desk, own_folders=desk.made)
    if desk.made:
        argv += ["--database-url", f"sqlite:///{tree.data / 'user' / 'comfyui.db'}"]
    argv += [
        *device_arguments(python),
        "--disable-auto-launch",
        "--disable-api-nodes",
        "--listen",
        "127.0.0.1",
        "--port",
        str(port),
        *more,
    ]
    LOG.info("ComfyUI starts at http://127.0.0.1:%d; Ctrl-C or run.sh stop ends it", port)
    sys.stdout.flush()
    os.chdir(desk.comfyui)
    # The pack is a link to the checkout: without this its bytecode would be written there.
    variables = python_environment() | {"PYTHONPYCACHEPREFIX": str(tree.cache / "pycache")}
    os.execve(argv[0], argv, variables)  # noqa: S606 - fixed argv; the process keeps its id, which stands in the note


def stop(tree: Tree) -> bool:
    """End the ComfyUI that was started from `tree`, and no other process; returns whether there was one."""
    running = find_running(tree)
    if running:
        process = psutil.Process(running.pid)
        process.send_signal(signal.SIGINT)
        if not _ended(process, INTERRUPT_SECONDS):
            process.send_signal(signal.SIGTERM)
            if not _ended(process, PATIENCE_SECONDS):
                LOG.warning(
                    "process %d did not end within %g s; killing it", running.pid, INTERRUPT_SECONDS + PATIENCE_SECONDS
                )
                process.kill()
                process.wait(PATIENCE_SECONDS)
    pid_file(tree).unlink(missing_ok=True)
    return running is not None


def _ended(process: psutil.Process, seconds: float) -> bool:
    """Whether it ends within this many seconds."""
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def status(tree: Tree) -> tuple[str, bool]:
    """One line: what runs, and whether ComfyUI responds."""
    service = running_service(tree.cache)
    beside = f"; onedesk serve is running (process {service.pid})" if service else ""
    running = find_running(tree)
    if running is None:
        return f"ComfyUI is not running{beside}", False
    where = (
        f"http://127.0.0.1:{running.port} (process {running.pid}, since"
        f" {time.strftime('%F %T', time.localtime(running.started))})"
    )
    try:
        Client(running.port).ask("/system_stats", timeout=5.0)
    except PeerError:
        return f"ComfyUI is starting or busy at {where}{beside}", False
    return f"ComfyUI is running at {where}{beside}", True


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of run.sh, preceded by the prefix; exits with 2 for an invalid one."""
    words = list(arguments)
    more = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(prog="run.sh", description="Start, stop and ask the ComfyUI of this folder.")
    parser.add_argument("prefix", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "action", nargs="?", choices=("start", "stop", "status", "demo"), default="start", help="default: start"
    )
    parser.add_argument("idea", nargs="?", default=DEMO_IDEA, help="for demo: what to draw")
    parser.add_argument("--port", type=int, default=PORT, help="port of 127.0.0.1, default %(default)s")
    parser.usage = "run.sh [start|stop|status|demo [IDEA]] [--port N] [-- ARGUMENTS FOR COMFYUI]"
    options = parser.parse_args(words[: len(words) - len(more) - 1] if "--" in words else words)
    if not 0 < options.port < 65536:
        parser.error(f"--port is {options.port}; use 1 to 65535")
    options.more = more
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the requested action of run.sh; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = parse(arguments)
    tree = Tree(options.prefix.resolve())
    try:
        if options.action == "start":
            start(tree, options.port, options.more)
        elif options.action == "stop":
            LOG.info("ComfyUI has ended" if stop(tree) else "ComfyUI is not running")
        elif options.action == "status":
            line, answers = status(tree)
            LOG.info("%s", line)
            return 0 if answers else 1
        else:  # exec: ending this process must end the demo and its ComfyUI
            sys.stdout.flush()
            argv = package_command("onedesk.service", "demo", options.idea)
            os.execv(argv[0], argv)  # noqa: S606 - fixed argv
    except OnedeskError as error:
        sys.stderr.write(f"run.sh: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
