"""Reads one object of a config.json. What is not understood is refused by its field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ..errors import ModelError, brief

LARGEST_GROUP = 1 << 30
TEXTS = 20_000  # in one field; published files list about 2,000 modules


class Fields:
    """The fields of one object of the config. `path` names it in messages."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path

    def get(self, *keys: str) -> Any:
        """The first of `keys` that is present and not null."""
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def refuse(self, key: str, supported: str) -> NoReturn:
        found = brief(self._values.get(key))
        raise ModelError(
            f"config.json has {self._path}.{key} = {found}, which is not supported; supported: {supported}"
        )

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The value of `key`, or `default` if absent. It must be one of `allowed`."""
        value = self.get(key)
        if value is None:
            value = default
        if not any(type(value) is type(known) and value == known for known in allowed):
            self.refuse(key, ", ".join(repr(known) for known in allowed))
        return value

    def absent(self, key: str, meaning: str) -> None:
        """Refuse `key` unless it is empty."""
        if self.get(key):
            self.refuse(key, f"none ({meaning})")

    def group(self, key: str) -> int:
        """Columns under one scale, 0 for all of a row (-1 in the file)."""
        value = self.get(key)
        if type(value) is not int or not (value == -1 or (0 < value <= LARGEST_GROUP and value % 32 == 0)):
            self.refuse(key, "-1 (all columns of a row) and multiples of 32")
        return max(0, value)

    def over(self, other: Fields) -> Fields:
        """These fields, plus those of `other` that are missing here."""
        return Fields({**other._values, **self._values}, self._path)

    def inner(self, key: str) -> Fields:
        value = self.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Fields(value, f"{self._path}.{key}")

    def each(self, key: str) -> Iterator[tuple[str, Fields]]:
        """The objects in the object `key`, by name."""
        inner = self.inner(key)
        for name in inner._values:
            yield str(name), inner.inner(name)

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts that `key` lists, none if absent."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > TEXTS or not all(isinstance(text, str) for text in value):
            self.refuse(key, f"a list of at most {TEXTS:,} texts")
        return tuple(value)
