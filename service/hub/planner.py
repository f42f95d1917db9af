"""From the user's request to a plan: which hub, which files, which folders, and whether the model fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import FILE_NAME, Config
from ..errors import FileError, ModelError, RequestError
from ..loader.checkpoint import CONFIG
from ..loader.files import plain_parts, short
from ..loader.json_files import parse_json_object
from ..loader.names import IMAGE_MODELS
from ..loader.shards import SINGLE
from .hubs import Hubs
from .image_models import DATA, ImageModel, PinnedFile, find_image_model, read_image_models
from .manifest import MANIFEST, read_manifest
from .names import Wanted, parse_name
from .plan import Fit, Folder, PlannedFile, PullPlan, Verdict, plan_folder
from .remote import RemoteFile, Report, RepositorySnapshot
from .select import choose_files

IMAGE_MANIFESTS = ".onedesk"
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What the user asked for. `source` is --from, `folder_name` is --as."""

    name: str
    source: str | None = None
    revision: str | None = None
    form: str | None = None
    globs: tuple[str, ...] = ()
    folder_name: str | None = None


class Planner:
    """Makes the plan of one request."""

    def __init__(
        self,
        request: PullRequest,
        config: Config,
        hubs: Hubs,
        verdict: Verdict,
        report: Report,
        stop: Callable[[], bool],
        data: Path = DATA,
    ) -> None:
        self._data = data
        self._request = request
        self._config = config
        self._hubs = hubs
        self._verdict = verdict
        self._report = report
        self._stop = stop

    async def plan(self) -> PullPlan:
        """What the pull would do. Raises PeerError, ModelError, FileError, RequestError."""
        request, root = self._request, models_folder(self._config)
        image_model = find_image_model(request.name, read_image_models(self._data))
        wanted = Wanted("") if image_model else parse_name(request.name)
        await self._hubs.open(self._config, wanted, request.source)
        if image_model is not None:
            return await self._image_model(root, image_model)
        snapshot = await self._hubs.snapshot(wanted.repo, request.revision or wanted.revision)
        return await self._language_model(root, wanted, snapshot)

    async def _language_model(self, root: Path, wanted: Wanted, snapshot: RepositorySnapshot) -> PullPlan:
        request = self._request
        globs = request.globs or ((wanted.path,) if wanted.path else ())
        folder = root / folder_name(request.folder_name or snapshot.repo.rsplit("/", 1)[-1])
        _check_owner(folder, snapshot)
        chosen = await choose_files(snapshot, globs, request.form, lambda file: self._hubs.read(snapshot, file))
        fit = Fit(None, "single files were asked for")
        if not globs:
            fit = self._verdict(folder.name, await self._config_of(snapshot), 0)
        files = await self._look(folder, [(file.path, file, snapshot) for file in chosen], MANIFEST)
        part = Folder(folder, files, str(snapshot.endpoint), snapshot.repo, snapshot.commit, keeps=bool(globs))
        renamed = snapshot.repo if snapshot.repo != snapshot.asked else None
        return PullPlan(request.name, (part,), snapshot.license, snapshot.gated, fit, renamed=renamed)

    async def _look(
        self, root: Path, chosen: list[tuple[str, RemoteFile, RepositorySnapshot]], manifest: str
    ) -> tuple[PlannedFile, ...]:
        # Existing files without a known hash are hashed, so not on the event loop.
        return await asyncio.to_thread(plan_folder, root, chosen, manifest, self._report, self._stop)

    async def _config_of(self, snapshot: RepositorySnapshot) -> dict[str, Any]:
        """The model's config.json. Raises ModelError for one that is not a JSON object."""
        file = snapshot.file(CONFIG)
        if file is None:
            raise ModelError(f"{snapshot.repo} has no {CONFIG}")
        return parse_json_object(await self._hubs.read(snapshot, file), CONFIG)

    async def _image_model(self, root: Path, model: ImageModel) -> PullPlan:
        request = self._request
        if request.globs or request.revision or request.folder_name:
            raise RequestError(
                f"{model.name} is a fixed set of files: leave --files, --revision and --as out; --form chooses among"
                " its forms"
            )
        pinned = model.files(request.form)
        chosen = [(file.target, *await self._pinned(file)) for file in pinned]
        comfyui = root / IMAGE_MODELS
        name = f"{IMAGE_MANIFESTS}/{model.name}.json"
        files = await self._look(comfyui, chosen, name)
        first = chosen[0][2]
        folders = [Folder(comfyui, files, str(first.endpoint), first.repo, first.commit, name)]
        if model.language_model is None or model.language_weights is None:
            fit = self._verdict("", None, sum(file.size for file in pinned))
        else:
            language = await self._language_folder(root, model.language_model, model.language_weights)
            images = sum(file.size for file in pinned if file != model.language_weights)
            fit = self._verdict(model.language_model.rsplit("/", 1)[-1], None, images)
            folders += [language] if language else []
        gated = any(snapshot.gated for _, _, snapshot in chosen)
        return PullPlan(model.name, tuple(folders), model.license or first.license, gated, fit, model.unverified)

    async def _pinned(self, pinned: PinnedFile) -> tuple[RemoteFile, RepositorySnapshot]:
        """The file on the hub, at its commit or otherwise on the main branch. Raises ModelError if its bytes differ."""
        for revision in (pinned.commit, None):
            try:
                snapshot = await self._hubs.snapshot(pinned.repo, revision)
            except ModelError:
                if revision is None:
                    raise
                continue
            file = snapshot.file(pinned.path)
            if file is not None and (file.size, file.sha256) == (pinned.size, pinned.sha256):
                return file, snapshot
        raise ModelError(
            f"{pinned.repo} has no {short(pinned.path)} with the {pinned.size} bytes and the SHA-256 "
            f"{pinned.sha256[:16]}... that this version knows; other bytes are not fetched in its name: "
            "update Onedesk, or fetch the file by its address"
        )

    async def _language_folder(self, root: Path, repo: str, weights: PinnedFile) -> Folder | None:
        """The language model's folder that shares the text encoder's weights; None if the model has its own."""
        folder = root / repo.rsplit("/", 1)[-1]
        link = (SINGLE, f"../{IMAGE_MODELS}/{weights.target}")
        own = sorted(folder.glob("*.safetensors*")) if folder.is_dir() else []
        if any(not path.is_symlink() or str(path.readlink()) != link[1] for path in own):
            return None
        snapshot = await self._hubs.snapshot(repo, None)
        _check_owner(folder, snapshot)
        settings = await choose_files(snapshot, (), None, lambda file: self._hubs.read(snapshot, file))
        chosen = [(file.path, file, snapshot) for file in settings if not file.path.endswith(_WEIGHTS)]
        files = await self._look(folder, chosen, MANIFEST)
        return Folder(folder, files, str(snapshot.endpoint), repo, snapshot.commit, link=link)


