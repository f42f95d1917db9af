"""How a family says what its config means and which tensors it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, by name, with the shape that the config implies."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor of the network: the sources, stacked along the first dimension in this order.

    `part` says when it is needed: i + 1 with block i, after the last block with the head. 0 is the embedding: of it a prompt's rows are
    read when they are needed, and all of it comes last, for a head that is tied to it and for decode. `wide`: held in fp32 (norms).
    `bits`: the fewest that a number of it may be turned into on load.
    """

    key: str
    sources: tuple[Source, ...]
    part: int
    wide: bool = False
    bits: int = 4

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(s.shape[0] for s in self.sources), *self.sources[0].shape[1:])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ConfigReader:
    """Typed access to a config.json; a wrong or missing value is a ModelError that names the key, what it is and what is needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"config.json has {key} = {value!r}; a whole number from 1 is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"config.json has {key} = {value!r}; a number above 0 is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json has {key} = {value!r}; true or false is needed")
        return value

    def require(self, key: str, allowed: Any, meaning: str) -> None:
        """Refuse any value of `key` but `allowed` (absent is allowed): it changes the arithmetic in a way that is not supported."""
        value = self._config.get(key)
        if value is not None and value != allowed:
            raise ModelError(f"config.json has {key} = {value!r}; only {allowed!r} is supported ({meaning})")

    def rope_theta(self, default: float) -> float:
        """The base of the plain rotary embedding, from rope_parameters or the older rope_theta; scaled kinds are refused, not guessed."""
        for key in ("rope_parameters", "rope_scaling"):
            rope = self._config.get(key)
            if rope is None:
                continue
            if not isinstance(rope, Mapping):
                raise ModelError(f"config.json has {key} = {rope!r}; an object is needed")
            kind = rope.get("rope_type", rope.get("type", "default"))
            unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
            if kind != "default" or unknown:
                named = ", ".join([f"rope_type {kind!r}", *unknown])
                raise ModelError(f"config.json asks for rotary scaling that is not supported: {named}; supported is rope_type 'default'")
            if "rope_theta" in rope:
                return ConfigReader(rope).number("rope_theta")
        return self.number("rope_theta", default)
