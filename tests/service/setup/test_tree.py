"""The tree: its folders, run.sh, the links and the package's record, in a folder whose name has spaces and quotes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from onedesk.service.config import load_config
from onedesk.service.setup.environment import Environment
from onedesk.service.setup.foreign import KINDS, model_paths
from onedesk.service.setup.pack import add_package, link, link_demo_models, read_project
from onedesk.service.setup.record import Record
from onedesk.service.setup.steps import SetupError, Steps
from onedesk.service.setup.tree import CACHES, OFFLINE, Desk, Tree, run_script

ODD_NAME = """it's a "desk" $HOME `x` & 桌"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / ODD_NAME)
    made.make()
    made.write_files()
    return made


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of everything in a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def test_the_tree_is_fixed_and_making_it_is_idempotent(tree: Tree) -> None:
    folders = ["models/comfyui", "envs", "cache/logs", "data/input", "data/output", "data/user", "data/knowledge"]
    assert all((tree.prefix / folder).is_dir() for folder in folders)
    before = state(tree.prefix)
    tree.make()
    assert tree.write_files() == []
    assert state(tree.prefix) == before


def test_settings_of_the_user_are_kept_and_readable(tree: Tree) -> None:
    assert load_config(tree.settings).tree == tree.prefix
    tree.settings.write_text('[models]\nroots = ["elsewhere"]\n')
    tree.write_files()
    assert load_config(tree.settings).model_roots[0] == tree.prefix / "elsewhere"


def test_run_script_sets_caches_and_passes_arguments(tree: Tree) -> None:
    python = tree.envs / "onedesk" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))'"
        ' "$@"\n'
    )
    python.chmod(0o755)
    link_to_script = tree.prefix.parent / "link to run.sh"
    link_to_script.symlink_to(tree.script)
    for script in (tree.script, link_to_script):
        answer = subprocess.run(
            [script, "start", "--port", "1234", "--", "--a b", '"c"'],
            capture_output=True,
            text=True,
            cwd="/",
            check=True,
        )
        words, variables = json.loads(answer.stdout)
        assert words[1:] == [
            "-I",
            "-X",
            f"pycache_prefix={tree.prefix}/cache/pycache",
            "-m",
            "onedesk.service.setup.desk",
            str(tree.prefix),
            "start",
            "--port",
            "1234",
            "--",
            "--a b",
            '"c"',
        ]
        assert {name: variables[name] for name in CACHES} == {
            name: str(tree.cache / folder) for name, folder in CACHES.items()
        }
        assert {name: variables[name] for name in OFFLINE} == dict(OFFLINE)


def test_run_script_without_an_environment_says_what_to_do(tree: Tree) -> None:
    answer = subprocess.run([tree.script], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "there is no environment" in answer.stderr
    assert "run install.sh again" in answer.stderr


def test_run_script_names_no_path() -> None:
    assert str(Path.home()) not in run_script()


def test_desk_is_kept(tree: Tree) -> None:
    assert tree.load_desk() is None
    desk = Desk("/comfy", "/python", made=False, pack="pack", link="/link")
    tree.save_desk(desk)
    assert tree.load_desk() == desk


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """Another checkout of this project, as far as the installer looks at it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").write_bytes((repository / "pyproject.toml").read_bytes())
    return folder


def test_link_is_made_once_and_follows_the_checkout(tmp_path: Path, repository: Path, checkout: Path) -> None:
    place = tmp_path / "custom_nodes" / "onedesk"
    assert link(place, repository)
    assert not link(place, repository)
    assert link(place, checkout)
    assert place.resolve() == checkout
    (checkout / "pyproject.toml").unlink()
    checkout.rmdir()
    assert link(place, repository)
    assert place.resolve() == repository


def test_link_never_replaces_what_is_not_ours(tmp_path: Path, repository: Path) -> None:
    folder, foreign = tmp_path / "folder", tmp_path / "foreign"
    folder.mkdir()
    foreign.symlink_to(folder)
    for place in (folder, foreign):
        with pytest.raises(SetupError, match="is there already and is not ours"):
            link(place, repository)
    assert folder.is_dir()
    assert foreign.resolve() == folder
    (folder / "pyproject.toml").write_text('name = "onedesk"\n', encoding="utf-8")
    with pytest.raises(SetupError, match="is a copy of Onedesk already: run the install"):
        link(folder, repository)


def test_package_is_importable_without_touching_the_checkout(tree: Tree, checkout: Path, repository: Path) -> None:
    environment = Environment(tree.envs / "onedesk", Steps(tree))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.folder], check=True)
    package = checkout / "service"
    package.mkdir()
    (checkout / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import importlib.metadata, sys\nprint(importlib.metadata.version('onedesk'), sys.argv[1:])\n"
    )
    before = state(checkout)
    checkout.chmod(0o555)
    add_package(environment, tree, checkout)
    first = state(environment.packages)
    add_package(environment, tree, checkout)
    assert state(environment.packages) == first
    assert state(checkout) == before
    command = environment.folder / "bin" / "onedesk"
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run([command, "a b", '"'], capture_output=True, text=True, cwd="/", env=variables, check=True)
    assert answer.stdout.strip() == f"{read_project(repository).version} {['a b', chr(34)]}"
    recorded = [
        line.split(",")[0] for line in next(environment.packages.glob("onedesk-*/RECORD")).read_text().splitlines()
    ]
    assert all((environment.packages / name).is_file() for name in recorded)
    checkout.chmod(0o755)


def test_project_is_read_without_a_toml_parser(repository: Path, tmp_path: Path) -> None:
    project = read_project(repository)
    assert {"safetensors", "tokenizers", "aiohttp"} <= set(project.dependencies)
    assert not any(name.startswith("torch") for name in project.dependencies)
    assert [name.partition(">")[0] for name in project.service] == ["llguidance", "prometheus_client"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1"\n')
    with pytest.raises(SetupError, match="is not a checkout of Onedesk"):
        read_project(tmp_path)


def test_demo_models_are_linked_and_those_of_the_user_stay(tree: Tree, checkout: Path) -> None:
    record = Record(tree.prefix)
    writer, painter = (
        checkout / "models" / "onedesk-demo-writer",
        checkout / "models" / "comfyui" / "vae" / "onedesk-demo-x.safetensors",
    )
    for folder in (writer, painter.parent):
        folder.mkdir(parents=True)
    (writer / "config.json").write_text("{}")
    painter.write_bytes(b"x")
    assert [place.name for place in link_demo_models(tree, checkout, record)] == [
        "onedesk-demo-x.safetensors",
        "onedesk-demo-writer",
    ]
    assert (tree.models / "onedesk-demo-writer" / "config.json").read_text() == "{}"
    assert link_demo_models(tree, checkout, record) == []
    own = tree.image_models / "vae" / painter.name
    own.unlink()
    own.write_bytes(b"my own")
    assert link_demo_models(tree, checkout, record) == []
    assert own.read_bytes() == b"my own"
    elsewhere = tree.models / "onedesk-demo-writer"
    elsewhere.unlink()
    elsewhere.symlink_to(tree.data)
    assert link_demo_models(tree, checkout, record) == []
    assert elsewhere.readlink() == tree.data


def test_model_paths_are_yaml_for_any_prefix(tree: Tree) -> None:
    (section,) = yaml.safe_load(model_paths(tree)).values()
    assert section.pop("base_path") == str(tree.models)
    assert section == {"llm": ".", **{kind: f"comfyui/{kind}" for kind in KINDS}}
