"""The only reader for the JSON files of a model folder: it checks their size before it builds any object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .files import json_kind, read_whole, short

# transformers writes int(1e30), which has 31 digits, for an unlimited length.
DIGITS = 64
DEPTH = 64  # levels; published files have at most 8
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of a file: bytes, lists and objects, quotation marks, and commas.

    An empty list takes 3 bytes in the file and 64 in memory, so a limit on bytes alone does not limit memory.
    """

    nbytes: int
    containers: int
    quotes: int
    commas: int


# A config.json with settings for 70,000 quantized matrices has about 9 MB, 70,000 objects and 300,000 quotation marks.
DOCUMENT = JsonLimits(16 << 20, 100_000, 1_000_000, 500_000)
# The index of a checkpoint with 152,089 tensors has about 18 MB.
INDEX_DOCUMENT = JsonLimits(64 << 20, 1_000, 3_000_000, 1_000_000)


def read_json_object(path: Path, shown: str, limits: JsonLimits = DOCUMENT) -> dict[str, Any]:
    """The JSON object in a small UTF-8 file. FileError when it cannot be read, ModelError when it is not a JSON object.

    Whole numbers have at most DIGITS digits, lists and objects are nested at most DEPTH levels deep.
    """
    return parse_json_object(read_whole(path, shown, limits.nbytes), shown, limits)


def parse_json_object(raw: bytes, shown: str, limits: JsonLimits = DOCUMENT) -> dict[str, Any]:
    """As `read_json_object`, for a file's content."""
    if raw.startswith(LFS_POINTER):
        raise ModelError(f"{shown} is only a Git LFS pointer; download the file itself (git lfs pull)")
    check_counts(raw, shown, limits)

    def whole(digits: str) -> int:
        if len(digits) > DIGITS:
            raise ModelError(
                f"{shown} has a whole number of {len(digits)} digits{_key_of(raw, digits)}; at most {DIGITS} are read"
            )
        return int(digits)

    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_int=whole)
    except UnicodeDecodeError as error:
        raise ModelError(f"{shown} is not UTF-8 text (byte {error.start}); download it again") from None
    except RecursionError:
        raise ModelError(_too_deep(shown)) from None
    except ValueError as error:
        raise ModelError(f"{shown} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{shown} holds a JSON {json_kind(value)}; an object with named values is needed")
    _check_depth(value, shown)
    return value


def check_counts(raw: bytes, shown: str, limits: JsonLimits) -> None:
    """ModelError where a JSON file would become too many objects. Characters inside strings count too: valid files stay
    far below.
    """
    counts = (
        ("lists and objects", raw.count(b"{") + raw.count(b"["), limits.containers),
        ("quotation marks", raw.count(b'"'), limits.quotes),
        ("commas", raw.count(b","), limits.commas),
    )
    for what, found, most in counts:
        if found > most:
            raise ModelError(
                f"{shown} holds {found:,} {what}; a file of a checkpoint has at most {most:,}: download it again"
            )


def _check_depth(value: Mapping[str, Any], shown: str) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ModelError(_too_deep(shown))


def _too_deep(shown: str) -> str:
    return f"{shown} is nested more than {DEPTH} levels deep, which no file of a checkpoint is; download it again"


def _key_of(raw: bytes, digits: str) -> str:
    """The key of a number, as far as the text before it shows."""
    before = raw[: raw.find(digits.encode())].decode("utf-8", "replace")[-200:].rstrip(" \t\r\n[-")
    parts = before.rsplit('"', 2)
    return f" at {short(parts[1])}" if len(parts) == 3 and parts[2].strip() == ":" else ""