def models_folder(config: Config) -> Path:
    """Where models are pulled to: the first root of [models]. Raises FileError if the configuration names none."""
    if config.file is None or not config.model_roots:
        raise FileError(
            f"there is no {FILE_NAME} that says where models are; run install.sh, or name a file with --config"
        )
    return config.model_roots[0]


def pulled_folder(config: Config, name: str) -> tuple[Path, str]:
    """The folder of a model that was pulled as `name`, and the name of its manifest there.

    Raises RequestError, FileError.
    """
    root = models_folder(config)
    image_model = find_image_model(name, read_image_models())
    if image_model is not None:
        return root / IMAGE_MODELS, f"{IMAGE_MANIFESTS}/{image_model.name}.json"
    if plain_parts(name) is not None and (root / name / MANIFEST).is_file():
        return root / folder_name(name), MANIFEST
    repo = name if "://" not in name else parse_name(name).repo
    return root / folder_name(repo.rsplit("/", 1)[-1]), MANIFEST


def folder_name(text: str) -> str:
    """A name below the models folder: NAME or OWNER/NAME. Raises RequestError."""
    parts = plain_parts(text)
    if parts is None or len(parts) > 2 or any(part.startswith(".") for part in parts) or parts[:1] == (IMAGE_MODELS,):
        raise RequestError(f"{short(text)} cannot be a model's folder; use NAME or OWNER/NAME")
    return text


def _check_owner(folder: Path, snapshot: RepositorySnapshot) -> None:
    if folder.is_symlink():
        raise FileError(
            f"{folder.name} in the models folder is a symlink; remove it, or pull under another name: --as NAME"
        )
    manifest = read_manifest(folder / MANIFEST)
    if manifest is not None and manifest.repo not in (snapshot.repo, snapshot.asked):
        raise FileError(
            f"the folder {folder.name} holds {manifest.repo}; pull under another name: --as {snapshot.repo}"
        )
