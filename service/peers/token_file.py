"""The token that a client must show: created once, stored in a file that only its owner can read, compared in constant
time.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from ..errors import FileError

FILE_NAME = "service.token"
FILE_LIMIT = 4096  # bytes
SHORTEST = 16  # characters
_RANDOM_BYTES = 32


def load_token(path: Path) -> str:
    """The token in `path`. Creates it, in a file of mode 0600, if there is none.

    Raises FileError for a file that others can read, that is not a regular file of ours, or that contains no token.
    Messages never contain the token itself.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            _make(path)
    except OSError as error:
        raise FileError(
            f"the token file {path.name} cannot be made: {error.strerror}; name another with --token-file"
        ) from error
    return read_token(path)


def _make(path: Path) -> None:
    """Write a token to a temporary file, then rename it. The file is complete or absent, even on a full disk, after a
    kill, or when two services start at once. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(_RANDOM_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(part, path)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            part.rename(path)  # a file system without hard links
    finally:
        part.unlink(missing_ok=True)


_ADVICE = "delete it to have one made, or name another with --token-file"


def read_token(path: Path, *, shortest: int = SHORTEST, advice: str = _ADVICE) -> str:
    """The token in `path`, of at least `shortest` characters.

    Raises FileError as `load_token` does, and if there is no file; the message ends with `advice`.
    """
    try:
        # O_NONBLOCK: a FIFO in place of the file must not block forever
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            content = file.read(FILE_LIMIT + 1)
    except OSError as error:
        raise FileError(f"the token file {path.name} cannot be read: {error.strerror}; {advice}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise FileError(f"the token file {path.name} is not a regular file of this user; {advice}")
    if found.st_mode & 0o077:
        raise FileError(
            f"the token file {path.name} can be read by others (mode {found.st_mode & 0o777:o}); chmod 600 it"
        )
    text = content.decode("latin-1").strip()
    if len(content) > FILE_LIMIT or len(text) < shortest or not text.isascii() or not text.isprintable() or " " in text:
        raise FileError(f"the token file {path.name} holds no token: {shortest} or more printable characters; {advice}")
    return text


def matches(shown: str, token: str) -> bool:
    """Whether two tokens are equal, in constant time."""
    return hmac.compare_digest(
        *(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (shown, token))
    )
