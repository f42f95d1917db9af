"""From the text of a widget to values: stop strings, logit biases, lists of layers."""

from __future__ import annotations

import json
import math
import re

from ..service.errors import RequestError

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
_ESCAPE = re.compile(r"\\([nt\\])")
_BIAS = re.compile(r"""\s*(?P<token>\d+|"(?:[^"\\]|\\.)*")\s*[:=\s]\s*(?P<bias>[-+.\w]+)\s*""")


def parse_stops(text: str) -> tuple[str, ...]:
    r"""One stop string per line, blanks kept; `\n`, `\t` and `\\` are line end, tab, backslash. Skips empty lines."""
    return tuple(_ESCAPE.sub(lambda match: _ESCAPES[match[1]], line) for line in text.splitlines() if line)


def parse_bias(text: str) -> tuple[tuple[int | str, float], ...]:
    """One `TOKEN: BIAS` per line; TOKEN is an id or a text in double quotes (JSON escapes), BIAS a number or -inf.

    Raises RequestError naming the line that cannot be read.
    """
    return tuple(_bias(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _bias(number: int, line: str) -> tuple[int | str, float]:
    match = _BIAS.fullmatch(line)
    try:
        if match is None:
            raise ValueError
        token, bias = json.loads(match["token"]), float(match["bias"])
        if math.isnan(bias):
            raise ValueError
    except ValueError:
        raise RequestError(
            f'logit_bias, line {number}: {line.strip()[:60]!r}; write a token and a number, as 1234: -5 or " cat": 2.5'
        ) from None
    return token, bias


def parse_layers(text: str) -> tuple[int, ...]:
    """`3, 6` or `-2`: the blocks after which states are taken, negative from the end. Raises RequestError for a part
    that is not a number.
    """
    parts = [part for part in re.split(r"[,;\s]+", text.strip()) if part]
    try:
        layers = tuple(int(part) for part in parts)
    except ValueError:
        raise RequestError(
            f"layers is {text[:60]!r}; write whole numbers with commas between them, as -2 or 9, 18, 27"
        ) from None
    if not layers:
        raise RequestError("layers is empty; write for example -2 (the state before the last block) or 9, 18, 27")
    return layers


def or_default(value: float, lowest: float) -> float | None:
    """None, the model's own default, for a number below the lowest valid one."""
    return None if value < lowest else value
