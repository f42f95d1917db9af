"""Image models that can be pulled by name: the files of each, from image_models.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, RequestError
from ..loader.files import plain_parts, short
from ..toml_file import read_document
from .remote import is_repo

DATA = Path(__file__).with_name("image_models.toml")
FOLDERS = ("diffusion_models", "text_encoders", "vae")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of a repository, and its folder in ComfyUI. `size` is in bytes."""

    repo: str
    commit: str
    path: str
    folder: str
    size: int
    sha256: str

    @property
    def target(self) -> str:
        """Its path below ComfyUI's model folder."""
        return f"{self.folder}/{self.path.rsplit('/', 1)[-1]}"


@dataclass(frozen=True, slots=True)
class ImageModel:
    """`forms`: files by variant, the default one first. `language_weights` is the file with the weights of the
    repository `language_model`, so that one file is both text encoder and language model.
    """

    name: str
    names: tuple[str, ...]
    license: str
    forms: Mapping[str, tuple[PinnedFile, ...]]
    language_model: str | None
    language_weights: PinnedFile | None
    unverified: tuple[str, ...]

    def files(self, form: str | None) -> tuple[PinnedFile, ...]:
        """The files of a variant, None for the default one. Raises RequestError."""
        if form is None:
            return next(iter(self.forms.values()))
        if form not in self.forms:
            raise RequestError(f"{self.name} has no form {short(form)}; there are {', '.join(self.forms)}")
        return self.forms[form]


def read_image_models(path: Path = DATA) -> dict[str, ImageModel]:
    """Every image model by its name. Raises FileError for an invalid data file."""
    document = read_document(path)
    if set(document) != {"files", "models"}:
        raise FileError(f"{path.name} needs the tables files and models, and no other")
    files = {name: _file(path, name, table) for name, table in document["files"].items()}
    return {name: _model(path, name, table, files) for name, table in document["models"].items()}


def find_image_model(text: str, models: Mapping[str, ImageModel]) -> ImageModel | None:
    """The image model of this name, ignoring case; None for any other name."""
    wanted = text.strip().lower()
    return next((model for model in models.values() if wanted in (model.name, *model.names)), None)


def _file(path: Path, name: str, table: Any) -> PinnedFile:
    try:
        file = PinnedFile(**table)
    except TypeError as error:
        raise FileError(
            f"{path.name}: [files.{name}] needs repo, commit, path, folder, size and sha256, and no other key"
        ) from error
    right = (
        is_repo(file.repo)
        and _COMMIT.fullmatch(file.commit)
        and plain_parts(file.path)
        and file.path.endswith(".safetensors")
        and file.folder in FOLDERS
        and type(file.size) is int
        and file.size > 0
        and _SHA256.fullmatch(file.sha256)
    )
    if not right:
        raise FileError(f"{path.name}: [files.{name}] has a value that is not of its kind")
    return file


def _model(path: Path, name: str, table: Any, files: Mapping[str, PinnedFile]) -> ImageModel:
    known = {"names", "license", "forms", "language_model", "language_weights", "unverified"}
    if not isinstance(table, dict) or not set(table) <= known or not table.get("forms"):
        raise FileError(
            f"{path.name}: [models.{name}] needs forms, and may have {', '.join(sorted(known - {'forms'}))}"
        )
    forms = {form: tuple(files[one] for one in chosen) for form, chosen in table["forms"].items()}
    weights = table.get("language_weights")
    return ImageModel(
        name=name,
        names=tuple(table.get("names", ())),
        license=table.get("license", ""),
        forms=forms,
        language_model=table.get("language_model"),
        language_weights=files[weights] if weights else None,
        unverified=tuple(table.get("unverified", ())),
    )
