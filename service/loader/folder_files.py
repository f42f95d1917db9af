"""The files of one model folder by name: those that exist, those of an unfinished download, and those in other
formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError, ModelError
from .files import exists, exists_at_all, is_inside, plain_parts, short

INDEX = "model.safetensors.index.json"
PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".tmp", ".crdownload", ".aria2", ".download")
HUB_PARTS = Path(".cache", "huggingface", "download")
FOREIGN = (
    ("GGUF", (".gguf",)),
    ("pickle", (".bin", ".pt", ".pth", ".ckpt", ".pkl")),
    ("ONNX", (".onnx",)),
)
TELL = 8  # names that a message lists before "and N more"


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files of one model folder, by their name in it; none may be outside `bases`."""

    folder: Path
    bases: tuple[Path, ...]

    def has(self, name: str) -> bool:
        return exists_at_all(self.folder / name)

    def path(self, name: str) -> Path:
        if plain_parts(name) is None:
            raise FileError(
                f"{short(name)} is not the name of a file inside the model folder {short(self.folder.name)}"
            )
        path = self.folder / name
        if path.is_symlink() and not exists(path):
            raise FileError(f"{short(name)} is a symlink to a file that does not exist; download it again")
        if not is_inside(path, self.bases):
            raise FileError(
                f"{short(name)} is a symlink that leaves the model folders; put the file itself there, or add its"
                " folder as a root"
            )
        return path

    def names(self) -> list[str]:
        try:
            return sorted(
                entry.name for entry in self.folder.iterdir() if not entry.name.startswith(".") and not entry.is_dir()
            )
        except OSError as error:
            raise FileError(f"the folder {short(self.folder.name)} cannot be read: {error.strerror}") from None


def refuse_foreign(files: FolderFiles) -> None:
    """ModelError when a folder without safetensors holds another format."""
    names = files.names()
    if any(name.endswith(".safetensors") for name in names) or files.has(INDEX):
        return
    for kind, suffixes in FOREIGN:
        found = [name for name in names if name.lower().endswith(suffixes)]
        if found:
            never = " (which can run code and is never read)" if kind == "pickle" else ""
            raise ModelError(
                f"{short(files.folder.name)} holds {kind} files{never}, no safetensors: {listing(found)}; "
                "get the safetensors form of this model"
            )


def unfinished(files: FolderFiles) -> str | None:
    """The unfinished parts of a download, next to the files or where the hub's client keeps them."""
    partial = [name for name in files.names() if name.endswith(PARTIAL_SUFFIXES)]
    if not partial and exists(files.folder / HUB_PARTS):
        partial = sorted(path.name for path in (files.folder / HUB_PARTS).glob("*.incomplete"))
    return f"a download was not finished ({listing(partial)}): resume it" if partial else None


def listing(names: Sequence[str]) -> str:
    shown = ", ".join(short(name) for name in names[:TELL])
    return shown if len(names) <= TELL else f"{shown} and {len(names) - TELL} more"
