"""The socket of --uds: only one that a service of this tree left behind is removed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from onedesk.service.errors import FileError
from onedesk.service.server.unix_socket import RECORD_NAME, make_socket, remove_socket


def test_what_a_killed_service_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "it.sock"
    make_socket(path, tmp_path).close()  # closed, not removed: as after a kill
    first = path.stat().st_ino, path.stat().st_mtime_ns
    made = make_socket(path, tmp_path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) != first
    remove_socket(tmp_path)
    assert not path.exists()
    assert not (tmp_path / RECORD_NAME).exists()
    made.close()


@pytest.mark.parametrize("kind", ["listening", "dead", "file", "folder", "link", "dangling"])
def test_what_is_not_ours_stays(tmp_path: Path, kind: str) -> None:
    cache, path = tmp_path / "cache", tmp_path / "it.sock"
    cache.mkdir()
    foreign = socket.socket(socket.AF_UNIX)
    if kind in ("listening", "dead"):
        foreign.bind(str(path))
        foreign.listen() if kind == "listening" else foreign.close()
    elif kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere" if kind == "dangling" else cache)
    before = path.lstat()
    with pytest.raises(FileError, match="remove it, or name another"):
        make_socket(path, cache)
    assert (path.lstat().st_ino, path.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    foreign.close()


def test_a_socket_that_took_the_place_of_ours_stays(tmp_path: Path) -> None:
    path = tmp_path / "it.sock"
    make_socket(path, tmp_path).close()
    path.unlink()
    foreign = socket.socket(socket.AF_UNIX)
    foreign.bind(str(path))
    os.utime(path, ns=(1, 1))  # a file system may give the same inode again
    remove_socket(tmp_path)
    assert path.is_socket()
    with pytest.raises(FileError, match="no service of this tree"):
        make_socket(path, tmp_path)
    foreign.close()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", '{"path": 5}', '{"path": "x"}', '{"path": "x", "identity": "y"}']
)
def test_a_record_that_makes_no_sense_removes_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "it.sock"
    made = make_socket(path, tmp_path)
    (tmp_path / RECORD_NAME).write_text(content)
    remove_socket(tmp_path)
    assert path.is_socket()
    made.close()
