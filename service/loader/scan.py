"""The JSON of a header, read entry by entry: a hostile header is refused at its first fault, before it fills memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..errors import FileError
from .files import json_kind, short

ENTRY_LIMIT = 1 << 16  # characters that describe one tensor; typical ones have about 100
METADATA_LIMIT = 100_000  # entries
DAMAGED = "the file is damaged; download it again"

_SPACE = re.compile(r"[ \t\n\r]*")


class HeaderText:
    """A cursor over the header's text. Every method raises FileError, naming the file, for an invalid header."""

    def __init__(self, raw: bytes, shown: str) -> None:
        self._shown = shown
        self._at = 0
        self._decoder = json.JSONDecoder(object_pairs_hook=_unique)
        try:
            self._text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{shown}: the header is not UTF-8 text (byte {error.start} of it); {DAMAGED}") from None
        if not self._text.startswith("{"):
            raise FileError(f"{shown}: the header does not begin with an object; {DAMAGED}")

    def keys(self) -> Iterator[str]:
        """The keys of the object that starts here. The caller reads each value before it asks for the next key.
        Duplicate keys are refused.
        """
        self._take("{")
        if self._peek() == "}":
            self._at += 1
            return
        seen: set[str] = set()
        while True:
            key = self._string()
            if key in seen:
                raise FileError(f"{self._shown}: the header has the key {short(key)} twice; {DAMAGED}")
            seen.add(key)
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def texts(self) -> dict[str, str]:
        """The object of strings that starts here."""
        if self._peek() != "{":
            raise FileError(f"{self._shown}: __metadata__ is not an object; {DAMAGED}")
        found: dict[str, str] = {}
        for key in self.keys():
            if self._peek() != '"':
                raise FileError(f"{self._shown}: __metadata__ has a value for {short(key)} that is not text; {DAMAGED}")
            found[key] = self._string()
            if len(found) > METADATA_LIMIT:
                raise FileError(f"{self._shown}: __metadata__ has more than {METADATA_LIMIT} entries; {DAMAGED}")
        return found

    def flat_object(self, where: str) -> dict[str, Any]:
        """The object that starts here; it must not nest and has at most ENTRY_LIMIT characters. `where` names it in
        messages.
        """
        if self._peek() != "{":
            raise FileError(f"{where} is not described by an object; {DAMAGED}")
        end = self._text.find("}", self._at, self._at + ENTRY_LIMIT)
        if end < 0:
            raise FileError(f"{where} has a description without an end in {ENTRY_LIMIT} characters; {DAMAGED}")
        try:
            value = self._decoder.decode(self._text[self._at : end + 1])
        except _DuplicateKeyError as error:
            raise FileError(f"{where} has the key {short(error.args[0])} twice; {DAMAGED}") from None
        except (ValueError, RecursionError):
            raise FileError(f"{where} has a description that is not JSON; {DAMAGED}") from None
        self._at = end + 1
        return value

    def finish(self) -> None:
        """Only white space may follow."""
        if self._peek():
            raise self._wrong("the end")

    def _peek(self) -> str:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, wanted: str) -> str:
        found = self._peek()
        if not found or found not in wanted:
            raise self._wrong(" or ".join(wanted))
        self._at += 1
        return found

    def _string(self) -> str:
        if self._peek() != '"':
            raise self._wrong("a text in quotes")
        try:
            value, self._at = self._decoder.raw_decode(self._text, self._at)
        except ValueError:
            raise self._wrong("a text that ends") from None
        return value

    def _wrong(self, wanted: str) -> FileError:
        found = short(self._text[self._at : self._at + 16]) if self._at < len(self._text) else "its end"
        return FileError(
            f"{self._shown}: the header is not JSON: {wanted} is wanted at character {self._at}, there is {found};"
            f" {DAMAGED}"
        )


class _DuplicateKeyError(ValueError):
    """A duplicate key in an object; the only argument is the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return result


def say(value: Any) -> str:
    """A value from the header, truncated for a message: a shape may have thousands of entries, or one of a thousand
    digits.
    """
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(v) for v in value[:8]) + (", ...]" if len(value) > 8 else "]")
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {json_kind(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return short(value, 40) if isinstance(value, str) else repr(value)
