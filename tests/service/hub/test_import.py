"""Files that are there already are taken by their hashes, whatever they are called, and never changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub_server import sha256
from onedesk.service.errors import FileError, RequestError
from pulling import Desk

SHARD = "model-00001-of-00002.safetensors"


def copy_of(desk: Desk, folder: Path) -> Path:
    for path, content in desk.hub.repositories["tiny/model"].files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def test_a_plain_folder_gives_every_file_and_stays_as_it_was(desk: Desk, tmp_path: Path):
    source = copy_of(desk, tmp_path / "copy")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.rglob("*") if path.is_file()}
    assert desk.pull(local=source)["fetched"] == 0
    assert desk.same_files()
    assert {event["state"] for event in desk.told("file")} == {"imported"}
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.rglob("*") if path.is_file()
    }


def test_files_are_found_by_their_hashes_under_any_name(desk: Desk, tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    for content in desk.hub.repositories["tiny/model"].files.values():
        (tmp_path / "blobs" / sha256(content)).write_bytes(content)
    assert desk.pull(local=tmp_path / "blobs")["fetched"] == 0
    assert desk.same_files()


def test_what_the_folder_lacks_or_has_wrong_is_fetched(desk: Desk, tmp_path: Path):
    source = copy_of(desk, tmp_path / "copy")
    (source / "config.json").unlink()
    damaged = bytearray((source / SHARD).read_bytes())
    damaged[-1] ^= 1
    (source / SHARD).write_bytes(damaged)
    desk.pull(local=source)
    assert desk.same_files()
    states = {event["path"]: event["state"] for event in desk.told("file")}
    assert {path for path, state in states.items() if state == "fetched"} == {"config.json", SHARD}
    assert (source / SHARD).read_bytes() == damaged


def test_a_large_file_takes_no_second_place_on_the_same_disk(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from onedesk.service.hub import local_files

    monkeypatch.setattr(local_files, "LINKED_FROM", 100_000)
    source = copy_of(desk, tmp_path / "copy")
    desk.pull(local=source)
    linked, copied = desk.models / "model" / SHARD, desk.models / "model" / "config.json"
    # A reflink has an inode of its own; where the disk has none it is a hard link.
    assert linked.stat().st_ino == (source / SHARD).stat().st_ino or linked.stat().st_nlink == 1
    assert copied.stat().st_ino != (source / "config.json").stat().st_ino


def test_a_part_that_an_interrupted_import_linked_is_not_written_into(desk: Desk, tmp_path: Path):
    source = copy_of(desk, tmp_path / "copy")
    (desk.models / "model").mkdir()
    (desk.models / "model" / f"{SHARD}.part").hardlink_to(source / SHARD)
    before = (source / SHARD).read_bytes()
    desk.pull()
    assert desk.same_files()
    assert (source / SHARD).read_bytes() == before
    assert (source / SHARD).stat().st_ino != (desk.models / "model" / SHARD).stat().st_ino


def test_a_folder_that_is_not_there_is_named(desk: Desk, tmp_path: Path):
    with pytest.raises(FileError, match="--import absent is not a folder"):
        desk.pull(local=tmp_path / "absent")


def test_no_hub_is_asked_where_that_is_forbidden(desk: Desk, tmp_path: Path):
    desk.environment["HF_HUB_OFFLINE"] = "1"
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set"):
        desk.pull()
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set"):
        desk.pull(local=copy_of(desk, tmp_path / "copy"))
    assert desk.hub.asked == []


def test_a_pull_without_a_hub_repairs_nothing_but_says_what_to_do(desk: Desk, tmp_path: Path):
    source = copy_of(desk, tmp_path / "copy")
    shutil.rmtree(source / "original")
    (desk.tree / "onedesk.toml").write_text('[hub]\nendpoints = ["http://127.0.0.1:9"]\norder = ["hf"]\n')
    with pytest.raises(Exception, match=r"no connection to 127\.0\.0\.1"):
        desk.pull(local=source)
