"""The tensors of a model folder: one file, shards with an index, or numbered shards without one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import FileError, ModelError
from .files import plain_parts, short
from .folder_files import INDEX, FolderFiles, listing, refuse_foreign, unfinished
from .header import TensorInfo, read_header
from .json_files import INDEX_DOCUMENT, read_json_object

SINGLE = "model.safetensors"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
CONTROL = ".aria2"  # next to a preallocated file until its download is complete
# Tensors that text does not need: draft layers and the vision tower.
SPARE = re.compile(r"(^|\.)(mtp|visual)\.")


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """The tensors of a folder, and one sentence for the user per group of ignored tensors."""

    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...] = ()


def read_folder(files: FolderFiles) -> FolderTensors:
    """The tensors of the folder. Of duplicates the one that the index names is used. Raises FileError, ModelError."""
    if files.has(INDEX):
        weight_map = _read_weight_map(files)
        if not files.has(SINGLE) or SINGLE in weight_map.values():
            return _read_indexed(files, weight_map)
        if all(files.has(name) for name in set(weight_map.values())):
            files.path(SINGLE)  # a link that leaves the model folders is refused here too
            found = _read_indexed(files, weight_map)
            return replace(found, notes=(*found.notes, f"{SINGLE} was left out: {INDEX} names other files"))
        return FolderTensors(
            read_tensors(files, [SINGLE]), (f"{INDEX} was left out: it names files that are not there",)
        )
    if files.has(SINGLE):
        return FolderTensors(read_tensors(files, [SINGLE]))
    names = files.names()
    weights = [name for name in names if name.endswith(".safetensors")]
    shards = [(name, match) for name in weights if (match := SHARD.fullmatch(name))]
    if shards:
        return FolderTensors(_read_numbered(files, shards))
    if len(weights) == 1:
        return FolderTensors(read_tensors(files, weights))
    if weights:
        raise ModelError(
            f"{short(files.folder.name)} has {len(weights)} safetensors files and no {INDEX}: {listing(weights)}; "
            "choose one of the files, or add the index"
        )
    refuse_foreign(files)
    raise FileError(
        f"there is no safetensors file in {short(files.folder.name)};"
        f" {unfinished(files) or 'download the whole folder'}"
    )


def read_tensors(files: FolderFiles, names: Iterable[str]) -> dict[str, TensorInfo]:
    """The tensors of these files; each tensor may be in one file only. Raises FileError, ModelError."""
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for info in _read_file(files, name):
            if info.name in tensors:
                raise ModelError(
                    f"tensor {short(info.name)} is in {tensors[info.name].source.shown} and in {name}; download the"
                    " folder again"
                )
            tensors[info.name] = info
    return tensors


def _read_file(files: FolderFiles, name: str) -> Iterable[TensorInfo]:
    if files.has(name + CONTROL):
        raise FileError(f"the download of {name} was not finished ({short(name + CONTROL)} is next to it): resume it")
    return read_header(files.path(name), shown=name).tensors.values()


def _read_numbered(files: FolderFiles, shards: list[tuple[str, re.Match[str]]]) -> dict[str, TensorInfo]:
    """Shards without an index: their names give the expected count."""
    stems = sorted({(match["stem"], match["count"]) for _, match in shards})
    if len(stems) > 1:
        raise ModelError(
            f"{short(files.folder.name)} holds shards of several checkpoints: {listing([n for n, _ in shards])}; keep"
            " one of them"
        )
    stem, count = stems[0]
    wanted = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    _require(files, wanted)
    return read_tensors(files, wanted)


def _read_weight_map(files: FolderFiles) -> dict[str, str]:
    weight_map = read_json_object(files.path(INDEX), INDEX, INDEX_DOCUMENT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX} has no weight_map (tensor names with their files); download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or plain_parts(name) is None:
            raise FileError(
                f"{INDEX} puts tensor {short(tensor)} into {short(str(name))}, which is not a file inside the folder;"
                " download it again"
            )
    return weight_map


def _read_indexed(files: FolderFiles, weight_map: Mapping[str, str]) -> FolderTensors:
    """The tensors of all files that the index names.

    The index decides between duplicates. A tensor that it does not name counts where the network requires it
    (TensorInfo.named). A tensor that it names but no file holds may belong to a draft layer or the vision tower.
    """
    present, notes = _present(files, weight_map)
    copies: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for name in present:
        for info in _read_file(files, name):
            copies[info.name].append(info)
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for tensor, found in copies.items():
        named = [info for info in found if info.source.shown == weight_map.get(tensor)]
        if len(found) > 1:
            twice.append(tensor)
        if named:
            tensors[tensor] = named[0]
        elif len(found) == 1:
            tensors[tensor] = replace(found[0], named=tensor in weight_map)
    lacking = [tensor for tensor in weight_map if tensor not in tensors]
    needed = [tensor for tensor in lacking if not SPARE.search(tensor)]
    if needed:
        where = weight_map[needed[0]]
        raise ModelError(
            f"{INDEX} names {len(needed)} tensors that their files do not hold: {listing(needed)} (first in {where});"
            " download again"
        )
    unnamed = [tensor for tensor, info in tensors.items() if not info.named]
    for names, what in (
        (twice, f"are in several files, of which the one counts that {INDEX} names"),
        (lacking, f"of {INDEX} are in no file and were left out"),
        (unnamed, f"are not in {INDEX} and are left out where the network does not need them"),
    ):
        if names:
            notes.append(f"{len(names)} tensors {what}: {listing(names)}")
    return FolderTensors(tensors, tuple(notes))


def _present(files: FolderFiles, weight_map: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The index's files that exist, and a note where missing ones hold only optional tensors. Raises FileError."""
    wanted = sorted(set(weight_map.values()))
    missing = {name for name in wanted if not files.has(name)}
    needed = {name for tensor, name in weight_map.items() if name in missing and not SPARE.search(tensor)}
    present = [name for name in wanted if name not in missing]
    if needed or not present:
        _require(files, wanted)
    notes = (
        [f"{len(missing)} files that hold nothing that is needed are missing: {listing(sorted(missing))}"]
        if missing
        else []
    )
    return present, notes


def _require(files: FolderFiles, wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if not files.has(name)]
    if missing:
        raise FileError(
            f"{len(missing)} of {len(wanted)} shards are missing in {short(files.folder.name)}: {listing(missing)}; "
            f"{unfinished(files) or 'download them'}"
        )
