"""Checkpoints: folders, shards and lone files that are whole are opened; what is missing or foreign is said at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.errors import FileError, ModelError, OnedeskError
from onedesk.service.loader.checkpoint import LANGUAGE, Checkpoint, open_checkpoint
from raw_safetensors import write_raw, write_tensors
from safetensors import safe_open
from safetensors.torch import save_file

CONFIG = {"model_type": "qwen3", "hidden_size": 64}
INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 100\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that has nothing but its configuration."""
    made = tmp_path / "models" / "Qwen3-Tiny"
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def shard(number: int, count: int, stem: str = "model") -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def write_shards(folder: Path, count: int) -> dict[str, str]:
    """Shards with two tensors each, and their index; the weight map comes back."""
    weight_map: dict[str, str] = {}
    for number in range(1, count + 1):
        tensors = {f"layers.{number}.{part}.weight": torch.randn(number, 3).bfloat16() for part in ("up", "down")}
        save_file(tensors, folder / shard(number, count))
        weight_map |= dict.fromkeys(tensors, shard(number, count))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def write_model(path: Path, name: str = "w") -> Path:
    return write_tensors(path, {name: ("F16", [2, 2], bytes(8))})


def refusal(path: Path, kind: type[OnedeskError], **options: Any) -> str:
    """The message with which a checkpoint is refused; it never tells where the folder lies."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path, **options)
    assert str(path.parent) not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_one_file_is_opened(folder: Path) -> None:
    tensors = {"embed": torch.randn(10, 4), "norm": torch.ones(4).half(), "scalar": torch.tensor(1.0).bfloat16()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"top_k": 20}')
    found = open_checkpoint(folder)
    assert (found.name, found.folder) == ("Qwen3-Tiny", folder)
    assert (found.config, found.generation) == (CONFIG, {"top_k": 20})
    assert {name: info.shape for name, info in found.tensors.items()} == {
        name: tuple(t.shape) for name, t in tensors.items()
    }
    assert found.weight_bytes == 160 + 8 + 2
    assert all(info.file == folder / "model.safetensors" for info in found.tensors.values())


def test_the_census_counts_numbers_and_bytes(folder: Path) -> None:
    write_tensors(
        folder / "model.safetensors",
        {
            "a": ("BF16", [3, 2], bytes(12)),
            "b": ("F32", [5], bytes(20)),
            "c": ("F4", [4], bytes(2)),
            "d": ("F32", [1], bytes(4)),
        },
    )
    census = open_checkpoint(folder).census()
    assert census.parameters == 6 + 5 + 4 + 1
    assert census.bytes_by_dtype == {"F32": 24, "BF16": 12, "F4": 2}
    assert census.files == 1


def test_the_only_safetensors_file_is_taken_whatever_its_name(folder: Path) -> None:
    write_model(folder / "pytorch.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    found = open_checkpoint(folder)
    assert list(found.tensors) == ["w"]
    assert found.generation == {}


def test_model_safetensors_goes_before_other_files(folder: Path) -> None:
    write_model(folder / "consolidated.safetensors", "wrong")
    before = open_checkpoint(folder)
    write_model(folder / "model.safetensors", "right")
    assert list(open_checkpoint(folder).tensors) == ["right"]
    assert before.changed()


def test_several_files_without_an_index_are_refused_by_name(folder: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_model(folder / name)
    message = refusal(folder, ModelError)
    assert f"has 2 safetensors files and no {INDEX}: 'a.safetensors', 'b.safetensors'; choose one" in message


def test_a_lone_file_finds_its_configuration_beside_it(folder: Path) -> None:
    write_model(folder / "a.safetensors", "a")
    write_model(folder / "b.safetensors", "b")
    found = open_checkpoint(folder / "b.safetensors")
    assert (found.name, found.folder, list(found.tensors)) == ("b", folder, ["b"])
    assert found.config == CONFIG


def test_a_lone_file_without_configuration_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x.safetensors")
    assert "no config.json beside 'x.safetensors'" in refusal(path, FileError)


def test_a_lone_file_is_what_its_header_says(folder: Path) -> None:
    """An honest header opens whatever the name says and however its length begins; another format is named, with or
    without config.
    """
    path = write_tensors(folder / "weights.bin", {"w": ("F16", [1], b"ab")}, header_bytes=0x0480)
    assert list(open_checkpoint(path).tensors) == ["w"]
    (folder / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(20))
    (folder / "x.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    (folder / "config.json").unlink()
    assert "x.gguf is not a safetensors file: it looks like a GGUF file" in refusal(folder / "x.gguf", FileError)
    assert "x.bin is not a safetensors file: it looks like a pickle file" in refusal(folder / "x.bin", FileError)


def test_a_relative_path_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder / "model.safetensors")
    monkeypatch.chdir(folder)
    assert open_checkpoint(Path()).name == "Qwen3-Tiny"
    assert open_checkpoint(Path("model.safetensors")).folder == folder


@pytest.mark.parametrize("name", ["absent", "a\0b", "x" * 5000])
def test_what_does_not_exist_is_said(folder: Path, name: str) -> None:
    message = refusal(folder / name, FileError)
    assert "does not exist" in message
    assert len(message) < 300


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_opened_with_and_without_their_index(folder: Path, with_index: bool) -> None:
    weight_map = write_shards(folder, 3)
    write_model(folder / "adapter.safetensors")
    if not with_index:
        (folder / INDEX).unlink()
    found = open_checkpoint(folder)
    assert {name: info.file.name for name, info in found.tensors.items()} == weight_map
    assert [path.name for path in found.files] == [shard(n, 3) for n in (1, 2, 3)]
    _same_bytes(found)
    assert not found.changed()
    write_index(folder, dict.fromkeys(weight_map, "other.safetensors"))
    assert found.changed()


def _same_bytes(found: Checkpoint) -> None:
    for path in found.files:
        with safe_open(path, framework="pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 (no mapping)
                info = found.tensors[name]
                content = path.read_bytes()[info.start : info.start + info.nbytes]
                assert content == theirs.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shards_are_named_at_once(folder: Path, with_index: bool) -> None:
    write_shards(folder, 5)
    if not with_index:
        (folder / INDEX).unlink()
    for number in (2, 5):
        (folder / shard(number, 5)).unlink()
    (folder / shard(3, 5)).write_bytes(b"cut")  # found first if headers were read before all files are looked for
    message = refusal(folder, FileError)
    assert f"2 of 5 shards are missing in 'Qwen3-Tiny': '{shard(2, 5)}', '{shard(5, 5)}'; download them" in message


def test_many_missing_shards_make_a_short_message(folder: Path) -> None:
    write_index(folder, {f"w{n}": shard(n, 99) for n in range(1, 100)})
    message = refusal(folder, FileError)
    assert "99 of 99 shards are missing" in message
    assert "and 91 more" in message


def test_a_download_that_was_not_finished_is_said(folder: Path) -> None:
    write_shards(folder, 2)
    (folder / shard(2, 2)).rename(folder / f"{shard(2, 2)}.incomplete")
    message = refusal(folder, FileError)
    assert f"1 of 2 shards are missing in 'Qwen3-Tiny': '{shard(2, 2)}'" in message
    assert f"a download was not finished ('{shard(2, 2)}.incomplete'): resume it" in message


def test_a_partial_file_never_counts_as_the_model(folder: Path) -> None:
    write_model(folder / "model.safetensors").rename(folder / "model.safetensors.part")
    message = refusal(folder, FileError)
    assert (
        "there is no safetensors file in 'Qwen3-Tiny'; a download was not finished ('model.safetensors.part')"
        in message
    )


def test_the_parts_of_the_hubs_own_client_are_seen(folder: Path) -> None:
    write_shards(folder, 2)
    (folder / shard(2, 2)).unlink()
    parts = folder / ".cache" / "huggingface" / "download"
    parts.mkdir(parents=True)
    (parts / "0123.incomplete").write_bytes(b"")
    assert "a download was not finished ('0123.incomplete')" in refusal(folder, FileError)


def test_a_file_of_full_size_that_is_still_downloaded_is_refused(folder: Path) -> None:
    """aria2 makes the file as long as it will be and fills it in any order; its control file goes when all is there."""
    write_model(folder / "model.safetensors")
    (folder / "model.safetensors.aria2").write_bytes(b"")
    message = "the download of model.safetensors was not finished ('model.safetensors.aria2' is next to it)"
    assert message in refusal(folder, FileError)
    assert message in refusal(folder / "model.safetensors", FileError)


def test_messages_keep_names_in_their_own_script(tmp_path: Path) -> None:
    folder = tmp_path / "通义"
    folder.mkdir()
    assert "there is no config.json in '通义'" in refusal(folder, FileError)


def test_a_shard_that_was_cut_is_named(folder: Path) -> None:
    write_shards(folder, 2)
    path = folder / shard(2, 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{shard(2, 2)}: tensor " in refusal(folder, FileError)
    path.write_bytes(LFS)
    assert f"{shard(2, 2)} is not a safetensors file: it looks like a Git LFS pointer" in refusal(folder, FileError)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
    ],
)
def test_a_broken_index_is_refused(folder: Path, content: str, wanted: str) -> None:
    write_shards(folder, 2)
    (folder / INDEX).write_text(content)
    message = refusal(folder, ModelError)
    assert INDEX in message
    assert wanted in message


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/../../x.safetensors",
        "..",
        ".",
        "",
        "a\\x.safetensors",
        "a\0b",
        "a//b",
        None,
        3,
        ["a"],
    ],
)
def test_an_index_may_not_name_files_outside_the_folder(folder: Path, name: Any) -> None:
    write_model(folder.parent / "x.safetensors", "stolen")
    write_shards(folder, 1)
    write_index(folder, {"stolen": name})
    message = refusal(folder, FileError)
    assert f"{INDEX} puts tensor 'stolen' into" in message
    assert "not a file inside the folder" in message


def test_a_tensor_that_no_file_holds_is_named(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    write_index(folder, {**weight_map, "ghost": shard(2, 2)})
    assert f"names 1 tensors that their files do not hold: 'ghost' (first in {shard(2, 2)})" in refusal(
        folder, ModelError
    )


def test_a_tensor_in_another_file_than_the_index_says_is_found(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    moved = next(name for name, file in weight_map.items() if file == shard(1, 2))
    write_index(folder, {**weight_map, moved: shard(2, 2)})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors[moved].source.shown == shard(1, 2)
    assert checkpoint.notes == ()


def test_an_unindexed_tensor_counts_where_required(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    write_index(folder, {name: file for name, file in weight_map.items() if name != "layers.1.up.weight"})
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.tensors["layers.1.up.weight"].named
    assert all(info.named for name, info in checkpoint.tensors.items() if name != "layers.1.up.weight")
    (note,) = checkpoint.notes
    assert (
        note
        == f"1 tensors are not in {INDEX} and are left out where the network does not need them: 'layers.1.up.weight'"
    )


def test_of_two_copies_the_one_counts_that_the_index_names(folder: Path) -> None:
    for number in (1, 2):
        write_tensors(folder / shard(number, 2), {name: ("F16", [1], b"ab") for name in ("twice", f"own{number}")})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    write_index(folder, {"twice": shard(1, 2), "own1": shard(1, 2), "own2": shard(2, 2)})
    for file in (shard(1, 2), shard(2, 2)):
        write_index(folder, {"twice": file, "own1": shard(1, 2), "own2": shard(2, 2)})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.tensors["twice"].source.shown == file
        assert checkpoint.notes == (
            f"1 tensors are in several files, of which the one counts that {INDEX} names: 'twice'",
        )
    write_index(folder, {"own1": shard(1, 2), "own2": shard(2, 2)})
    assert set(open_checkpoint(folder).tensors) == {"own1", "own2"}


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.visual.blocks.0.norm1.weight"])
def test_what_text_does_not_need_may_be_missing(folder: Path, name: str) -> None:
    weight_map = write_shards(folder, 2)
    write_index(folder, {**weight_map, name: shard(2, 2)})
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(weight_map)
    assert checkpoint.notes == (f"1 tensors of {INDEX} are in no file and were left out: {name!r}",)
    write_index(folder, {**weight_map, name: "extra.safetensors"})
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(weight_map)
    assert checkpoint.notes[0] == "1 files that hold nothing that is needed are missing: 'extra.safetensors'"
    write_index(folder, {**weight_map, name: "extra.safetensors", "needed": "extra.safetensors"})
    assert "1 of 3 shards are missing" in refusal(folder, FileError)


def test_a_single_file_replaces_missing_shards(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    write_model(folder / "model.safetensors", "old")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(weight_map)
    assert checkpoint.notes == (f"model.safetensors was left out: {INDEX} names other files",)
    (folder / shard(2, 2)).unlink()
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == {"old"}
    assert checkpoint.notes == (f"{INDEX} was left out: it names files that are not there",)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    for number in (1, 2):
        write_model(folder / shard(number, 2), "twice")
    assert f"tensor 'twice' is in {shard(1, 2)} and in {shard(2, 2)}" in refusal(folder, ModelError)


def test_shards_of_two_checkpoints_are_refused(folder: Path) -> None:
    write_model(folder / shard(1, 2), "a")
    write_model(folder / shard(1, 3), "b")
    assert "holds shards of several checkpoints" in refusal(folder, ModelError)


@pytest.mark.parametrize(
    ("content", "kind", "wanted"),
    [
        (None, FileError, "there is no config.json in 'Qwen3-Tiny'"),
        (b"", ModelError, "config.json is not JSON"),
        (b"<html>404</html>", ModelError, "config.json is not JSON"),
        (b'{"model_type": "qwen3"', ModelError, "config.json is not JSON"),
        (b"[" * 90_000, ModelError, "config.json is nested more than 64 levels deep"),
        (b'{"model_type": "qwen3\xff"}', ModelError, "config.json is not UTF-8 text (byte 21)"),
        ('{"model_type": "qwen3"}'.encode("utf-16"), ModelError, "config.json is not UTF-8 text"),
        (b"[]", ModelError, "config.json holds a JSON list; an object"),
        (b"null", ModelError, "config.json holds a JSON null; an object"),
        (b"{}", ModelError, "config.json does not say the model_type"),
        (b'{"model_type": null}', ModelError, "config.json does not say the model_type"),
        (b'{"model_type": ["qwen3"]}', ModelError, "config.json does not say the model_type"),
        (b'{"model_type": "\\ud800"}', ModelError, "config.json does not say the model_type"),
        (b'{"a": [' + b"[]," * 200_000 + b"[]]}", ModelError, "config.json holds 200,003 lists and objects; a file of"),
        (b"{" + b'"a":0,' * 1_000_001 + b'"a":0}', ModelError, "config.json holds 2,000,004 quotation marks"),
        (
            b'{"model_type": "qwen3", "n": [' + b"1.5," * 600_000 + b"1]}",
            ModelError,
            "config.json holds 600,001 commas",
        ),
        (
            b'{"model_type": "qwen3", "n": ' + b"9" * 65 + b"}",
            ModelError,
            "config.json has a whole number of 65 digits at 'n'",
        ),
        (
            b'{"model_type": "qwen3", "n": [-' + b"9" * 5000 + b"]}",
            ModelError,
            "config.json has a whole number of 5001 digits at 'n'",
        ),
        (
            b'{"model_type": "qwen3", "n": ' + b"[" * 64 + b"]" * 64 + b"}",
            ModelError,
            "nested more than 64 levels deep",
        ),
        (b"version https://git-lfs.github.com/spec/v1", ModelError, "config.json is only a Git LFS pointer"),
    ],
)
def test_a_broken_configuration_is_refused(
    folder: Path, content: bytes | None, kind: type[OnedeskError], wanted: str
) -> None:
    write_model(folder / "model.safetensors")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    assert wanted in refusal(folder, kind)
    assert kind is ModelError or "download the whole folder" in refusal(folder, kind)


def test_a_configuration_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    write_model(folder / "model.safetensors")
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"model_type": "qwen3", "名": "猫"}).encode())
    assert open_checkpoint(folder).config["名"] == "猫"


def test_an_enormous_configuration_is_not_read(folder: Path) -> None:
    write_model(folder / "model.safetensors")
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert f"config.json has {1 << 40:,} bytes" in refusal(folder, ModelError)


def test_a_broken_generation_config_is_not_ignored(folder: Path) -> None:
    write_model(folder / "model.safetensors")
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is not JSON" in refusal(folder, ModelError)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("x-Q4_K_M.gguf", "holds GGUF files, no safetensors: 'x-Q4_K_M.gguf'; get the safetensors form"),
        (
            "pytorch_model.bin",
            "holds pickle files (which can run code and is never read), no safetensors: 'pytorch_model.bin'",
        ),
        ("model.PTH", "holds pickle files"),
        ("model.onnx", "holds ONNX files"),
    ],
)
def test_a_folder_of_another_format_says_what_it_is(folder: Path, file: str, wanted: str, with_config: bool) -> None:
    (folder / file).write_bytes(b"never looked at")
    if not with_config:
        (folder / "config.json").unlink()
    assert wanted in refusal(folder, ModelError)


def test_an_empty_model_is_refused(folder: Path) -> None:
    write_raw(folder / "model.safetensors", {"__metadata__": {}})
    assert "holds no tensor at all" in refusal(folder, ModelError)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "generation_config.json", INDEX, *LANGUAGE])
def test_a_symlink_may_not_leave_the_model_folders(folder: Path, file: str) -> None:
    """Each file of a model may be a link (as in a cache of downloads), but only to a file under a root."""
    write_shards(folder, 1)
    for name in ("generation_config.json", *LANGUAGE):
        (folder / name).write_text("{}")
    if file == "model.safetensors":
        write_model(folder / file)
    outside = folder.parents[1] / "blobs"
    outside.mkdir()
    (folder / file).rename(outside / "0123abcd")
    (folder / file).symlink_to(outside / "0123abcd")
    message = refusal(folder, FileError)
    assert f"'{file}' is a symlink that leaves the model folders" in message
    assert "blobs" not in message
    assert open_checkpoint(folder, roots=[folder.parent, outside]).config == CONFIG


def test_a_shard_may_be_a_link_within_the_roots_only(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (folder / shard(1, 2)).rename(blobs / "b1")
    (folder / shard(1, 2)).symlink_to("../blobs/b1")
    assert "is a symlink that leaves the model folders" in refusal(folder, FileError)
    assert open_checkpoint(folder, roots=[folder.parent]).tensors.keys() == weight_map.keys()
    (blobs / "b1").unlink()
    assert f"'{shard(1, 2)}' is a symlink to a file that does not exist" in refusal(
        folder, FileError, roots=[folder.parent]
    )


def test_a_loop_of_symlinks_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("model.safetensors")
    assert "'model.safetensors' is a symlink to a file that does not exist" in refusal(folder, FileError)


def test_a_fifo_or_folder_in_place_of_a_file_does_not_block(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors is not a regular file" in refusal(folder, FileError)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json is not a regular file" in refusal(folder, FileError)
