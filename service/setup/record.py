"""The record of what an installation has made, and of its id: uninstall uses this record alone. Standard library only.

The record is PREFIX/.installation.json. Paths under the prefix are relative to it, others absolute. Each folder that is
removed with all of its content also holds a mark with the installation's id. A folder of the same name that others made
has no mark, and stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .steps import SetupError
from .tree import write_if_changed

LOG = logging.getLogger(__name__)
FILE = ".installation.json"
MARK = ".onedesk-installation"
_FORMAT = 1


@dataclass(slots=True)
class Record:
    """The things that the installation at `prefix` has made; each method that makes something records it first.

    `folders` are removed when they are empty, `trees` with all of their content, `files` if their content still has the
    recorded SHA-256, `links` if they still point to the recorded target.
    """

    prefix: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    folders: list[str] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    unit: str | None = None

    @property
    def path(self) -> Path:
        """The record's own file."""
        return self.prefix / FILE

    def save(self) -> None:
        """Save the record if it has changed."""
        document = {"format": _FORMAT} | asdict(self) | {"prefix": str(self.prefix)}
        write_if_changed(self.path, json.dumps(document, indent=1) + "\n")

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents; existing ones are not recorded."""
        for folder in reversed([path, *path.parents]):
            if folder.is_dir():
                continue
            if os.path.lexists(folder):
                raise SetupError(
                    f"{folder} is there already and is not a folder; move it away, then run install.sh again"
                )
            # Below a link its real path is recorded: if the link later points to another folder, that one is not ours.
            self._note(self.folders, folder.resolve() if self.behind_link(folder) else folder)
            folder.mkdir(exist_ok=True)

    def make_tree(self, path: Path) -> None:
        """Make a folder that is ours with all of its content. SetupError if one exists that this installation did not
        make.
        """
        if self.owns_tree(path):
            return
        self.check_free(path)
        self.make_folder(path.parent)
        self._note(self.trees, path)
        # It gets its final name only with its mark inside, wherever this is interrupted.
        part = path.with_name(f".{path.name}.{self.id}")
        part.mkdir(exist_ok=True)
        self.mark(part)
        part.rename(path)

    def empty_tree(self, path: Path) -> None:
        """Make a folder as `make_tree` does, and delete everything in it but the mark."""
        self.make_tree(path)
        for entry in path.iterdir():
            if entry.name != MARK:
                remove(entry)

    def take_tree(self, made: Path, path: Path) -> None:
        """Replace the tree `path` by the folder `made`, which this installation has filled."""
        self.mark(made)
        if self.owns_tree(path):
            remove(path)
        self.check_free(path)
        self._note(self.trees, path)
        made.rename(path)

    def check_free(self, path: Path) -> None:
        """SetupError if `path` exists and this installation did not make it."""
        if os.path.lexists(path) and not self.owns_tree(path):
            kind = "a link" if path.is_symlink() else "not made by this installation"
            raise SetupError(f"{path} is there already and is {kind}; move it away, then run install.sh again")

    def owns_tree(self, path: Path) -> bool:
        """Whether `path` is a real folder that this installation made: by the record, and by the mark in it."""
        if self._name(path) not in self.trees or self.behind_link(path) or not path.is_dir():
            return False
        try:
            return (path / MARK).read_text(encoding="utf-8").strip() == self.id
        except OSError:
            return False

    def mark(self, folder: Path) -> None:
        """Write the installation's id into a folder of ours."""
        write_if_changed(folder / MARK, f"{self.id}\n")

    def write_file(self, path: Path, text: str, *, executable: bool = False) -> bool:
        """Write a file of ours in one step; returns whether it was written."""
        self.make_folder(path.parent)
        self._note_value(self.files, path, digest(text.encode()))
        return write_if_changed(path, text, executable=executable)

    def note_link(self, path: Path, target: Path) -> None:
        """Record a link that is about to be made. An existing, unrecorded link belongs to the user."""
        if not (path.is_symlink() and path.readlink() == target):
            self._note_value(self.links, path, str(target))

    def note_unit(self, path: Path) -> None:
        """Record the systemd unit that is about to be written."""
        self.unit = str(path)
        self.save()

    def owns_link(self, path: Path) -> bool:
        """Whether `path` is a link that this installation made."""
        return path.is_symlink() and self.links.get(self._name(path)) == str(path.readlink())

    def forget_link(self, path: Path) -> None:
        """Remove a link of ours if it still points to its original target."""
        target = self.links.pop(self._name(path), None)
        if target is not None and path.is_symlink() and str(path.readlink()) == target:
            path.unlink()
            LOG.info("removed   %s", path)
        elif os.path.lexists(path):
            LOG.info("kept      %s, which is not the link that this installation made", path)
        self.save()

    def remove(self) -> None:
        """Remove all that is recorded and still ours, the record last. Anything else, or a path that is a link now,
        stays and is named.
        """
        for name in list(self.links):
            self.forget_link(self._path(name))
        for name in self.trees:
            self._remove_tree(self._path(name))
        for name, content in self.files.items():
            path = self._path(name)
            if path.is_file() and not path.is_symlink() and digest(path.read_bytes()) == content:
                path.unlink()
        self.path.unlink()
        for path in sorted(map(self._path, self.folders), key=lambda path: len(path.parts), reverse=True):
            if path.is_dir() and not self.behind_link(path) and not any(path.iterdir()):
                path.rmdir()

    def _remove_tree(self, path: Path) -> None:
        if self.owns_tree(path):
            remove(path)
            LOG.info("removed   %s", path)
        elif os.path.lexists(path):
            why = "which is behind a link now" if self.behind_link(path) else "which this installation did not make"
            LOG.info("kept      %s, %s", path, why)

    def behind_link(self, path: Path) -> bool:
        """Whether `path`, or a folder between it and the prefix, is a link; outside the prefix only `path` itself
        counts.
        """
        folders = [path]
        if path.is_relative_to(self.prefix):
            folders += [
                parent for parent in path.parents if parent.is_relative_to(self.prefix) and parent != self.prefix
            ]
        return any(folder.is_symlink() for folder in folders)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.prefix) if path.is_relative_to(self.prefix) else path)

    def _path(self, name: str) -> Path:
        return self.prefix / name

    def _note(self, kind: list[str], path: Path) -> None:
        if (name := self._name(path)) not in kind:
            kind.append(name)
            if self.prefix.is_dir():
                self.save()

    def _note_value(self, kind: dict[str, str], path: Path, value: str) -> None:
        if kind.get(name := self._name(path)) != value:
            kind[name] = value
            self.save()


