"""pyproject.toml names every package and data file that is needed at run time."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib

SOURCES = ("nodes", "service")


@pytest.fixture(scope="module")
def settings(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_package_is_named(repository: Path, settings: dict[str, Any]) -> None:
    folders = {
        path.parent.relative_to(repository) for source in SOURCES for path in (repository / source).rglob("__init__.py")
    }
    assert set(settings["packages"]) == {"onedesk", *(".".join(("onedesk", *folder.parts)) for folder in folders)}


def test_what_comfyui_manager_installs_is_what_the_package_needs_and_never_torch(repository: Path) -> None:
    lines = (repository / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needed = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [line.replace('"', "'") for line in lines if not line.startswith("#")] == needed
    assert not any("torch" in line for line in needed)


def test_every_data_file_is_covered(repository: Path, settings: dict[str, Any]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *SOURCES, "workflows"], cwd=repository, capture_output=True, check=True
    )
    data = {repository / name for name in listed.stdout.decode().split("\0") if name and not name.endswith(".py")}
    covered = {path for pattern in settings["package-data"]["onedesk"] for path in repository.glob(pattern)}
    assert {path for path in data if path.exists()} - covered == set()


def test_every_document_that_a_message_names_is_installed(repository: Path, settings: dict[str, Any]) -> None:
    named = set()
    for path in (path for source in SOURCES for path in (repository / source).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"docs/[\w-]+\.md", node.value))
    assert {"docs/memory.md", "docs/install.md"} <= named
    installed = {path for pattern in settings["package-data"]["onedesk"] for path in repository.glob(pattern)}
    assert {name for name in named if repository / name not in installed} == set()


def test_the_registry_archive_leaves_out_what_does_not_run_in_comfyui(repository: Path) -> None:
    lines = (repository / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = {line.rstrip("/") for line in lines if line and not line.startswith("#")}
    assert left_out == {".ci", "lab", "tests", "training"}
    assert all((repository / name).is_dir() for name in left_out)
