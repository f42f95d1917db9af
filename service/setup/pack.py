"""The checkout's part of the tree: the links to it, the command `onedesk`, the demo models. The checkout is never
written to.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .environment import Environment
from .record import Record
from .steps import SetupError
from .tree import Tree, write_if_changed

NAME = "onedesk"
# -I: import nothing from the working directory, PYTHONPATH or the user's site-packages, on Python 3.10 too.
COMMAND = """\
#!/bin/sh
here=$(dirname -- "$(readlink -f -- "$0")")
exec "$here/python" -I -X pycache_prefix="$here/../../../cache/pycache" ${PYTHONDONTWRITEBYTECODE:+-B} \\
  -m onedesk.service "$@"
"""
PREFIX_OF_DEMO = "onedesk-demo-"


@dataclass(frozen=True, slots=True)
class Project:
    """The installer's view of pyproject.toml; `service` is that extra. Read without a TOML parser: Python 3.10 has
    none.
    """

    version: str
    requires_python: str
    dependencies: tuple[str, ...]
    service: tuple[str, ...]


def read_project(checkout: Path) -> Project:
    """Read version and dependencies from the checkout's pyproject.toml; SetupError if it is not ours."""
    text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    patterns = (
        r'^version = (".+")',
        r'^requires-python = (".+")',
        r"^dependencies = (\[.*?\])",
        r"^service = (\[.*?\])",
    )
    found = [re.search(pattern, text, re.M) for pattern in patterns]
    if f'name = "{NAME}"' not in text or None in found:
        raise SetupError(f"{checkout} is not a checkout of Onedesk: its pyproject.toml does not say so")
    version, python, dependencies, service = (ast.literal_eval(match[1]) for match in found if match)
    return Project(version, python, tuple(dependencies), tuple(service))


def is_onedesk(folder: Path) -> bool:
    """Whether `folder` is a checkout of this project."""
    project = folder / "pyproject.toml"
    return project.is_file() and f'name = "{NAME}"' in project.read_text(encoding="utf-8", errors="replace")


def link(link_path: Path, target: Path) -> bool:
    """Make `link_path` a link to `target` (the checkout or a link to it); returns whether anything changed.

    A link to another checkout of this project, or a dangling one, is replaced. Anything else there belongs to the user:
    SetupError.
    """
    if link_path.readlink() == target if link_path.is_symlink() else link_path.exists() and link_path.samefile(target):
        return False
    if link_path.is_symlink() and (not link_path.exists() or is_onedesk(link_path)):
        link_path.unlink()
    elif link_path.is_symlink() or link_path.exists():
        if is_onedesk(link_path):
            raise SetupError(
                f"{link_path} is a copy of Onedesk already: run the install.sh in it, or move it away and run this one"
                " again"
            )
        raise SetupError(f"{link_path} is there already and is not ours; move it away, then run install.sh again")
    link_path.parent.mkdir(parents=True, exist_ok=True)
    link_path.symlink_to(target, target_is_directory=True)
    return True


def recorded_link(record: Record, link_path: Path, target: Path) -> None:
    """Make a link as `link` does, with its folder, and record both as ours."""
    record.make_folder(link_path.parent)
    record.note_link(link_path, target)
    link(link_path, target)


def add_package(environment: Environment, tree: Tree, checkout: Path) -> None:
    """Make `import onedesk` and the command `onedesk` work in `environment`: a path file, the package's metadata, a
    script.

    The package is the checkout itself, by the link in tree.pack; pip lists it and can uninstall it.
    """
    project = read_project(checkout)
    link(tree.pack / NAME, checkout)
    packages, script = environment.packages, environment.folder / "bin" / NAME
    record = packages / f"{NAME}-{project.version}.dist-info"
    for old in packages.glob(f"{NAME}-*.dist-info"):
        if old != record:
            shutil.rmtree(old)
    record.mkdir(exist_ok=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {NAME}",
        f"Version: {project.version}",
        f"Requires-Python: {project.requires_python}",
    ]
    lines += [f"Requires-Dist: {dependency}" for dependency in project.dependencies]
    files = {
        packages / f"{NAME}.pth": f"{tree.pack}\n",
        record / "METADATA": "\n".join(lines) + "\n",
        record / "INSTALLER": "onedesk\n",
        record / "WHEEL": "Wheel-Version: 1.0\nGenerator: onedesk\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        record / "entry_points.txt": f"[console_scripts]\n{NAME} = onedesk.service.__main__:main\n",
    }
    for path, text in files.items():
        write_if_changed(path, text)
    write_if_changed(script, COMMAND, executable=True)
    listed = [*files, script, record / "RECORD"]
    write_if_changed(record / "RECORD", "".join(f"{os.path.relpath(path, packages)},,\n" for path in listed))


def link_demo_models(tree: Tree, checkout: Path, record: Record) -> list[Path]:
    """Link the checkout's demo models into the tree's models; returns the new links.

    A writer is a folder; image models are files in the folders of their kinds. Existing files stay, except a link that
    this installation made, or a dangling one.
    """
    shipped = checkout / "models"
    made = []
    for model in sorted([*shipped.glob(f"{PREFIX_OF_DEMO}*"), *(shipped / "comfyui").glob(f"*/{PREFIX_OF_DEMO}*")]):
        link_path = tree.models / model.relative_to(shipped)
        if link_path.exists() and (not record.owns_link(link_path) or link_path.samefile(model)):
            continue
        record.make_folder(link_path.parent)
        link_path.unlink(missing_ok=True)
        record.note_link(link_path, model)
        link_path.symlink_to(model, target_is_directory=model.is_dir())
        made.append(link_path)
    return made
