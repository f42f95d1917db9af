"""The command's options: those that every subcommand has, and parsers of values. Their ArgumentTypeError says what is
allowed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import NoReturn

from ..console import UsageError
from ..core import QUANTIZATIONS
from ..errors import OnedeskError
from ..loader.files import short
from ..toml_file import parse_bytes

SUCCESS, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130

# Default of --model. Subcommands that open no model have no default.
_MODEL_DEFAULTS: Mapping[str, str] = {
    **dict.fromkeys(("models", "serve"), "; default: all"),
    **dict.fromkeys(("memory", "doctor", "demo", "pull", "knowledge"), ""),
}
_ONE_MODEL = "; default: the configured or the only one"
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf)")


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class Subcommands:
    """The subcommands of a parser, each with the common options."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def add(
        self, name: str, run: Callable[[argparse.Namespace], int], text: str, *, json: bool = True, model: str = "store"
    ) -> argparse.ArgumentParser:
        """Add a subcommand that calls `run`; `model` is the action of --model, `json` whether there is --json."""
        parser = self._parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        parser.set_defaults(run=run, parser=parser)
        which = "a name as `onedesk models` lists it, or a path" + _MODEL_DEFAULTS.get(name, _ONE_MODEL)
        parser.add_argument("--model", action=model, metavar="NAME|FOLDER|FILE", help=which)
        form = "keep the weights as stored (none, the default), or quantize them to 8 or 4 bits"
        parser.add_argument("--quant", choices=QUANTIZATIONS, default="none", help=form)
        context = "tokens of prompt and answer together, 2 or more; default: the configured context, else 4096"
        parser.add_argument("--context", type=whole_from(2), metavar="N", help=context)
        device = "auto, the default: CUDA if there is a GPU"
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
        parser.add_argument(
            "--config", type=named_path, metavar="FILE", help="an onedesk.toml other than the installation's"
        )
        parser.add_argument(
            "-v", "--verbose", action="count", default=0, help="log more on stderr; twice for everything"
        )
        if json:
            parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return parser


def as_typed(error: Exception, taken: Container[str]) -> str:
    """An error's message for a terminal: a field that is one of the options `taken` is shown as its option."""
    if not isinstance(error, OnedeskError):
        return str(error)
    return error.render(lambda name: f"--{name.replace('_', '-')}" if name in taken else name)


def token_ids(text: str) -> tuple[int, ...]:
    """Read "1,2,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise argparse.ArgumentTypeError(f"{short(text)} is not a list of token ids; write for example 1,2,3")
    return tuple(map(int, parts))


def whole_from(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `low`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= low):
            raise argparse.ArgumentTypeError(f"{short(text)} is not a whole number from {low}, of at most 19 digits")
        return int(text)

    return read


def whole(text: str) -> int:
    """Read a whole number; its range is checked with the request."""
    if not _WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{short(text)} is not a whole number; write for example 64")
    return int(text)


def number(text: str) -> float:
    """Read a number; its range is checked with the request."""
    if not _NUMBER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{short(text)} is not a number; write for example 0.7")
    return float(text)


_LEAST_SIZE = 1 << 20


def named_path(text: str) -> Path:
    """Read a path; an empty one would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or folder, or leave the option out")
    return Path(text)


def size(text: str) -> int:
    """Read bytes: "24GiB", "512MiB", or a whole number from 1 MiB: a smaller one lacks its unit."""
    try:
        value = parse_bytes(text)
        if value < _LEAST_SIZE and text.strip().isdigit():
            raise argparse.ArgumentTypeError(
                f"{text.strip()} is so many bytes; add the unit, such as {text.strip()}GiB"
            )
        return value
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{short(text)} is not a size; write for example 24GiB, 512MiB or a number of bytes"
        ) from None


def rate(text: str) -> int:
    """Read bytes per second: "273GB/s"."""
    number = text.strip().removesuffix("/s")
    try:
        value = parse_bytes(number)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{short(text)} is not a memory bandwidth; write for example 273GB/s")
    return value


def batches(text: str) -> list[int]:
    """Read "1,2,4"."""
    return [whole_from(1)(part) for part in text.split(",")]


def switch(text: str) -> bool:
    """Read "on" or "off"."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{short(text)} is neither on nor off")
    return text == "on"
