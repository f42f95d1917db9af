"""Which files of a repository a language model needs: configuration, tokenizer, and one set of safetensors weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase

from ..errors import ModelError, RequestError
from ..loader.checkpoint import CONFIG
from ..loader.files import plain_parts, short
from ..loader.folder_files import INDEX
from ..loader.json_files import INDEX_DOCUMENT, parse_json_object
from ..loader.shards import SHARD, SINGLE
from .remote import RemoteFile, RepositorySnapshot

# Formats that can run code. They are always refused.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib")
CODE = (".py", ".pyc", ".so", ".sh", ".exe", ".dll")
_SETTINGS = (
    CONFIG,
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "README.md",
)

ReadSmall = Callable[[RemoteFile], Awaitable[bytes]]


async def choose_files(
    snapshot: RepositorySnapshot, globs: Sequence[str], form: str | None, read: ReadSmall
) -> list[RemoteFile]:
    """The files to fetch. `globs` replace the automatic choice; `read` fetches a small file, for the index of shards.

    Raises ModelError if nothing is usable, RequestError for a glob that matches a refused format.
    """
    if globs:
        return _matching(snapshot, globs)
    if snapshot.file(CONFIG) is None:
        raise ModelError(_no_config(snapshot))
    settings = [
        file
        for file in snapshot.files
        if "/" not in file.path and any(fnmatchcase(file.path, glob) for glob in _SETTINGS)
    ]
    weights = await _weights(snapshot, form, read)
    return [*settings, *(file for file in weights if file not in settings)]


def _matching(snapshot: RepositorySnapshot, globs: Sequence[str]) -> list[RemoteFile]:
    chosen: list[RemoteFile] = []
    for glob in globs:
        found = [file for file in snapshot.files if fnmatchcase(file.path, glob)]
        if not found:
            raise RequestError(
                f"--files {short(glob)} matches none of the {len(snapshot.files)} files of {snapshot.repo}"
            )
        refused = [file.path for file in found if file.path.lower().endswith((*PICKLES, *CODE))]
        if refused:
            raise RequestError(
                f"--files {short(glob)} asks for {short(refused[0])}, which can run code and is never fetched"
            )
        chosen += [file for file in found if file not in chosen]
    return chosen


def _no_config(snapshot: RepositorySnapshot) -> str:
    if snapshot.file("model_index.json") is not None:
        return (
            f"{snapshot.repo} is an image model in diffusers' layout, not a language model; "
            "onedesk pull --help names the image models that ComfyUI can use, and --files GLOB takes single files"
        )
    ggufs = [file.path for file in snapshot.files if file.path.lower().endswith(".gguf")]
    if ggufs:
        return f"{snapshot.repo} has no config.json, but {len(ggufs)} GGUF files; choose one: --files {short(ggufs[0])}"
    return f"{snapshot.repo} has no config.json, so it is not a language model; --files GLOB takes single files"


async def _weights(snapshot: RepositorySnapshot, form: str | None, read: ReadSmall) -> list[RemoteFile]:
    """The safetensors files of one model: those of an index, the single one, or the only numbered shards."""
    index, single = _variant(snapshot, INDEX, form), _variant(snapshot, SINGLE, form)
    if index is not None:
        return [index, *await _indexed(snapshot, index, read)]
    if single is not None:
        return [single]
    top = [file for file in snapshot.files if "/" not in file.path and file.path.endswith(".safetensors")]
    if form is not None:
        top = [file for file in top if form.lower() in file.path.lower()]
        if not top:
            raise RequestError(_no_form(snapshot, form))
    stems = {match["stem"] + match["count"] for file in top if (match := SHARD.fullmatch(file.path))}
    if len(top) == 1 or (len(stems) == 1 and all(SHARD.fullmatch(file.path) for file in top)):
        return top
    if top:
        names = ", ".join(short(file.path) for file in top[:4])
        raise ModelError(
            f"{snapshot.repo} has {len(top)} safetensors files and no index: {names}; choose with --files or --form"
        )
    pickled = any(file.path.lower().endswith(PICKLES) for file in snapshot.files)
    why = "only pickle files, which can run code and are never fetched" if pickled else "no safetensors files"
    raise ModelError(f"{snapshot.repo} has {why}; get the safetensors form of this model")


def _variant(snapshot: RepositorySnapshot, name: str, form: str | None) -> RemoteFile | None:
    """The file of this name, or its variant: model.FORM.safetensors, model.safetensors.index.FORM.json."""
    if form is None:
        return snapshot.file(name)
    stem, _, ending = name.rpartition(".")
    wanted = f"{stem}.{form}.{ending}".lower()
    return next((file for file in snapshot.files if file.path.lower() == wanted), None)


def _no_form(snapshot: RepositorySnapshot, form: str) -> str:
    return (
        f"{snapshot.repo} has no files of the form {short(form)}; other forms are often repositories of their own, "
        f"such as {snapshot.repo}-{form.upper()}"
    )


async def _indexed(snapshot: RepositorySnapshot, index: RemoteFile, read: ReadSmall) -> list[RemoteFile]:
    """The shards that an index names. Others in the tree are a second format and left out."""
    weight_map = parse_json_object(await read(index), index.path, INDEX_DOCUMENT).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and plain_parts(name) for name in weight_map.values()
    ):
        raise ModelError(
            f"{index.path} of {snapshot.repo} does not say which file holds which tensor; the repository is damaged"
        )
    names = sorted(set(weight_map.values()))
    found = [(name, snapshot.file(name)) for name in names]
    lacking = [name for name, file in found if file is None]
    if lacking or not names:
        shown = short(lacking[0]) if lacking else "no file"
        raise ModelError(
            f"{snapshot.repo} lacks {len(lacking)} of {len(names)} shards that its index names ({shown}); its upload is"
            " unfinished"
        )
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong:
        raise ModelError(
            f"{index.path} of {snapshot.repo} names {short(wrong[0])}, which is not a safetensors file and is never"
            " fetched"
        )
    return [file for _, file in found if file is not None]
