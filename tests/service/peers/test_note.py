"""The note of a running service, and its lock: who has the tree, and since when."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from onedesk.service.config import own_version
from onedesk.service.core import ModelSpec
from onedesk.service.errors import PeerError
from onedesk.service.peers.note import (
    FILE_NAME,
    LOCK_NAME,
    Note,
    noted,
    only_one,
    running,
    taken,
)
from onedesk.service.peers.service import Finder, LocalService


def test_who_looks_for_a_service_is_not_taken_for_one(tmp_path: Path) -> None:
    with only_one(tmp_path):
        assert taken(tmp_path)
    lock = os.open(tmp_path / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # somebody else is looking
        assert not taken(tmp_path)
    finally:
        os.close(lock)


def test_a_note_is_read_once_and_a_new_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: reads.append(path) or real(path, **options))
    finder = Finder(tmp_path)
    assert finder.find() is None
    for port in (1, 2):
        with only_one(tmp_path):
            assert finder.find() is None  # it only starts
            with noted(tmp_path, Note(7, "1", "127.0.0.1", port, None, None)):
                found = [finder.find() for _ in range(5)]
                assert [one.address.port for one in found if one is not None] == [port] * 5
                assert len(reads) <= 3 * port
            assert finder.find() is None
        assert finder.find() is None


def test_what_a_dying_service_held_is_back_once_its_lock_is_free(tmp_path: Path) -> None:
    """One that is killed listens no longer some moments before its lock is free."""
    there, gone = threading.Event(), threading.Event()

    def die() -> None:
        with only_one(tmp_path), noted(tmp_path, Note(os.getpid(), own_version(), "127.0.0.1", 1, None, None)):
            there.set()
            gone.wait(60)

    dying = threading.Thread(target=die)
    dying.start()
    assert there.wait(60)
    service = LocalService(tmp_path, [])
    with pytest.raises(PeerError, match="no program listens there"):  # it does not go
        service.release(ModelSpec("m", None, "none"))
    threading.Timer(0.1, gone.set).start()
    assert service.release(ModelSpec("m", None, "none")) == ()
    dying.join()


def test_a_killed_services_note_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / FILE_NAME
    with only_one(tmp_path), noted(tmp_path, Note(7, "1", "127.0.0.1", 1, None, None)):
        written = left.read_bytes()
    left.write_bytes(written)
    real, seen = fcntl.flock, []

    def look(lock: int, kind: int) -> None:
        real(lock, kind)
        if kind & fcntl.LOCK_EX:
            seen.append((taken(tmp_path), running(tmp_path)))

    monkeypatch.setattr(fcntl, "flock", look)
    with only_one(tmp_path):
        assert seen == [(True, None)]
    left.write_bytes(written)
    with only_one(tmp_path), noted(tmp_path, Note(8, "1", "127.0.0.1", 2, None, None)):
        with pytest.raises(PeerError, match=r"runs already \(process 8"), only_one(tmp_path):
            pass
        note = running(tmp_path)
    assert note is not None
    assert note.pid == 8
