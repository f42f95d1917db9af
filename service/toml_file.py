"""Reads a settings file of limited size, and checks the type and range of its values."""

from __future__ import annotations

import math
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .errors import FileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_LIMIT = 1 << 20  # bytes

Kind = Literal["text", "texts", "whole", "number", "bytes", "flag"]
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE | re.ASCII)
_LARGEST_SIZE = 2**60  # bytes; more than that is a typing mistake
_UNITS: Mapping[str, int] = {
    "": 1,
    **{p: 1000**i for i, p in enumerate("KMGT", 1)},
    **{p + "I": 1024**i for i, p in enumerate("KMGT", 1)},
}
_WORDS: Mapping[Kind, str] = {
    "text": "a text",
    "texts": "a list of texts",
    "whole": "a whole number",
    "number": "a number",
    "bytes": 'whole bytes or a text such as "4GiB"',
    "flag": "true or false",
}


def parse_bytes(text: str) -> int:
    """Bytes from "4GiB", "512 MiB", "2G" or "1000"; ValueError for any other text. KiB is 1024, KB is 1000."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else math.inf
    if size > _LARGEST_SIZE:
        raise ValueError(f"{text[:40]!r} is not a size; write for example 4GiB, 512MiB or a number of bytes")
    return int(size)


def read_document(path: Path) -> dict[str, Any]:
    """The document of a TOML file. Raises FileError for one that is absent, unreadable, too large or not TOML."""
    try:
        return tomllib.loads(_read_plain(path).decode("utf-8-sig"))
    except OSError as error:
        shown = path.name or str(path)
        raise FileError(
            f"cannot read the configuration {shown}: {error.strerror}; name another file with --config"
        ) from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise FileError(
            f"{path.name} is nested too deeply to be a configuration; write tables of plain values"
        ) from error
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python reads
        raise FileError(f"{path.name} is not valid TOML: {error}") from error


def _read_plain(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, and FileError for anything else or more than FILE_LIMIT bytes."""
    # O_NONBLOCK: a FIFO instead of the file must not block the caller for ever
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"the configuration {path.name} is not a regular file; name another file with --config")
        raw = file.read(FILE_LIMIT + 1)
    if len(raw) > FILE_LIMIT:
        raise FileError(
            f"the configuration {path.name} has more than {FILE_LIMIT} bytes; name another file with --config"
        )
    return raw


def checked(where: str, kind: Kind, value: Any, bounds: tuple[float, float] | None) -> Any:
    """The value as it is used. Raises FileError, which starts with `where`, for another kind or a value out of
    `bounds`."""
    if kind == "bytes" and isinstance(value, str):
        try:
            read: Any = parse_bytes(value)
        except ValueError as error:
            raise FileError(f"{where}: {error}") from error
    elif _fits_kind(kind, value):
        read = value
    else:
        raise FileError(f"{where} is {value!r:.80}; use {_WORDS[kind]}")
    if bounds and not bounds[0] <= read <= bounds[1]:
        raise FileError(f"{where} is {value!r:.80}; use {bounds[0]} to {bounds[1]}")
    return read


def _fits_kind(kind: Kind, value: Any) -> bool:
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, int) and not isinstance(value, bool) and (kind == "whole" or value >= 0)
