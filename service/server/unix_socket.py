"""The unix socket of a service, and a record that identifies a stale socket, so that a later service may remove it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ..errors import FileError

RECORD_NAME = "service.socket.json"


def make_socket(path: Path, cache: Path) -> socket.socket:
    """A bound socket that only this user can reach. Replaces only a stale socket of a service of this tree.

    Raises FileError if the path is taken by something else, or the socket cannot be created.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        remove_socket(cache, path)
        if os.path.lexists(path):
            raise FileError(
                f"{path.name} is there already, and no service of this tree has left it; remove it, or name another"
                " with --uds"
            )
        made.bind(str(path))
        _write_record(path, cache)
    except OSError as error:
        made.close()
        raise FileError(
            f"the socket {path.name} cannot be made: {error.strerror or error}; name another with --uds"
        ) from error
    except FileError:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


def remove_socket(cache: Path, path: Path | None = None) -> None:
    """Remove the socket in this tree's record (with `path`: only if it is that one), unless another file or socket has
    the path by now. One service per tree runs at a time, so no process listens on it.
    """
    record = cache / RECORD_NAME
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        made = Path(known["path"])
        if path is not None and made != path.absolute():
            return
        if _identity(made) == known["identity"]:
            made.unlink()
        record.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        return


def _write_record(path: Path, cache: Path) -> None:
    part = cache / f".{RECORD_NAME}.part"
    part.write_text(json.dumps({"path": str(path.absolute()), "identity": _identity(path)}), encoding="utf-8")
    part.replace(cache / RECORD_NAME)


def _identity(path: Path) -> list[int] | None:
    """What distinguishes a socket from any other file at its path; None if there is no file."""
    found = path.lstat()
    return [found.st_dev, found.st_ino, found.st_mtime_ns] if path.is_socket() and not path.is_symlink() else None
