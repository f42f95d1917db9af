"""What the installer says of a step that takes long: read from pip's words, a line now and then, and never a command
that goes on alone.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from onedesk.service.setup.steps import SetupError, Steps
from onedesk.service.setup.telling import doing
from onedesk.service.setup.tree import Tree

WHEEL = "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
COLLECTING = "$ python -m pip install torch==2.13.0\nCollecting torch==2.13.0\n"
FETCHING = f"{COLLECTING}  Downloading https://host/whl/{WHEEL.replace('+', '%2B')} (200.5 MB)\n"


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ("", "working"),
        ("Cloning into 'ComfyUI' ...\n", "working"),
        (COLLECTING, "looking for torch==2.13.0"),
        (FETCHING, f"fetching {WHEEL}, 50 of 200 MB"),
        (FETCHING.partition(" (200")[0], f"fetching {WHEEL}"),
        (f"{FETCHING}Collecting sympy>=1.13 (from torch==2.13.0)\n", "looking for sympy>=1.13"),
        (f"{FETCHING}  Downloading mpmath-1.3.0-py3-none-any.whl (536 kB)\n", "fetching mpmath-1.3.0-py3-none-any.whl"),
        (f"{FETCHING}Installing collected packages: mpmath, sympy, torch\n", "unpacking sympy, 2 of 3"),
        (f"{FETCHING}Installing collected packages: Typing.Extensions, mpmath, torch\n", "unpacking torch, 3 of 3"),
        (f"{FETCHING}Installing collected packages: mpmath\n", "unpacking mpmath, 1 of 1"),
    ],
)
def test_a_log_of_pip_says_what_it_is_doing(tmp_path: Path, log: str, wanted: str) -> None:
    folder = tmp_path / "pip-unpack-1"
    folder.mkdir()
    with (folder / WHEEL).open("wb") as file:
        file.truncate(50_200_000)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("mpmath-1.3.0", "typing_extensions-4.15.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert doing(log, tmp_path, tmp_path) == wanted


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "desk")
    made.make()
    return made


class Heard(logging.Handler):
    """Lets the command end once something was told of it."""

    def __init__(self, end: Path) -> None:
        super().__init__()
        self.end = end

    def emit(self, record: logging.LogRecord) -> None:
        if "fetching" in record.getMessage():
            self.end.touch()


def test_a_long_step_is_told_of_while_it_runs(tree: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tree.logs / "torch.log").write_text("Installing collected packages: of, another, run\n")
    code = (
        "import pathlib, sys, time\n"
        "print('  Downloading torch-2.13.0.whl (8.0 MB)', flush=True)\n"
        f"end = pathlib.Path({str(tmp_path / 'end')!r})\n"
        "for _ in range(3000):\n    time.sleep(0.01)\n    if end.exists(): sys.exit(0)\n"
        "sys.exit(1)"
    )
    heard = Heard(tmp_path / "end")
    logging.getLogger().addHandler(heard)
    try:
        Steps(tree, every=0.05).run("torch", [sys.executable, "-c", code], "nothing")
    finally:
        logging.getLogger().removeHandler(heard)
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("torch ") and line.endswith(" s: fetching torch-2.13.0.whl, 0 of 8 MB") for line in told)
    assert not any("another" in line for line in told)


def test_a_short_step_says_nothing_more(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Steps(tree).run("python", [sys.executable, "-c", "print('Collecting x')"], "nothing")
    assert caplog.records == []


def test_a_command_that_takes_too_long_is_ended(tree: Tree, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(60)"
    with pytest.raises(SetupError, match=r"step git failed: python\S*: it did not end within 1 s"):
        Steps(tree, every=0.05).run("git", [sys.executable, "-c", code], "wait", timeout=1.0)
    if note.exists():
        assert subprocess.run(["kill", "-0", note.read_text()], capture_output=True, check=False).returncode != 0
