"""Finds or reconstructs an installation's record; earlier versions of install.sh wrote none. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from .pack import PREFIX_OF_DEMO
from .record import FILE, Record, digest, load_record
from .tree import RUN_HEAD, SETTINGS, Tree
from .unit import is_unit_of, unit_path

_STAMPS = ("torch", "packages", "comfyui", "service", "operators")


def is_installation(tree: Tree) -> bool:
    """Whether our install.sh has installed at this prefix."""
    file = tree.prefix / FILE
    return (file.is_file() and not file.is_symlink()) or _made_earlier(tree)


def find_record(tree: Tree) -> Record | None:
    """The record of the installation in `tree`, reconstructed if an earlier install.sh left none. None if there is no
    installation.

    Call it with the installation locked. Raises SetupError for a damaged record.
    """
    return load_record(tree.prefix) or (_adopted(tree) if _made_earlier(tree) else None)


def _made_earlier(tree: Tree) -> bool:
    """Whether an install.sh without a record worked here: by its run.sh, its note for run.sh, or its stamps."""
    opening = RUN_HEAD.splitlines()[1]
    if tree.script.is_file() and opening in tree.script.read_text(encoding="utf-8", errors="replace"):
        return True
    stamps = tree.envs / "steps"
    return (tree.record.is_file() and '"comfyui"' in tree.record.read_text(encoding="utf-8", errors="replace")) or (
        (tree.pack / "onedesk").is_symlink() and any((stamps / name).is_file() for name in _STAMPS)
    )


def _adopted(tree: Tree) -> Record:
    """A record of everything there that is certainly ours. It is saved with its marks."""
    record = Record(tree.prefix)
    made = [
        folder
        for folder in (*tree.folders(), *tree.image_models.glob("*"))
        if folder.is_dir() and not folder.is_symlink()
    ]
    record.folders = [str(folder.relative_to(tree.prefix)) for folder in made]
    record.folders.append(".")
    ours = {
        tree.envs / "onedesk": "pyvenv.cfg",
        tree.envs / "service": "pyvenv.cfg",
        tree.comfyui: "comfy",
        tree.pack: "onedesk",
        tree.envs / "steps": ".",
        tree.envs / "tmp": ".",
    }
    for folder, inside in ours.items():
        if folder.is_dir() and not folder.is_symlink() and os.path.lexists(folder / inside):
            record.trees.append(str(folder.relative_to(tree.prefix)))
            record.mark(folder)
    for file in (tree.script, tree.record, tree.model_paths, tree.settings):
        changed = (
            file == tree.settings and file.is_file() and file.read_text(encoding="utf-8", errors="replace") != SETTINGS
        )
        if file.is_file() and not file.is_symlink() and not changed:
            record.files[str(file.relative_to(tree.prefix))] = digest(file.read_bytes())
    for path in (*tree.models.glob(f"{PREFIX_OF_DEMO}*"), *tree.image_models.glob(f"*/{PREFIX_OF_DEMO}*")):
        if path.is_symlink() and path.readlink().name == path.name and "models" in path.readlink().parts:
            record.links[str(path.relative_to(tree.prefix))] = str(path.readlink())
    desk = tree.load_desk()
    for link in (
        tree.comfyui / "custom_nodes" / "onedesk",
        Path(desk.link) if desk and desk.link else tree.comfyui / "none",
    ):
        if link.is_symlink() and (
            link.readlink() in (tree.prefix, tree.pack / "onedesk") or link.is_relative_to(tree.prefix)
        ):
            name = link.relative_to(tree.prefix) if link.is_relative_to(tree.prefix) else link
            record.links[str(name)] = str(link.readlink())
    if is_unit_of(unit_path(), record):
        record.unit = str(unit_path())
    lock = tree.prefix / ".lock"
    if lock.is_file() and not lock.is_symlink() and lock.stat().st_size == 0:
        record.files[lock.name] = digest(b"")
    record.save()
    return record