def load_record(prefix: Path) -> Record | None:
    """The record of the installation at `prefix`, None if there is none. SetupError if it is unreadable.

    A prefix that was moved keeps its record. A copied installation becomes a separate one, to which nothing outside its
    prefix belongs.
    """
    file = prefix / FILE
    if file.is_symlink() or not file.exists():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.pop("format") != _FORMAT:
            raise SetupError(f"{file} was written by another version of install.sh; use the install.sh of that version")
        record = Record(**document | {"prefix": Path(document["prefix"])})
        _check_fields(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SetupError(
            f"{file} is damaged ({error}), so nothing here is known to be ours; restore it, or delete {prefix} yourself"
        ) from error
    if record.prefix == prefix:
        return record
    original = record.prefix / FILE
    copied = original.is_file() and f'"{record.id}"' in original.read_text(encoding="utf-8", errors="replace")
    record.prefix = prefix
    return _as_copy(record) if copied else record


def _check_fields(record: Record) -> None:
    """Raise TypeError for a field of another type."""
    lists = (*record.folders, *record.trees)
    texts = (record.id, *lists, *record.files, *record.files.values(), *record.links, *record.links.values())
    if not all(isinstance(text, str) for text in texts) or not isinstance(record.unit, str | None):
        raise TypeError("a field has the wrong type")


def _as_copy(record: Record) -> Record:
    """The record of a copied installation under a new id, with new marks in its folders."""
    owned = [path for name in record.trees if record.owns_tree(path := record.prefix / name)]
    record.id = uuid.uuid4().hex
    for path in owned:
        record.mark(path)
    record.unit = None
    record.folders = [name for name in record.folders if not Path(name).is_absolute()]
    record.files = {name: content for name, content in record.files.items() if not Path(name).is_absolute()}
    record.links = {name: target for name, target in record.links.items() if not Path(name).is_absolute()}
    return record


def digest(content: bytes) -> str:
    """The SHA-256 of `content`, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def remove(path: Path) -> None:
    """Remove a file, a link itself, or a folder with its content; links in it are removed, never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
