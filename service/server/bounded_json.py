"""Parses untrusted JSON, after counting the objects that it would become.

Python's parser holds the interpreter lock from the first byte to the last, even in a thread: 8 MiB of `[],[],...`
become 3 million lists, and nothing else in the process runs for seconds. Counting the same 8 MiB takes some tens of
milliseconds. A document within the limits is parsed in less than 0.2 s.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

# A conversation of 10,000 messages has 50,000 strings. A prompt that fills the longest context of a Qwen is a list of 1
# million numbers.
LISTS_LIMIT, TEXTS_LIMIT, ITEMS_LIMIT = 65_536, 131_072, 1_500_000
# Levels of lists and objects. Schemas, templates and grammars recurse over them, with several Python frames per level.
DEPTH_LIMIT = 128


def parse(raw: bytes) -> Any:
    """The document in `raw`, UTF-8. Raises ValueError for invalid JSON, for NaN and infinities, and for more lists,
    strings or items than the limits; RecursionError for a document that is nested too deeply.
    """
    _check_counts(raw)
    document = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    _check_depth(document)
    return document


def _check_depth(document: Any) -> None:
    level = [document] if isinstance(document, list | dict) else []
    for _ in range(DEPTH_LIMIT):
        inner = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in inner if isinstance(item, list | dict)]
        if not level:
            return
    raise RecursionError(f"it is nested more than {DEPTH_LIMIT} levels deep")


def _check_counts(raw: bytes) -> None:
    lists, texts, items = _counts(raw)
    if lists > LISTS_LIMIT or texts > TEXTS_LIMIT or items > ITEMS_LIMIT:
        # The content of strings does not count. A quotation mark after an even number of backslashes ends its string.
        plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
        texts = plain.count(b'"') // 2
        if texts <= TEXTS_LIMIT:
            lists, _, items = _counts(b"".join(plain.split(b'"')[::2]))
    for count, limit, title in (
        (lists, LISTS_LIMIT, "lists and objects"),
        (texts, TEXTS_LIMIT, "texts"),
        (items, ITEMS_LIMIT, "items"),
    ):
        if count > limit:
            raise ValueError(f"it has {count:,} {title}; at most {limit:,} are read")


def _counts(raw: bytes) -> tuple[int, int, int]:
    """Numbers of lists and objects, of strings, and of their items, counted by brackets, quotation marks and commas."""
    return raw.count(b"[") + raw.count(b"{"), raw.count(b'"') // 2, raw.count(b",")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
