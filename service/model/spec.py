"""How a family says what its config means and which tensors it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError

# What numbers become when they are all there: 1 + w (norms stored around zero), -exp(w) (decays stored as logarithms), or channels and
# taps of a convolution [C, 1, K] with the taps first, so that the memory holds [K, C].
Turn = Literal["", "plus_one", "minus_exp", "taps_first"]
_AXES = frozenset({"mrope_section", "mrope_interleaved"})
_PARTIAL = _AXES | {"partial_rotary_factor"}
# For `Destination.bits`: as stored, or wide; never turned into integers.
FLOATING = 16


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, by name, with the shape that the config implies.

    `stored` is how the file has it where that differs (experts in one tensor [E, rows, cols] are rows [E * rows, cols] here).
    `by_columns`: each of the E has its columns one after the other, `stored` is [E, cols, rows].
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...] = ()
    by_columns: bool = False

    @property
    def in_file(self) -> tuple[int, ...]:
        return self.stored or self.shape


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor of the network: the sources, stacked along the first dimension in this order.

    `part` says when it is needed: i + 1 with block i, after the last block with the head. 0 is the embedding: of it a prompt's rows are
    read when they are needed, and all of it comes last, for a head that is tied to it and for decode. `wide`: held in fp32 (norms).
    `bits`: the fewest that a number of it may be turned into on load. `joined`: the one tensor that may stand in for all sources.
    `used`: the share of it that one token meets (of experts the chosen ones). `in_file`: a table that stays in its file.
    """

    key: str
    sources: tuple[Source, ...]
    part: int
    wide: bool = False
    bits: int = 4
    turn: Turn = ""
    joined: Source | None = None
    used: float = 1.0
    in_file: bool = False

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
            raise ModelError(f"config.json has {key} = {value!r}; a whole number from 1 to 2^31-1 is needed")
        return value

    def experts(self) -> int:
        """How many experts there are. transformers 5 writes qwen3_moe's as num_local_experts; two names must agree."""
        local = "num_local_experts"
        count = self.integer("num_experts" if self.has("num_experts") else local)
        if self.has(local) and self.integer(local) != count:
            raise ModelError(
                f"config.json has num_experts = {count} and {local} = {self.integer(local)}; get the one that belongs to the weights"
            )
        return count

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

    def numbers(self, key: str) -> tuple[int, ...]:
        """The whole numbers from 0 that `key` lists; none where it is absent."""
        value = self._config.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
            raise ModelError(f"config.json has {key} = {value!r}; a list of whole numbers from 0 is needed")
        return tuple(value)

    def require(self, key: str, allowed: Any, meaning: str, *also: Any) -> None:
        """Refuse any value of `key` but `allowed` (absent is allowed): it changes the arithmetic in a way that is not supported."""
        value = self._config.get(key)
        if value is not None and value != allowed and value not in also:
            raise ModelError(f"config.json has {key} = {value!r}; only {allowed!r} is supported ({meaning})")

    def rope_theta(self, default: float) -> float:
        """The base of the plain rotary embedding, from rope_parameters or the older rope_theta; scaled kinds are refused, not guessed."""
        return (self._rope(frozenset()) or self).number("rope_theta", self.number("rope_theta", default))

    def axes_rope(self, default: float) -> float:
        """The base of a rotary embedding that has an axis for the rows and one for the columns of pictures."""
        return (self._rope(_AXES) or self).number("rope_theta", self.number("rope_theta", default))

    def axes(self, pairs: int, default: tuple[int, ...], *, interleaved: bool) -> tuple[int, ...]:
        """Which axis turns each of the `pairs` of a head: 0 time, 1 row, 2 column; text has the same position on all three.

        The sections say how many pairs each axis has: one after the other, or `interleaved` from the lowest on, time taking the rest.
        """
        rope = self._rope(_PARTIAL)
        if rope is not None:
            rope.require("mrope_interleaved", interleaved, "how the axes of pictures share a head")
        sections = (rope.numbers("mrope_section") if rope is not None else ()) or default
        if len(sections) != 3 or (not interleaved and sum(sections) != pairs):
            raise ModelError(
                f"config.json has mrope_section = {list(sections)}; three numbers are needed that add up to {pairs}"
            )
        if not interleaved:
            return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))

    def partial_rope(self, head_dim: int, default: float) -> tuple[float, int]:
        """Base and width of a rotary embedding of part of a head (a quarter where nothing says otherwise).

        mrope_section and mrope_interleaved say which axis of a picture turns which pair: for text all axes are the token's position.
        """
        rope = self._rope(_PARTIAL) or self
        factor = rope.number("partial_rotary_factor", self.number("partial_rotary_factor", 0.25))
        width = int(head_dim * factor)
        if factor > 1 or width < 2 or width % 2:
            raise ModelError(
                f"config.json has partial_rotary_factor = {factor} of head_dim = {head_dim}: {width} dimensions; an even number is needed"
            )
        return rope.number("rope_theta", self.number("rope_theta", default)), width

    def _rope(self, understood: frozenset[str]) -> ConfigReader | None:
        """rope_parameters or rope_scaling where one says the base, once nothing in it asks for more than is `understood`."""
        found = None
        for key in ("rope_parameters", "rope_scaling"):
            rope = self._config.get(key)
            if rope is None:
                continue
            if not isinstance(rope, Mapping):
                raise ModelError(f"config.json has {key} = {rope!r}; an object is needed")
            kind = rope.get("rope_type", rope.get("type", "default"))
            unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta"} - understood)
            if kind == "mrope" and understood & _AXES:  # the older name of the default with axes
                kind = "default"
            if kind != "default" or unknown:
                named = ", ".join([f"rope_type {kind!r}", *unknown])
                raise ModelError(f"config.json asks for rotary scaling that is not supported: {named}; supported is rope_type 'default'")
            found = found or ConfigReader(rope)
        return found
