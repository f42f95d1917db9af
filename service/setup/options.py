"""How option values of the command are read; each raises ArgumentTypeError with what would be right."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def token_ids(text: str) -> tuple[int, ...]:
    """Read "1,2,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write for example 1,2,3")
    return tuple(map(int, parts))


def whole_from(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `low`."""

    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= low):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {low}")
        return int(text)

    return whole


def batches(text: str) -> list[int]:
    """Read "1,2,4"."""
    return [whole_from(1)(part) for part in text.split(",")]


def switch(text: str) -> bool:
    """Read "on" or "off"."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"
