"""onedesk.json says what was pulled: complete, N of M, or changed; --verify hashes all of it again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from onedesk.service.errors import FileError
from onedesk.service.hub.manifest import MANIFEST, state_of, verify
from pulling import Desk

SHARD = "model-00001-of-00002.safetensors"


def verified(desk: Desk) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    verify(desk.models / "model", MANIFEST, lambda: False, events.append)
    return events


def text_of(desk: Desk) -> str:
    state = state_of(desk.models / "model")
    assert state is not None
    return state.text


def test_a_complete_model_is_complete_and_verifies(desk: Desk):
    desk.pull()
    assert text_of(desk) == "complete"
    assert {event["state"] for event in verified(desk)} == {"verified"}


def test_an_unfinished_model_says_how_many_of_its_files_are_there(desk: Desk):
    desk.pull()
    (desk.models / "model" / SHARD).unlink()
    assert text_of(desk) == "8 of 9"
    with pytest.raises(FileError, match=f"'{SHARD}' is missing"):
        verified(desk)


def test_an_edited_file_is_seen_at_a_glance_and_repaired_by_a_pull(desk: Desk):
    desk.pull()
    config = desk.models / "model" / "config.json"
    config.write_bytes(config.read_bytes().replace(b"qwen3", b"qwen4"))
    assert text_of(desk) == "changed"
    with pytest.raises(FileError, match=r"'config\.json' has other bytes.*repairs it"):
        verified(desk)
    desk.pull()
    assert desk.same_files()
    assert text_of(desk) == "complete"


def test_one_changed_byte_of_a_shard_is_found_by_verify_and_repaired(desk: Desk):
    desk.pull()
    shard = desk.models / "model" / SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FileError, match="has other bytes"):
        verified(desk)
    done = desk.pull()
    assert done["fetched"] == len(content)
    assert desk.same_files()


def test_a_folder_that_was_copied_is_complete_and_hashed_once(desk: Desk):
    desk.pull()
    os.utime(desk.models / "model" / SHARD, (1, 1))
    assert text_of(desk) == "complete"
    assert desk.pull()["fetched"] == 0


def test_a_folder_without_a_manifest_was_not_pulled(desk: Desk):
    (desk.models / "model").mkdir()
    assert state_of(desk.models / "model") is None
    with pytest.raises(FileError, match="was not pulled"):
        verified(desk)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        "{}",
        '{"source": "s", "repo": "r", "commit": "c", "files": 3}',
        '{"source": "s", "repo": "r", "commit": "c", "files": [{"path": "../x", "size": 1}]}',
        '{"source": "s", "repo": "r", "commit": "c", "files": [{"path": "x", "size": -1}]}',
        '{"source": "s", "repo": "r", "commit": "c", "files": [null]}',
    ],
)
def test_a_manifest_that_says_nothing_is_named(desk: Desk, text: str):
    (desk.models / "model").mkdir()
    (desk.models / "model" / MANIFEST).write_text(text)
    with pytest.raises(FileError, match=r"onedesk\.json.*remove"):
        state_of(desk.models / "model")


def test_the_manifest_is_there_before_the_first_file(desk: Desk):
    seen: list[int] = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "file" and not seen:
            seen.append(len(json.loads((desk.models / "model" / MANIFEST).read_text())["files"]))

    desk.on_event = look
    desk.pull()
    assert seen == [9]


def test_no_fetched_byte_stays_in_the_page_cache_on_purpose(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    """Every byte of a shard is given up after it was synced: on unified memory a download must not displace running
    models.
    """
    dropped: dict[str, set[int]] = {}
    real = os.posix_fadvise

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            name = Path(f"/proc/self/fd/{fd}").readlink().name.removesuffix(".part")
            dropped.setdefault(name, set()).update(range(offset, offset + length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    desk.pull()
    size = len(desk.hub.repositories["tiny/model"].files[SHARD])
    assert dropped[SHARD] == set(range(size))
