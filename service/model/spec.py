"""How a family describes its config and its required tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError, brief
from ..kernels.rotary import Yarn, yarn_attention

# Transforms of a complete tensor: 1 + w (norms stored around zero), -exp(w) (decays stored as logarithms), or a
# convolution [C, 1, K] transposed to [K, C] in memory.
Turn = Literal["", "plus_one", "minus_exp", "taps_first"]
YARN, ORIGINAL = "yarn", "original_max_position_embeddings"
_YARN_KEYS = {ORIGINAL, "factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
_AXES = frozenset({"mrope_section", "mrope_interleaved"})
_PARTIAL = _AXES | {"partial_rotary_factor"}
# The normal numbers of a 32-bit float.
SMALLEST_FLOAT, LARGEST_FLOAT = 1.17549435e-38, 3.4028235e38
# For `Destination.bits`: keep the stored type, or fp32; never quantize to integers.
FLOATING = 16


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, by name, with the shape that the config implies.

    `stored` is how the file has it where that differs (experts in one tensor [E, rows, cols] are rows [E * rows, cols]
    here).
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
    """A tensor of the network: its sources, stacked along the first dimension in this order.

    `part` says when it is needed: i + 1 with block i, after the last block with the head. 0 is the embedding: a
    prompt's rows of it are read when they are needed, and all of it comes last, for a tied head and for decode. `wide`:
    held in fp32 (norms). `bits`: the fewest bits per number that a load may quantize it to. `joined`: the one tensor
    that may replace all sources. `used`: the share of it that one token uses (of experts the chosen ones). `in_file`: a
    table that stays in its file.
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


LARGEST = 2**31 - 1  # of any whole number that a config gives as a size
# Limits far above any published network: this program makes one object for each.
LAYERS, EXPERTS, EXPERTS_OF_ALL_LAYERS = 1000, 4096, 1 << 18
ENTRIES = 1000  # of a list with one entry per layer


