"""JSON from outside, parsed only after what it would become was counted.

Python's parser holds the interpreter lock from the first byte to the last, also in a thread: 8 MiB of `[],[],...`
become 3 million lists, and for seconds nothing else in the process runs. Counting the same 8 MiB takes some tens of
milliseconds, and what is within the limits is parsed in less than 0.2 s.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

# A conversation of 10,000 messages has 50,000 texts; a prompt of the longest context of a Qwen is a list of 1 million
# numbers.
LISTS_LIMIT, TEXTS_LIMIT, ITEMS_LIMIT = 65_536, 131_072, 1_500_000


def parse(raw: bytes) -> Any:
    """The document in `raw`, UTF-8. Raises ValueError, also for NaN and its like, and for more lists, texts or items
    than the limits;
    RecursionError for one that is nested too deeply."""
    _check_counts(raw)
    return json.loads(raw.decode("utf-8"), parse_constant=_refuse)


def _check_counts(raw: bytes) -> None:
    lists, texts, items = _counts(raw)
    if lists > LISTS_LIMIT or texts > TEXTS_LIMIT or items > ITEMS_LIMIT:
        # What stands inside of texts counts for nothing. Behind an even number of backslashes a quotation mark ends its
        # text.
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
    """Lists and objects, texts, and items of both, where all brackets, quotation marks and commas count."""
    return raw.count(b"[") + raw.count(b"{"), raw.count(b'"') // 2, raw.count(b",")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
