"""How option values of the command are read; each raises ArgumentTypeError with what would be right."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container
from typing import NoReturn

from ..console import UsageError
from ..errors import OnedeskError
from ..loader.files import short
from ..toml_file import parse_bytes

_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf)")


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def as_typed(error: Exception, taken: Container[str]) -> str:
    """The message of an error for somebody at a terminal: a field that is one of the options `taken` is called as it is typed there."""
    if not isinstance(error, OnedeskError):
        return str(error)
    return error.told(lambda name: f"--{name.replace('_', '-')}" if name in taken else name)


def token_ids(text: str) -> tuple[int, ...]:
    """Read "1,2,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise argparse.ArgumentTypeError(f"{short(text)} is no list of token ids; write for example 1,2,3")
    return tuple(map(int, parts))


def whole_from(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `low`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= low):
            raise argparse.ArgumentTypeError(f"{short(text)} is no whole number from {low}, of at most 19 digits")
        return int(text)

    return read


def whole(text: str) -> int:
    """Read a whole number; what range it must lie in is checked with the request."""
    if not _WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{short(text)} is no whole number; write for example 64")
    return int(text)


def number(text: str) -> float:
    """Read a number; what range it must lie in is checked with the request."""
    if not _NUMBER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{short(text)} is no number; write for example 0.7")
    return float(text)


def size(text: str) -> int:
    """Read bytes: "24GiB", "512MiB", or a whole number."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{short(text)} is no size; write for example 24GiB, 512MiB or a number of bytes") from None


def batches(text: str) -> list[int]:
    """Read "1,2,4"."""
    return [whole_from(1)(part) for part in text.split(",")]


def switch(text: str) -> bool:
    """Read "on" or "off"."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{short(text)} is neither on nor off")
    return text == "on"