class ConfigReader:
    """Typed access to a config.json; a wrong or missing value is a ModelError that names the key, what it is and
    what is needed.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= most:
            limit = "2^31-1" if most == LARGEST else f"{most:,}"
            raise ModelError(f"config.json has {key} = {brief(value)}; a whole number from 1 to {limit} is needed")
        return value

    def layers(self) -> int:
        """How many layers there are."""
        return self.integer("num_hidden_layers", most=LAYERS)

    def experts(self) -> int:
        """How many experts there are. transformers 5 writes qwen3_moe's as num_local_experts; two names must agree."""
        local = "num_local_experts"
        count = self.integer("num_experts" if self.has("num_experts") else local, most=EXPERTS)
        if self.has(local) and self.integer(local) != count:
            raise ModelError(
                f"config.json has num_experts = {count} and {local} = {self.integer(local)}; get the one that belongs"
                " to the weights"
            )
        if count * self.layers() > EXPERTS_OF_ALL_LAYERS:
            raise ModelError(
                f"config.json has {count} experts in {self.layers()} layers; at most {EXPERTS_OF_ALL_LAYERS:,} are"
                " possible in all"
            )
        return count

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that fp32, in which the network computes, holds without rounding it to 0."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not SMALLEST_FLOAT <= value <= LARGEST_FLOAT
        ):
            raise ModelError(
                f"config.json has {key} = {brief(value)}; a number above 0 is needed, from {SMALLEST_FLOAT:g} to"
                f" {LARGEST_FLOAT:g}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json has {key} = {brief(value)}; true or false is needed")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        """The whole numbers from 0 that `key` lists, at most ENTRIES; none where it is absent."""
        value = self._config.get(key)
        if value is None:
            return ()
        whole = (
            isinstance(value, list)
            and len(value) <= ENTRIES
            and all(type(item) is int and 0 <= item <= LARGEST for item in value)
        )
        if not whole:
            raise ModelError(
                f"config.json has {key} = {brief(value)}; a list of whole numbers from 0 is needed, at most {ENTRIES}"
            )
        return tuple(value)

    def require(self, key: str, allowed: Any, meaning: str, *also: Any) -> None:
        """Refuse any value of `key` but `allowed` (absent is allowed): other values change the arithmetic in an
        unsupported way.
        """
        value = self._config.get(key)
        if value is not None and value != allowed and value not in also:
            raise ModelError(f"config.json has {key} = {brief(value)}; only {allowed!r} is supported ({meaning})")

    def rope_theta(self, default: float) -> float:
        """The base of the rotary embedding, from rope_parameters or the older rope_theta; of the scaled kinds only YaRN
        is accepted.
        """
        return (self._rope(frozenset()) or self).number("rope_theta", self.number("rope_theta", default))

    def axes_rope(self, default: float) -> float:
        """The base of a rotary embedding that has an axis for the rows and one for the columns of pictures."""
        return (self._rope(_AXES) or self).number("rope_theta", self.number("rope_theta", default))

    def axes(self, pairs: int, default: tuple[int, ...], *, interleaved: bool) -> tuple[int, ...]:
        """The axis that rotates each of the `pairs` of a head: 0 time, 1 row, 2 column; text has the same position on
        all three.

        The sections give the pairs per axis: consecutive, or `interleaved` from the lowest pair on, with time taking
        the rest.
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
        """Base and width of a rotary embedding of part of a head (a quarter by default).

        mrope_section and mrope_interleaved assign an axis of a picture to each pair: for text all axes equal the
        token's position.
        """
        rope = self._rope(_PARTIAL) or self
        factor = rope.number("partial_rotary_factor", self.number("partial_rotary_factor", 0.25))
        width = int(head_dim * factor)
        if factor > 1 or width < 2 or width % 2:
            raise ModelError(
                f"config.json has partial_rotary_factor = {factor} of head_dim = {head_dim}: {width} dimensions; an"
                " even number is needed"
            )
        return rope.number("rope_theta", self.number("rope_theta", default)), width

    def max_position(self) -> int:
        """The most positions of prompt and answer together: with YaRN the trained length times its factor."""
        stated = self.integer("max_position_embeddings", 32768)
        yarn = self.yarn()
        return stated if yarn is None else max(1, min(LARGEST, yarn.reach))

    def yarn(self) -> Yarn | None:
        """The YaRN scaling in rope_parameters or rope_scaling; None where there is none."""
        rope = next((rope for rope in self._ropes() if _kind(rope) == YARN), None)
        if rope is None:
            return None
        read = ConfigReader(rope)
        original = read.integer(ORIGINAL, self.integer("max_position_embeddings", 32768))
        factor = read.number("factor", self.integer("max_position_embeddings", 32768) / original)
        scale, scale_of_all = read.number("mscale", 0.0), read.number("mscale_all_dim", 0.0)
        usual = (
            yarn_attention(factor, scale) / yarn_attention(factor, scale_of_all)
            if scale and scale_of_all
            else yarn_attention(factor)
        )
        fast, slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
        theta = self._theta(rope)
        if fast < slow or theta <= 1:
            raise ModelError(
                f"config.json has beta_fast = {fast:g}, beta_slow = {slow:g} and rope_theta = {theta:g} for YaRN; the"
                " first must be at least the second, and the third above 1"
            )
        return Yarn(factor, original, fast, slow, read.number("attention_factor", usual), read.flag("truncate", True))

    def _theta(self, rope: Mapping[str, Any]) -> float:
        return ConfigReader(rope).number("rope_theta", self.number("rope_theta", 10000.0))

    def _ropes(self) -> Iterator[Mapping[str, Any]]:
        for key in ("rope_parameters", "rope_scaling"):
            rope = self._config.get(key)
            if rope is None:
                continue
            if not isinstance(rope, Mapping):
                raise ModelError(f"config.json has {key} = {brief(rope)}; an object is needed")
            yield rope

    def _rope(self, understood: frozenset[str]) -> ConfigReader | None:
        """rope_parameters or rope_scaling, whichever gives the base; refuses any key outside `understood`."""
        found: dict[str, Any] = {}
        for rope in self._ropes():
            kind = _kind(rope)
            if kind == "mrope" and understood & _AXES:  # the older name of the default with axes
                kind = "default"
            known = {"rope_type", "type", "rope_theta"} | understood | (_YARN_KEYS if kind == YARN else set())
            unknown = sorted(set(rope) - known)
            if kind not in ("default", YARN) or unknown:
                named = ", ".join([f"rope_type {brief(kind)}", *map(str, unknown[:8])])
                raise ModelError(
                    f"config.json asks for rotary scaling that is not supported: {named}; supported are rope_type"
                    " 'default' and 'yarn'"
                )
            found = {**rope, **found}
        return ConfigReader(found) if found else None


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
