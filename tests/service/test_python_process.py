"""Every Python that we start, in a folder full of modules under the names of those that it needs: it imports none of
them.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.service.python_process import (
    SAFE_FOLDER,
    isolated_command,
    package_command,
    probe_command,
    python_environment,
)
from onedesk.service.setup.comfyui import ComfyProcess
from onedesk.service.setup.desk import device_arguments
from onedesk.service.setup.pack import COMMAND
from onedesk.service.setup.steps import Steps
from onedesk.service.setup.tree import Tree, run_script
from onedesk.service.text.jinja_process import JinjaProcess, RenderLimits

ROOT = Path(__file__).resolve().parents[2]
SHADOWS = (
    *(
        "torch",
        "json",
        "numpy",
        "psutil",
        "safetensors",
        "tokenizers",
        "aiohttp",
        "jinja2",
        "markupsafe",
        "pip",
        "venv",
        "runpy",
    ),
    *(
        "sitecustomize",
        "usercustomize",
        "typing",
        "signal",
        "pathlib",
        "logging",
        "argparse",
        "onedesk",
        "service",
        "nodes",
        "comfy",
    ),
    *("linecache", "contextlib", "subprocess", "tomllib", "tomli", "yaml", "PIL", "ruff", "_distutils_hack"),
)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, PYTHONPATH and the user's home, full of modules that leave a word when they are
    imported.
    """
    folder, home, ran = tmp_path / "folder", tmp_path / "home", tmp_path / "ran"
    user_site = home / ".local" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for place in (folder, user_site):
        place.mkdir(parents=True)
        for name in SHADOWS:
            (place / f"{name}.py").write_text(
                f"open({str(ran)!r}, 'a').write(__file__ + '\\n')\nraise SystemExit('RAN ' + __file__)\n"
            )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}{os.pathsep}{folder}")
    monkeypatch.chdir(folder)
    yield folder
    assert not ran.exists(), ran.read_text()


def run(*words: str | Path) -> str:
    answer = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Tree:
    """An installation whose environment is this one, as far as run.sh and the command look at it."""
    tree = Tree(tmp_path / "desk")
    tree.make()
    tree.write_files()
    folder = tree.envs / "onedesk" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "onedesk").write_text(COMMAND)
    for file in folder.iterdir():
        file.chmod(0o755)
    return tree


def test_the_command_and_run_sh(hostile: Path, installed: Tree) -> None:
    command = installed.envs / "onedesk" / "bin" / "onedesk"
    assert run(command, "--version").startswith("onedesk ")
    assert isinstance(json.loads(run(command, "models", "--json", "--config", installed.settings)), list)
    answer = subprocess.run([installed.script, "status"], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout.strip()) == (1, "ComfyUI is not running"), answer.stderr


def test_the_installer(hostile: Path) -> None:
    assert "usage" in run("bash", ROOT / "install.sh", "--help")
    answer = subprocess.run(
        ["bash", ROOT / "install.sh", "--prefix", "nowhere", "--uninstall"], capture_output=True, text=True, check=False
    )
    assert "there is no installation" in answer.stderr


@pytest.mark.parametrize("form", ["folder", "file", "module"])
def test_the_command_by_its_path_and_as_a_module(hostile: Path, form: str) -> None:
    words = {
        "folder": [ROOT / "service"],
        "file": [ROOT / "service" / "__main__.py"],
        "module": ["-m", "onedesk.service"],
    }[form]
    assert run(*isolated_command(*words), "--version").startswith("onedesk ")


def test_a_pack_under_any_name_runs_by_its_path(hostile: Path, tmp_path: Path) -> None:
    pack = tmp_path / "custom_nodes" / "my-desk 2"
    shutil.copytree(ROOT / "service", pack / "service", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, pack / name)
    assert run(*isolated_command(pack / "service"), "--version").startswith("onedesk ")


def test_modules_of_this_package_and_probes(hostile: Path, tmp_path: Path) -> None:
    assert run(*package_command("onedesk.service", "--version")).startswith("onedesk ")
    steps = Steps(Tree(tmp_path / "desk"))
    assert steps.ask(Path(sys.executable), "import json, runpy; print(json.dumps(runpy.__file__))") == json.dumps(
        run_py()
    )
    assert device_arguments(Path(sys.executable)) in ([], ["--cpu"])
    words = probe_command(sys.executable, "import json; print(json.__name__)")
    answer = subprocess.run(
        words, capture_output=True, text=True, env=python_environment(), cwd=SAFE_FOLDER, check=True
    )
    assert answer.stdout.strip() == "json"


def run_py() -> str:
    import runpy

    return str(runpy.__file__)


def test_the_process_of_templates(hostile: Path) -> None:
    process = JinjaProcess(RenderLimits())
    try:
        assert "a" in process.render("{{ messages[0].content }}", {"messages": [{"content": "a"}]}).values()
    finally:
        process.close()


def test_a_comfyui(hostile: Path, tmp_path: Path) -> None:
    """A stand-in for main.py that imports what it can and ends: what is imported, and where from, is all that
    counts.
    """
    comfyui = tmp_path / "ComfyUI"
    comfyui.mkdir()
    (comfyui / "comfy.py").write_text("")
    (comfyui / "main.py").write_text(
        "import sys, comfy, json, torch, numpy\nprint(json.dumps([comfy.__file__, [p for p in sys.path if not p or p =="
        " '.']]))\n"
    )
    process = ComfyProcess(Path(sys.executable), comfyui, [], log=tmp_path / "log", environment={})
    with pytest.raises(Exception, match="ended while starting, with exit status 0"):
        process.start()
    where, doubtful = json.loads(process.log.read_text())
    assert (where, doubtful) == (str(comfyui / "comfy.py"), [])


def test_run_sh_and_the_command_name_the_isolated_mode() -> None:
    for text in (COMMAND, run_script()):
        lines = [line for line in text.splitlines() if line.strip().startswith("exec ")]
        assert lines
        assert all(" -I " in line for line in lines)


HELPER = "service/python_process.py"


def test_every_python_is_started_through_the_helper() -> None:
    """sys.executable and the options -m, -c and -I of a Python stand nowhere else, and no process is started in
    other ways.
    """
    found = []
    for path in [*(ROOT / "service").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        if name == HELPER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List | ast.Tuple):
                words = [item.value for item in node.elts if isinstance(item, ast.Constant)]
                first = ast.unparse(node.elts[0]) if node.elts else ""
                if "executable" in first or ("python" in first.lower() and {"-m", "-c", "-I", "-E"} & set(words)):
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)[:80]}")
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                if "multiprocessing" in modules or "concurrent.futures.process" in modules:
                    found.append(f"{name}:{node.lineno}: multiprocessing")
            if isinstance(node, ast.Call) and any(word.arg == "shell" for word in node.keywords):
                found.append(f"{name}:{node.lineno}: a shell")
    assert found == []


def test_python_environment_keeps_what_says_nothing_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONUTF8"):
        monkeypatch.setenv(name, "1")
    assert {name for name in python_environment() if name.startswith("PYTHON")} <= {
        *("PYTHONUTF8", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONHASHSEED"),
    }
